"""A mixture of 16-bit experts for few tokens, two launches, no sorting: every (token, slot) pair reads its expert's rows.

    gated    one program = ROWS channels of one pair:     act[pair] = silu(gate x) * (up x)
    summed   one program = ROWS channels of one token:    out = sum over its slots of weight * (down act)

The shared experts are further slots of every token, with weight 1: s of them in one MLP are s slots.
An expert number outside 0..experts - 1 is an expert that is not here: its pair reads nothing and adds nothing.
Pairs are the fastest dimension of the grid, so that pairs of one expert read the same rows of it at the same time, through L2.
Products are fp32 on the CUDA cores: at few tokens the bytes of the weights decide. A token's bits depend on no other token.
Floor (GLM-4.7-Flash, one token, 4 + 1 experts of 2048 x 1536): 94 MB, 21 us at 4.4 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_TOKENS = 16
"""From here on tensor cores and each expert's rows once (`quant.grouped`) are better."""
ROWS, COLUMNS, NUM_WARPS = 8, 512, 4


@triton.jit
def gated_kernel(
    x, chosen, gate_up, shared, act,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid: pairs (token * SLOTS + slot), cdiv(WIDTH, ROWS). gate_up [EXPERTS, 2 WIDTH, HIDDEN]; shared
    [2 (SLOTS - TOP_K) WIDTH, HIDDEN]; act [pairs, WIDTH]."""
    pair = tl.program_id(0).to(tl.int64)
    token, slot = pair // SLOTS, pair % SLOTS
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, WIDTH - 1).to(tl.int64)[:, None]
    base, up = gate_up, WIDTH * HIDDEN
    here = slot >= TOP_K
    if slot < TOP_K:
        expert = tl.load(chosen + token * TOP_K + slot)
        here = (expert >= 0) & (expert < EXPERTS)
        base = gate_up + tl.where(here, expert, 0) * (2 * WIDTH * HIDDEN)
    else:
        base = shared + (slot - TOP_K) * (WIDTH * HIDDEN)
        up = (SLOTS - TOP_K) * WIDTH * HIDDEN
    if here:
        k = tl.arange(0, COLUMNS)
        gates = tl.zeros([ROWS, COLUMNS], tl.float32)
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, HIDDEN, COLUMNS, loop_unroll_factor=UNROLL):
            c = start + k
            live = (c < HIDDEN)[None, :]
            v = tl.load(x + token * HIDDEN + c, mask=c < HIDDEN, other=0.0).to(tl.float32)[None, :]
            at = base + row * HIDDEN + c[None, :]
            gates += tl.load(at, mask=live, other=0.0).to(tl.float32) * v
            ups += tl.load(at + up, mask=live, other=0.0).to(tl.float32) * v
        gate, total = tl.sum(gates, 1), tl.sum(ups, 1)
        value = gate / (1.0 + tl.exp(-gate)) * total
        tl.store(act + pair * WIDTH + n, value.to(act.dtype.element_ty), mask=n < WIDTH)


@triton.jit
def summed_kernel(
    act, chosen, weights, down, shared, out,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, cdiv(HIDDEN, ROWS). down [EXPERTS, HIDDEN, WIDTH]; shared [HIDDEN, (SLOTS - TOP_K) WIDTH]; out [tokens,
    HIDDEN]."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, HIDDEN - 1).to(tl.int64)[:, None]
    k = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    steps: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    for step in tl.range(0, TOP_K * steps, loop_unroll_factor=UNROLL):
        slot, c = step // steps, (step % steps) * COLUMNS + k
        expert = tl.load(chosen + token * TOP_K + slot)
        here = (expert >= 0) & (expert < EXPERTS)
        live = c < tl.where(here, WIDTH, 0)
        weight = tl.load(weights + token * TOP_K + slot)
        v = tl.load(act + (token * SLOTS + slot) * WIDTH + c, mask=live, other=0.0).to(tl.float32) * weight
        at = down + (tl.where(here, expert, 0) * HIDDEN + row) * WIDTH + c[None, :]
        acc += tl.load(at, mask=live[None, :], other=0.0).to(tl.float32) * tl.where(live, v, 0.0)[None, :]
    if SLOTS > TOP_K:
        wide: tl.constexpr = (SLOTS - TOP_K) * WIDTH
        for start in tl.range(0, wide, COLUMNS, loop_unroll_factor=UNROLL):
            c = start + k
            live = c < (SLOTS - TOP_K) * WIDTH
            v = tl.load(act + (token * SLOTS + TOP_K) * WIDTH + c, mask=live, other=0.0).to(tl.float32)
            acc += tl.load(shared + row * wide + c[None, :], mask=live[None, :], other=0.0).to(tl.float32) * v[None, :]
    tl.store(out + token * HIDDEN + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < HIDDEN)


def constexprs(experts: int, top_k: int, slots: int, hidden: int, width: int) -> dict[str, object]:
    """Compile-time arguments of both kernels."""
    return {
        "EXPERTS": experts, "TOP_K": top_k, "SLOTS": slots, "HIDDEN": hidden, "WIDTH": width, "ROWS": ROWS,
        "COLUMNS": COLUMNS, "UNROLL": 4,
    }  # fmt: skip


def few_tokens_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `quant.grouped.moe` over dense stacks, plus the shared MLP (its gate_up [2 s intermediate, hidden], down [hidden, s
    intermediate]) if given: [n, hidden] in `dtype` (x's if None); summed in fp32, rounded once. May be captured in a graph."""
    (tokens, hidden), top_k = x.shape, chosen.shape[1]
    experts, width = gate_up.shape[0], gate_up.shape[1] // 2
    slots = top_k + (0 if shared is None else shared[1].shape[1] // width)
    act = x.new_empty(tokens * slots, width)
    out = torch.empty(tokens, hidden, dtype=dtype or x.dtype, device=x.device)
    args = constexprs(experts, top_k, slots, hidden, width)
    first, second = (gate_up, down) if shared is None else shared
    gated_kernel[(tokens * slots, triton.cdiv(width, ROWS))](
        x.contiguous(), chosen, gate_up, first, act, **args, num_warps=NUM_WARPS
    )
    summed_kernel[(tokens, triton.cdiv(hidden, ROWS))](
        act, chosen, weights, down, second, out, **args, num_warps=NUM_WARPS
    )
    return out
