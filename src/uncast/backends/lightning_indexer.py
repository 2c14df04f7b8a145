"""The lightning indexer of sparse attention in torch: scores of stored keys, and the tokens that each query attends to.

Keys are read block by block as they are stored. Scratch: for a tile of queries, their per-head scores of one block, at most
`QUERY_ROWS` rows (heads x queries), and their scores over the whole context, at most `TILE_SCORES` or one query's. Any device
will do; lengths come to the host, so a CUDA graph cannot capture it. On a GPU with Triton `kernels.index_select` does the work
for the keys and queries it takes, and can be captured.

Definition and ties: `uncast.attention.indexer_oracle`. A query's choice depends on the other queries of its request only
through the rounding of a matrix product, and on no other request.
"""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise

import torch

from uncast.attention.contents import visible_rows
from uncast.attention.problem import Problem, ProblemError
from uncast.latent.index_keys import IndexLayout, load_keys

BLOCK_KEYS = 512
QUERY_ROWS = 2048
TILE_SCORES = 2**22


def select_tokens(
    q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, problem: Problem, layout: IndexLayout
) -> torch.Tensor:
    """The `indices` of one layer's `MLAPagedAttention.run`.

    Args:
        q: [total_q, heads, head_dim], any float dtype, rope applied.
        weights: float32 [total_q, heads], scales included.
        cache: uint8 [num_pages, page_size, row_bytes]; the keys of this call's tokens are in it.
        problem: of a plan with `topk`.

    Returns:
        int32 [total_q, topk]: tokens in order of position, then -1.

    Raises:
        ProblemError: a dense plan.
    """
    spec, device = problem.spec, q.device
    if spec.topk == 0:
        raise ProblemError("the plan is for dense attention, which selects no tokens: pass topk to plan()")
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from uncast.kernels import index_select

        if index_select.refusal(layout, q.dtype) is None:
            return index_select.select_tokens(q, weights, cache, problem, layout)
    starts, tables, lengths = problem.qo_indptr.tolist(), problem.kv_indptr.tolist(), problem.kv_len_arr.tolist()
    visible = visible_rows(starts, lengths, spec.causal)
    indices = torch.full((problem.total_q, spec.topk), -1, dtype=torch.int32, device=device)
    for request, kv_len in enumerate(lengths):
        step = _tile(q.shape[1], kv_len)
        pages = problem.kv_indices[tables[request] : tables[request] + -(-kv_len // spec.page_size)]
        for begin in range(starts[request], starts[request + 1], step):
            rows = slice(begin, min(begin + step, starts[request + 1]))
            most, seen = int(visible[rows].max()), visible[rows].to(device)
            if most <= spec.topk:
                places = torch.arange(most, dtype=torch.int32, device=device).expand(seen.shape[0], -1)
                indices[rows, :most] = places.masked_fill(places >= seen[:, None], -1)
                continue
            scores = _scores(q[rows], weights[rows], cache, pages, most, layout)
            scores.masked_fill_(torch.arange(most, device=device) >= seen[:, None], -math.inf)
            indices[rows] = choose(scores, seen, spec.topk)
    return indices


def _tile(heads: int, kv_len: int) -> int:
    """Queries of a request whose scores are held at once."""
    return max(1, min(QUERY_ROWS // heads, TILE_SCORES // max(1, kv_len)))


def keys_read(problem: Problem, heads: int) -> int:
    """How many stored keys `select_tokens` reads for `problem` and `heads`: a tile of queries reads all that its last one sees,
    or none if that is at most topk."""
    starts, lengths = problem.qo_indptr.tolist(), problem.kv_len_arr.tolist()
    visible = visible_rows(starts, lengths, problem.spec.causal)
    most = [
        int(visible[begin : min(begin + _tile(heads, kv_len), last)].max())
        for (first, last), kv_len in zip(pairwise(starts), lengths, strict=True)
        for begin in range(first, last, _tile(heads, kv_len))
    ]
    return sum(count for count in most if count > problem.spec.topk)


def choose(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """int32 [n, topk] of scores float32 [n, tokens], tokens >= topk, whose tokens from `visible` int64 [n] on are -inf.

    A NaN counts as the largest score, so that it is not hidden. Overwrites `scores`.
    """
    scores.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    least = scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    room = topk - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= room))
    tokens = taken.nonzero()[:, 1].view(-1, topk)
    return tokens.masked_fill_(tokens >= visible[:, None], -1).to(torch.int32)


def _scores(
    q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, count: int, layout: IndexLayout
) -> torch.Tensor:
    """float32 [n, count] over the first `count` keys of `pages`."""
    queries, heads, width = q.shape
    flat, page_size = q.reshape(queries * heads, width).float(), cache.shape[1]
    per_head = weights.float()[:, None]
    scores = torch.empty(queries, count, device=q.device)
    pages_per_block = max(1, BLOCK_KEYS // page_size)
    for start in range(0, count, pages_per_block * page_size):
        end = min(start + pages_per_block * page_size, count)
        first = start // page_size
        keys = load_keys(cache, pages[first : first + -(-(end - start) // page_size)], end - start, layout)
        dots = (flat @ keys.T).relu_().view(queries, heads, -1)
        torch.bmm(per_head, dots, out=scores[:, None, start:end])
    return scores
