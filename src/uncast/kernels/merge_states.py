"""Merges attention states (out, lse) over disjoint sets of rows: out = sum_i out_i 2^(lse_i - lse), lse = log2 sum_i 2^lse_i.

    one program = BLOCK (head, token) pairs x all channels; fp32 inside; a state of lse -inf weighs nothing, whatever it holds

A chain of merges carries an fp32 state and rounds once, at its end, where the values' power of two is taken back.
Floor: parts read, result written: at 4,096 tokens, 64 heads and 256 channels, two fp16 parts to bf16 are 403 MB, 92 us at
4.4 TB/s. Source: online softmax (Milakov, Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from uncast.kernels.up_project import OF_OUTPUT

LOG2E = 1.4426950408889634
LSE_MODES = {"2": 1.0, "e": 1.0 / LOG2E}


@dataclass(frozen=True)
class State:
    """out [heads, tokens, channels] fp16 or fp32 (unit last stride) and lse fp32 [heads, tokens], any strides; base 2 or e."""

    out: torch.Tensor
    lse: torch.Tensor
    lse_base: str


@triton.jit
def weighted(x, weight):
    """x * weight; 0 where the weight is 0, also of NaN."""
    return tl.where(weight[:, None] > 0.0, x.to(tl.float32) * weight[:, None], 0.0)


@triton.jit(do_not_specialize=["tokens", "rows"])
def merge_states_kernel(
    x, y, out, lse_x, lse_y, lse_out, factors, tokens, rows, to_base2_x, to_base2_y, from_base2,
    x_h, x_t, y_h, y_t, out_h, out_t, lse_x_h, lse_x_t, lse_y_h, lse_y_t, lse_out_h, lse_out_t,
    WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr, LAST: tl.constexpr,
    STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(rows, BLOCK), rows = heads * tokens. TWO: there is a y; LAST: multiply by the output's factor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < rows
    h, t = (i // tokens).to(tl.int64), (i % tokens).to(tl.int64)
    c = tl.arange(0, WIDTH_POW2)
    mask = live[:, None] & (c < WIDTH)[None, :]
    a = tl.load(lse_x + h * lse_x_h + t * lse_x_t, mask=live, other=0.0) * to_base2_x
    top = a
    if TWO:
        b = tl.load(lse_y + h * lse_y_h + t * lse_y_t, mask=live, other=0.0) * to_base2_y
        top = tl.maximum(a, b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(a - shift)
    total = weight
    merged = weighted(tl.load(x + (h * x_h + t * x_t)[:, None] + c[None, :], mask=mask, other=0.0), weight)
    if TWO:
        weight = tl.exp2(b - shift)
        total += weight
        merged += weighted(tl.load(y + (h * y_h + t * y_t)[:, None] + c[None, :], mask=mask, other=0.0), weight)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    if LAST:
        inverse *= tl.load(factors + OF_OUTPUT)
    merged *= inverse[:, None]
    tl.store(out + (h * out_h + t * out_t)[:, None] + c[None, :], merged.to(out.dtype.element_ty), mask=mask)
    if STORE_LSE:
        lse = tl.where(total == 0.0, float("-inf"), shift + tl.log2(total)) * from_base2
        tl.store(lse_out + h * lse_out_h + t * lse_out_t, lse, mask=live)


def fold(x: State, y: State, channels: int) -> State:
    """The fp32 state of both, base 2, to go on with; written over `x` if that is one already."""
    heads, tokens = x.lse.shape
    carry = x
    if x.out.dtype != torch.float32:
        out = torch.empty(heads, tokens, channels, dtype=torch.float32, device=x.out.device)
        carry = State(out, torch.empty(heads, tokens, dtype=torch.float32, device=out.device), "2")
    _launch(x, y, None, carry.out, carry.lse, carry.lse_base)
    return carry


def finish(
    states: list[State], factors: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None, lse_base: str = "2"
) -> None:
    """The result of one or two states.

    Args:
        factors: fp32 [6] of `up_project`, whose last one multiplies the output.
        out: [heads, tokens, channels], bf16, fp16 or fp32, any strides but a unit last one; written.
        lse: fp32 [heads, tokens] in `lse_base`; written if given.
    """
    _launch(states[0], states[1] if len(states) == 2 else None, factors, out, lse, lse_base)


def _launch(
    x: State, y: State | None, factors: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None, base: str
) -> None:
    heads, tokens, width = out.shape
    other, block = x if y is None else y, 8
    target = x.lse if lse is None else lse
    merge_states_kernel[(triton.cdiv(heads * tokens, block),)](
        x.out, other.out, out, x.lse, other.lse, target, x.lse if factors is None else factors, tokens, heads * tokens,
        *(1.0 if s.lse_base == "2" else LOG2E for s in (x, other)), LSE_MODES[base],
        *(t.stride(d) for t in (x.out, other.out, out, x.lse, other.lse, target) for d in (0, 1)),
        WIDTH=width, WIDTH_POW2=triton.next_power_of_2(width), BLOCK=block, TWO=y is not None,
        LAST=factors is not None, STORE_LSE=lse is not None, num_warps=4,
    )  # fmt: skip
