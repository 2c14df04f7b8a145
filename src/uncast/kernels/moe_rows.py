"""Rows around the grouped products of a mixture, one launch each.

    spread     row i of the sorted pairs: the token's row                     one program = BLOCK channels of one pair
    collect    sorted row i, times its weight, to its pair's place             likewise; 0 for experts that are not here
    sum_parts  the sum of some rows, fp32, plus one more, rounded once         one program = BLOCK channels of one row

Floor: the rows themselves, a few KB each; as torch operations these were 15 launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.kernels.row_tile import new_rows

BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def spread_kernel(x, pairs, out, TOP_K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: pairs, cdiv(N, BLOCK)."""
    i, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(pairs + i) // TOP_K
    tl.store(out + i * N + c, tl.load(x + token * N + c, mask=c < N, other=0.0), mask=c < N)


@triton.jit
def collect_kernel(rows, pairs, ends, weights, out, EXPERTS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: pairs, cdiv(N, BLOCK). Sorted rows from ends[EXPERTS - 1] on hold anything."""
    i, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair, here = tl.load(pairs + i), i < tl.load(ends + EXPERTS - 1)
    value = tl.load(rows + i * N + c, mask=c < tl.where(here, N, 0), other=0.0).to(tl.float32)
    value = tl.where(here, value * tl.load(weights + pair), 0.0)
    tl.store(out + pair * N + c, value.to(out.dtype.element_ty), mask=c < N)


@triton.jit(do_not_specialize=["stride_row", "stride_part"])
def sum_parts_kernel(
    x, more, out, stride_row, stride_part, COUNT: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: rows, cdiv(N, BLOCK). out[r] = sum of COUNT rows of x, `stride_part` apart, from r * stride_row on (+ more[r])."""
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(COUNT):
        total += tl.load(x + r * stride_row + part * stride_part + c, mask=c < N, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(more + r * N + c, mask=c < N, other=0.0).to(tl.float32)
    tl.store(out + r * N + c, total.to(out.dtype.element_ty), mask=c < N)


def spread(x: torch.Tensor, pairs: torch.Tensor, top_k: int) -> torch.Tensor:
    """x[pairs // top_k]: [pairs, n] of contiguous x [tokens, n]."""
    out = x.new_empty(pairs.shape[0], x.shape[1])
    if pairs.shape[0]:
        grid = (pairs.shape[0], triton.cdiv(x.shape[1], BLOCK))
        spread_kernel[grid](
            x.contiguous(), pairs, out, TOP_K=top_k, N=x.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS
        )  # fmt: skip
    return out


def collect(rows: torch.Tensor, pairs: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[pairs, n] by pair of sorted rows [pairs, n], contiguous, each times weights fp32 [pairs]; ends int32 [experts]."""
    out, size = torch.empty_like(rows), rows.shape[1]
    if rows.shape[0]:
        collect_kernel[(rows.shape[0], triton.cdiv(size, BLOCK))](
            rows, pairs, ends, weights, out, EXPERTS=ends.shape[0], N=size, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return out


def sum_parts(x: torch.Tensor, dim: int, dtype: torch.dtype, more: torch.Tensor | None = None) -> torch.Tensor:
    """x.sum(dim) of contiguous x [parts, rows, n] (dim 0) or [rows, parts, n] (dim 1), plus more [rows, n]; in fp32, rounded to
    dtype once."""
    rows, count, size = x.shape[1 - dim], x.shape[dim], x.shape[2]
    out = new_rows(x, rows, size, dtype=dtype)
    if rows:
        sum_parts_kernel[(rows, triton.cdiv(size, BLOCK))](
            x, x if more is None else more.contiguous(), out, x.stride(1 - dim), x.stride(dim), COUNT=count, N=size,
            ADD=more is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
