"""The lightning indexer's float64 oracle: which tokens a query attends to, written for reading.

    score[i, t] = sum_h weights[i, h] * relu(q[i, h] . k[t]),  t < kv_len - q_len + i + 1 when causal
    indices[i]  = the topk tokens with the largest scores; of equal scores the earlier token

`weights` are signed and hold every scale: weights_proj(x) / sqrt(heads * head_dim) in the models. A query that may see at most
topk tokens chooses all of them. Source: DeepSeek-V3.2-Exp's report, section 2.1.
"""

from __future__ import annotations

import torch

from uncast.attention.contents import visible_rows
from uncast.attention.problem import Problem
from uncast.latent.index_keys import IndexLayout, load_keys


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float64 [n, kv_len] of q [n, heads, head_dim], weights [n, heads] and keys [kv_len, head_dim]."""
    return torch.einsum("nh,nht->nt", weights.double(), (q.double() @ keys.double().T).relu())


def select_oracle(
    problem: Problem, q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, layout: IndexLayout
) -> torch.Tensor:
    """int32 [total_q, topk]: tokens in order of position, then -1; shapes as `backends.lightning_indexer.select_tokens`."""
    spec, starts = problem.spec, problem.qo_indptr.tolist()
    visible = visible_rows(starts, problem.kv_len_arr.tolist(), spec.causal).tolist()
    indices = torch.full((problem.total_q, spec.topk), -1, dtype=torch.int32, device=q.device)
    for request, kv_len in enumerate(problem.kv_len_arr.tolist()):
        first = int(problem.kv_indptr[request])
        pages = problem.kv_indices[first : first + -(-kv_len // spec.page_size)]
        keys = load_keys(cache, pages, kv_len, layout, torch.float64)
        for row in range(starts[request], starts[request + 1]):
            scores = index_scores(q[row : row + 1], weights[row : row + 1], keys[: visible[row]])[0]
            best = scores.sort(descending=True, stable=True).indices[: spec.topk].sort().values
            indices[row, : best.shape[0]] = best.to(torch.int32)
    return indices
