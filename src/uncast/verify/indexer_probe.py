"""Runs the lightning indexer on a small poisoned batch and compares what it selects with the float64 oracle's scores."""

from __future__ import annotations

import warnings

import torch

from uncast.attention import ClaimedCapabilityWarning, MLAPagedAttention, Problem, ProblemSpec
from uncast.attention.contents import visible_rows
from uncast.attention.indexer_oracle import index_scores
from uncast.backends.lightning_indexer import select_tokens
from uncast.latent.index_keys import IndexLayout, load_keys, store_keys
from uncast.verify.cases import make_case, plan_case

TOLERANCE = 1e-4
"""Of the largest sum over heads of |weight * relu(q . k)|: how far below the topk-th score a selected token may lie."""


def probe_indexer(backend: str, spec: ProblemSpec, heads: int, layout: IndexLayout) -> str:
    """Empty if the indexer selects well for a plan of `backend` and `spec` (with topk), else why not in one sentence.

    Queries have the spec's dtype. Requests have no token, one, topk, a few more and, beyond decode, several queries.
    """
    page, topk = spec.page_size, spec.topk
    kv_lens = [0, 1, topk, topk + 1, topk + 3 * page + 2]
    q_lens = [1, 1, 1, 1, 1] if spec.max_q_len == 1 else [1, 1, min(topk, spec.max_q_len), 2, spec.max_q_len]
    q_lens = [min(q, max(1, kv)) for q, kv in zip(q_lens, kv_lens, strict=True)]
    case = make_case(spec, kv_lens, q_lens)
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((case.cache.shape[0], page, layout.row_bytes), 0xFF, dtype=torch.uint8, device=spec.device)
    for request, kv_len in enumerate(kv_lens):
        token = torch.arange(kv_len, device=spec.device)
        slots = case.block_tables[request].long()[token // page] * page + token % page
        store_keys(cache, torch.randn(kv_len, layout.head_dim, generator=generator).to(spec.device), slots, layout)
    rows = case.q_nope.shape[0]
    q = torch.randn(rows, heads, layout.head_dim, generator=generator).to(spec.device, spec.q_data_type)
    weights = (torch.randn(rows, heads, generator=generator) / (heads * layout.head_dim) ** 0.5).to(spec.device)
    attention = MLAPagedAttention(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClaimedCapabilityWarning)
        problem = plan_case(attention, spec, case)
    pristine = cache.clone()
    got, again = (select_tokens(q, weights, cache, problem, layout) for _ in range(2))
    fault = selection_fault(got, problem, q, weights, cache, layout)
    if not fault and not torch.equal(got, again):
        fault = "two runs on the same input do not give the same tokens in the same order"
    if not fault and not torch.equal(cache, pristine):
        fault = "it writes to the index cache"
    return f"the lightning indexer differs from its oracle: {fault}" if fault else ""


def selection_fault(
    got: torch.Tensor,
    problem: Problem,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    layout: IndexLayout,
) -> str:
    """Empty if every query row of `got` int32 [total_q, topk] selects as many different tokens as it can, none that it must
    not see, and none whose score is not among the best within `TOLERANCE`; else the first row that does not."""
    spec, starts = problem.spec, problem.qo_indptr.tolist()
    visible = visible_rows(starts, problem.kv_len_arr.tolist(), spec.causal).tolist()
    for request, kv_len in enumerate(problem.kv_len_arr.tolist()):
        first = int(problem.kv_indptr[request])
        pages = problem.kv_indices[first : first + -(-kv_len // spec.page_size)]
        keys = load_keys(cache, pages, kv_len, layout, torch.float64)
        for row in range(starts[request], starts[request + 1]):
            seen, chosen = visible[row], got[row][got[row] >= 0].long()
            wanted = min(spec.topk, seen)
            if int(chosen.unique().numel()) != wanted or chosen.numel() != wanted:  # type: ignore[no-untyped-call]
                return f"query row {row} selects {chosen.tolist()[:4]}... , not {wanted} different tokens"
            if wanted and int(chosen.max()) >= seen:
                return f"query row {row} selects token {int(chosen.max())} and may see {seen}"
            if wanted == seen:
                continue
            one = slice(row, row + 1)
            scores = index_scores(q[one], weights[one], keys[:seen])[0]
            room = TOLERANCE * float(index_scores(q[one], weights[one].abs(), keys[:seen]).max())
            least = float(scores.topk(wanted).values[-1])
            worst = int(chosen[scores[chosen].argmin()])
            if not float(scores[worst]) >= least - room:
                return (
                    f"query row {row} selects token {worst} with score {float(scores[worst]):.3e}, and {wanted} score "
                    f"{least:.3e} or more"
                )
    return ""
