"""The router of a mixture: logits of few tokens, the choice of experts, and pairs sorted by expert; one launch each.

    router_logits   fp32 dot products of a 16-bit row with fp32 rows       one program = one expert, one token
    choose          scores, groups, the top_k and their weights            one program = one token
    sort            (token, slot) pairs in the order of their experts      one program = all pairs

`models.layers.route` says what is computed. Of equal scores the lowest expert is chosen; a NaN counts as the largest score, as
torch's topk has it, so that an index never leaves the range. Floor: a launch each; router weights are 0.5 to 8 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_LOGIT_ROWS = 16
"""Tokens from which on a product of torch's is the better one: here each reads the router's weights for itself."""
MAX_PAIRS = 128
"""Pairs that one program sorts: it compares each with each."""


@triton.jit
def router_logits_kernel(x, router, logits, factor, D: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: experts, tokens."""
    expert, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    a = tl.load(x + token * D + i, mask=i < D, other=0.0).to(tl.float32)
    b = tl.load(router + expert * D + i, mask=i < D, other=0.0)
    tl.store(logits + token * tl.num_programs(0) + expert, tl.sum(a * b, 0) * factor)


@triton.jit
def choose_kernel(
    logits, bias, weights, chosen, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
    BIASED: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS_POW2: tl.constexpr, SIZE_POW2: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. Scores are held as [GROUPS_POW2, SIZE_POW2]."""
    token, size = tl.program_id(0).to(tl.int64), EXPERTS // GROUPS
    g, s = tl.arange(0, GROUPS_POW2)[:, None], tl.arange(0, SIZE_POW2)[None, :]
    expert, live = g * size + s, (g < GROUPS) & (s < size)
    none = float("-inf")
    x = tl.load(logits + token * EXPERTS + expert, mask=live, other=none)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        top = tl.max(tl.max(x, 1), 0)
        e = tl.where(live, tl.exp(x - top), 0.0)
        scores = e / tl.sum(tl.sum(e, 1), 0)
    rank = scores
    if BIASED:
        rank += tl.load(bias + expert, mask=live, other=0.0)
    rank = tl.where(rank != rank, float("inf"), rank)
    rank = tl.where(live, rank, none)
    if GROUPS > 1:
        best = tl.max(rank, 1)
        if SIGMOID:
            first = tl.min(tl.where(rank == best[:, None], s, SIZE_POW2), 1)
            best += tl.max(tl.where(s == first[:, None], none, rank), 1)
        i = tl.arange(0, GROUPS_POW2)
        best = tl.where(i < GROUPS, tl.where(best != best, float("inf"), best), none)
        kept = i < 0
        for _ in tl.static_range(TOP_GROUPS):
            winner = tl.min(tl.where(best == tl.max(best, 0), tl.where(kept, GROUPS_POW2, i), GROUPS_POW2), 0)
            kept = kept | (i == winner)
            best = tl.where(i == winner, none, best)
        rank = tl.where(kept[:, None], rank, none)
    k = tl.arange(0, TOP_K_POW2)
    of_slot, expert_of_slot = tl.zeros([TOP_K_POW2], tl.float32), tl.zeros([TOP_K_POW2], tl.int32)
    taken = expert < 0
    for slot in tl.static_range(TOP_K):
        top = tl.max(tl.max(rank, 1), 0)
        place = tl.where((rank == top) & live & (taken == 0), expert, EXPERTS)
        winner = tl.minimum(tl.min(tl.min(place, 1), 0), EXPERTS - 1)
        mine = (expert == winner) & live
        weight = tl.sum(tl.sum(tl.where(mine, scores, 0.0), 1), 0)
        of_slot = tl.where(k == slot, weight, of_slot)
        expert_of_slot = tl.where(k == slot, winner, expert_of_slot)
        taken = taken | mine
        rank = tl.where(mine, none, rank)
    if NORMALIZE:
        of_slot = of_slot / (tl.sum(of_slot, 0) + 1e-20)
    tl.store(weights + token * TOP_K + k, of_slot * scale, mask=k < TOP_K)
    tl.store(chosen + token * TOP_K + k, expert_of_slot.to(tl.int64), mask=k < TOP_K)


@triton.jit(do_not_specialize=["count"])
def sort_kernel(
    chosen, pairs, ends, count, EXPERTS: tl.constexpr, COUNT_POW2: tl.constexpr, EXPERTS_POW2: tl.constexpr
):
    """Grid: 1. A pair's place is how many pairs come before it: of lower experts, or of its own and earlier."""
    i = tl.arange(0, COUNT_POW2)
    mine = tl.load(chosen + i, mask=i < count, other=2147483647).to(tl.int32)
    row, column = mine[:, None], tl.load(chosen + i, mask=i < count, other=2147483647).to(tl.int32)[None, :]
    before = (column < row) | ((column == row) & (i[None, :] < i[:, None]))
    place = tl.sum(before.to(tl.int32), 1)
    tl.store(pairs + place, i.to(tl.int64), mask=i < count)
    e = tl.arange(0, EXPERTS_POW2)
    tl.store(ends + e, tl.sum((column <= e[:, None]).to(tl.int32), 1), mask=e < EXPERTS)


def router_logits(x: torch.Tensor, router: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """factor * x router^T: fp32 [n, experts] of x [n, hidden], 16 bits, and router fp32 [experts, hidden]."""
    rows, size = x.shape
    logits = torch.empty(rows, router.shape[0], dtype=torch.float32, device=x.device)
    router_logits_kernel[(router.shape[0], rows)](
        x.contiguous(), router, logits, factor, D=size, BLOCK=triton.next_power_of_2(size), num_warps=4
    )
    return logits


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    sigmoid: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 and experts int64, both [n, top_k], of contiguous logits fp32 [n, experts]; bias fp32 [experts]."""
    rows, experts = logits.shape
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    if rows:
        choose_kernel[(rows,)](
            logits, logits if bias is None else bias, weights, chosen, scale, EXPERTS=experts, GROUPS=groups,
            TOP_GROUPS=top_groups, TOP_K=top_k, SIGMOID=sigmoid, BIASED=bias is not None, NORMALIZE=normalize,
            GROUPS_POW2=triton.next_power_of_2(groups), SIZE_POW2=triton.next_power_of_2(experts // groups),
            TOP_K_POW2=triton.next_power_of_2(top_k), num_warps=1 if experts <= 64 else 4,
        )  # fmt: skip
    return weights, chosen


def sort(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """pairs int64 [n * top_k] and ends int32 [experts] of chosen int64 [n, top_k], 1 to `MAX_PAIRS` in all; see
    `quant.grouped.Routing`."""
    flat = chosen.reshape(-1)
    pairs = torch.empty_like(flat)
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    sort_kernel[(1,)](
        flat, pairs, ends, flat.shape[0], EXPERTS=experts, COUNT_POW2=triton.next_power_of_2(flat.shape[0]),
        EXPERTS_POW2=triton.next_power_of_2(experts), num_warps=8 if flat.shape[0] > 32 else 4,
    )  # fmt: skip
    return pairs, ends
