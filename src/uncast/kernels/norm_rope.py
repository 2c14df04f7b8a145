"""What a decoder layer does between its matrix products, one launch each: norms, the latent's parts, rope.

    add_rms_norm     sum = hidden + attended, normed = norm(sum)                    one program = one row
    latent_parts     c_q = norm(q_a x), ckv = norm(kv_a x), kpe = rope(kv_a x)      one program = one row of one of the two
    rotate           the rope channels of every head, in place                      one program = HEADS heads of one row
    silu_mul         silu(gate) * up                                                one program = BLOCK channels of one row

Rounding is torch's of the same steps (`models.layers.rms_norm`, `models.rope`): a norm rounds before its weight and after it,
and no multiply-add of a rotation is fused.
Floor: each reads and writes a few KB, so it costs a launch; as single torch operations these were 60 launches a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.kernels.cache_write import encode_bf16
from uncast.kernels.row_tile import new_rows

HEADS = 8
CHANNELS = 1024
"""Heads of a program of `rotate`, channels of one of `silu_mul`."""


@triton.jit
def norm_row(v, weight, size, eps, dtype: tl.constexpr):
    """v fp32 [BLOCK], zeros past `size`, normed in fp32, rounded to dtype before the weight."""
    scale = tl.rsqrt(tl.sum(v * v, 0) / size + eps)
    return (v * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit(do_not_specialize=["x_stride", "residual_stride"])
def add_rms_norm_kernel(
    x, residual, weight, out, total, x_stride, residual_stride, eps, factor,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid: rows. total = residual + factor * x with ADD, rounded as torch rounds both steps; out = norm of it, or of x."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = i < D
    dtype: tl.constexpr = out.dtype.element_ty
    v = tl.load(x + row * x_stride + i, mask=live, other=0.0).to(tl.float32)
    if ADD:
        v = (v * factor).to(dtype).to(tl.float32)
        v = (v + tl.load(residual + row * residual_stride + i, mask=live, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + row * D + i, v, mask=live)
        v = v.to(tl.float32)
    w = tl.load(weight + i, mask=live, other=0.0)
    tl.store(out + row * D + i, norm_row(v, w, D, eps, dtype).to(dtype), mask=live)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x rounded to dtype, as fp32 again; bf16 by integers, which Triton's interpreter needs."""
    if dtype == tl.bfloat16:
        return (encode_bf16(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def rotated(first, second, cos, sin, dtype: tl.constexpr):
    """Pairs turned by their angles, fp32 rounded to dtype."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return rounded(a * cos - b * sin, dtype), rounded(b * cos + a * sin, dtype)


@triton.jit(do_not_specialize=["q_stride", "kv_stride"])
def latent_parts_kernel(
    q_row, kv_row, q_norm, kv_norm, c_q, ckv, kpe, cos, sin, q_stride, kv_stride, eps,
    Q: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, Q_POW2: tl.constexpr, RANK_POW2: tl.constexpr,
    HALF_POW2: tl.constexpr, INTERLEAVED: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Grid: rows, 2 (1 without Q). q_row [rows, Q]; kv_row [rows, RANK + 2 HALF]; cos, sin fp32 [rows, HALF]; kpe is
    written with ROTATE only."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = ckv.dtype.element_ty
    if tl.program_id(1) == 0:
        i = tl.arange(0, RANK_POW2)
        v = tl.load(kv_row + row * kv_stride + i, mask=i < RANK, other=0.0).to(tl.float32)
        w = tl.load(kv_norm + i, mask=i < RANK, other=0.0)
        tl.store(ckv + row * RANK + i, norm_row(v, w, RANK, eps, dtype).to(dtype), mask=i < RANK)
        if ROTATE:
            j = tl.arange(0, HALF_POW2)
            live = j < HALF
            one = 2 * j if INTERLEAVED else j
            other = 2 * j + 1 if INTERLEAVED else j + HALF
            base = kv_row + row * kv_stride + RANK
            first = tl.load(base + one, mask=live, other=0.0).to(tl.float32)
            second = tl.load(base + other, mask=live, other=0.0).to(tl.float32)
            c = tl.load(cos + row * HALF + j, mask=live, other=0.0)
            s = tl.load(sin + row * HALF + j, mask=live, other=0.0)
            x, y = rotated(first, second, c, s, dtype)
            tl.store(kpe + row * (2 * HALF) + one, x, mask=live)
            tl.store(kpe + row * (2 * HALF) + other, y, mask=live)
    else:
        k = tl.arange(0, Q_POW2)
        query = tl.load(q_row + row * q_stride + k, mask=k < Q, other=0.0).to(tl.float32)
        scale = tl.load(q_norm + k, mask=k < Q, other=0.0)
        tl.store(c_q + row * Q + k, norm_row(query, scale, Q, eps, dtype).to(dtype), mask=k < Q)


@triton.jit(do_not_specialize=["heads", "stride_t", "stride_h"])
def rotate_kernel(
    x, cos, sin, heads, stride_t, stride_h,
    HALF: tl.constexpr, HALF_POW2: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grid: rows, cdiv(heads, HEADS). x [rows, heads, 2 HALF] by strides, overwritten."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_POW2)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = (h < heads)[:, None] & (j < HALF)[None, :]
    one = 2 * j if INTERLEAVED else j
    other = 2 * j + 1 if INTERLEAVED else j + HALF
    base = x + row * stride_t + (h * stride_h)[:, None]
    first = tl.load(base + one[None, :], mask=live, other=0.0).to(tl.float32)
    second = tl.load(base + other[None, :], mask=live, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + j, mask=j < HALF, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + j, mask=j < HALF, other=0.0)[None, :]
    a, b = rotated(first, second, c, s, x.dtype.element_ty)
    tl.store(base + one[None, :], a, mask=live)
    tl.store(base + other[None, :], b, mask=live)


@triton.jit
def silu_mul_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: rows, cdiv(N, BLOCK). x [rows, 2 N], gate first."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * (2 * N) + i, mask=i < N, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * N) + N + i, mask=i < N, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * N + i, ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype), mask=i < N)


def norm_warps(size: int) -> int:
    """Warps of a program that holds a row of `size` channels."""
    return 4 if size <= 2048 else 8


def add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(residual + factor * x) and residual + factor * x, or norm(x) and x without a residual.

    Args:
        x, residual: [n, channels] bf16 or fp16, unit last stride. weight: [channels].
    """
    out = new_rows(x, *x.shape)
    total = x if residual is None else torch.empty_like(out)
    if x.shape[0]:
        size, second = x.shape[1], x if residual is None else residual
        add_rms_norm_kernel[(x.shape[0],)](
            x, second, weight, out, total, x.stride(0), second.stride(0), eps, factor,
            D=size, BLOCK=triton.next_power_of_2(size), ADD=residual is not None, num_warps=norm_warps(size),
        )  # fmt: skip
    return out, total


def latent_parts(
    q_row: torch.Tensor | None,
    kv_row: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    interleaved: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """c_q [n, q_lora_rank] (None without q_row), ckv [n, rank] and kpe [n, rope].

    Args:
        q_row: [n, q_lora_rank], kv_row: [n, rank + rope], unit last strides, any row strides.
        angles: cos and sin, contiguous fp32 [n, rope / 2]; None leaves kpe as it is, a view of kv_row (see `rope_write`).
    """
    rows, rank = kv_row.shape[0], kv_norm.shape[0]
    half, width = (kv_row.shape[1] - rank) // 2, 0 if q_row is None else q_row.shape[1]
    ckv = kv_row.new_empty(rows, rank)
    kpe = kv_row[:, rank:] if angles is None else kv_row.new_empty(rows, 2 * half)
    c_q = None if q_row is None else new_rows(q_row, rows, width)
    if rows:
        first, norm = (kv_row, kv_norm) if q_row is None or q_norm is None else (q_row, q_norm)
        latent_parts_kernel[(rows, 1 if c_q is None else 2)](
            first, kv_row, norm, kv_norm, ckv if c_q is None else c_q, ckv, kpe, *(angles or (kv_norm, kv_norm)),
            first.stride(0), kv_row.stride(0), eps,
            Q=width or rank, RANK=rank, HALF=half, Q_POW2=triton.next_power_of_2(width or rank),
            RANK_POW2=triton.next_power_of_2(rank), HALF_POW2=triton.next_power_of_2(half), INTERLEAVED=interleaved,
            ROTATE=angles is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return c_q, ckv, kpe


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """x [n, heads, rope] rotated in place, unit last stride; angles as in `latent_parts`."""
    rows, heads, width = x.shape
    if rows:
        rotate_kernel[(rows, triton.cdiv(heads, HEADS))](
            x, *angles, heads, x.stride(0), x.stride(1), HALF=width // 2, HALF_POW2=triton.next_power_of_2(width // 2),
            HEADS=HEADS, INTERLEAVED=interleaved, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return x


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [n, channels] of contiguous x [n, 2 * channels], gate first."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = new_rows(x, rows, size)
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(size, CHANNELS))](x, out, N=size, BLOCK=CHANNELS, num_warps=4)
    return out
