"""Rope and cache write in one launch: new rows into their slots, their key rotated on the way, and queries rotated in place.

    program (row, 0)      load ckv [rank] and the unrotated kpe [rope], rotate the latter, encode, store the row's bytes
    program (row, p > 0)  rotate the rope channels of HEADS heads of the row's query, where they are

Rotation is `models.rope.Rope.rotate`'s, step by step: fp32 products rounded one by one (no fused multiply-add: the launch turns
that off), the result rounded to the input's dtype, half to even. So bytes are those of rotating first and writing then.
Floor: a launch; rope, rotation of the queries and the write were three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.kernels.cache_write import scale_arguments, store_latent, store_rope
from uncast.kernels.norm_rope import rotated
from uncast.latent.codec import Scale, check_scale
from uncast.latent.layouts import RowLayout, row_layout

HEADS = 8
"""Heads of a program."""


@triton.jit(
    do_not_specialize=["ckv_stride", "kpe_stride", "q_stride_t", "q_stride_h", "heads", "scale_flags"],
    do_not_specialize_on_alignment=["slots"],
)
def rope_write_kernel(
    ckv, kpe, q_pe, cos, sin, bytes_ptr, shorts_ptr, words_ptr, slots, counters, ckv_scale, kpe_scale, ckv_scale_ptr,
    kpe_scale_ptr, ckv_stride, kpe_stride, q_stride_t, q_stride_h, heads, scale_flags,
    LAYOUT: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, ROW_BYTES: tl.constexpr, COUNT: tl.constexpr,
    RANK_POW2: tl.constexpr, HALF_POW2: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grid: rows, 1 + cdiv(heads, HEADS). cos, sin fp32 [rows, HALF]; q_pe [rows, heads, 2 HALF] by strides; the others as in
    `cache_write_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, HALF_POW2)
    one, other = j, j + HALF
    if INTERLEAVED:
        one, other = 2 * j, 2 * j + 1
    c = tl.load(cos + row * HALF + j, mask=j < HALF, other=0.0)
    s = tl.load(sin + row * HALF + j, mask=j < HALF, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            if scale_flags & 1:
                ckv_scale = tl.load(ckv_scale_ptr)
            if scale_flags & 2:
                kpe_scale = tl.load(kpe_scale_ptr)
            store_latent(
                ckv + row * ckv_stride, slot, bytes_ptr, shorts_ptr, words_ptr, counters, ckv_scale,
                LAYOUT, RANK, ROW_BYTES, COUNT, RANK_POW2,
            )  # fmt: skip
            first = tl.load(kpe + row * kpe_stride + one, mask=j < HALF, other=0.0)
            second = tl.load(kpe + row * kpe_stride + other, mask=j < HALF, other=0.0)
            a, b = rotated(first, second, c, s, kpe.dtype.element_ty)
            store_rope(
                a, one, j < HALF, slot, bytes_ptr, shorts_ptr, words_ptr, counters, kpe_scale,
                LAYOUT, RANK, ROW_BYTES, COUNT, HALF_POW2,
            )  # fmt: skip
            store_rope(
                b, other, j < HALF, slot, bytes_ptr, shorts_ptr, words_ptr, counters, kpe_scale,
                LAYOUT, RANK, ROW_BYTES, COUNT, HALF_POW2,
            )  # fmt: skip
    else:
        h = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        live = (h < heads)[:, None] & (j < HALF)[None, :]
        base = q_pe + row * q_stride_t + (h * q_stride_h)[:, None]
        first = tl.load(base + one[None, :], mask=live, other=0.0)
        second = tl.load(base + other[None, :], mask=live, other=0.0)
        a, b = rotated(first, second, c[None, :], s[None, :], q_pe.dtype.element_ty)
        tl.store(base + one[None, :], a, mask=live)
        tl.store(base + other[None, :], b, mask=live)


def constexprs(layout: RowLayout, *, counting: bool, interleaved: bool) -> dict[str, object]:
    """Compile-time arguments of the kernel."""
    half = layout.qk_rope_head_dim // 2
    return {
        "LAYOUT": layout.name, "RANK": layout.kv_lora_rank, "HALF": half, "ROW_BYTES": layout.row_bytes, "COUNT": counting,
        "RANK_POW2": triton.next_power_of_2(layout.kv_lora_rank), "HALF_POW2": triton.next_power_of_2(half), "HEADS": HEADS,
        "INTERLEAVED": interleaved,
    }  # fmt: skip


def rope_write_rows(
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    q_pe: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
    kv_layout: str,
    ckv_scale: Scale = None,
    kpe_scale: Scale = None,
    counters: torch.Tensor | None = None,
) -> None:
    """Stores n rows with their keys rotated, and rotates the queries in place; may be captured in a CUDA graph.

    Args:
        ckv: [n, kv_lora_rank], kpe: [n, qk_rope_head_dim] before rope; bf16, fp16 or fp32, unit last stride.
        q_pe: [n, heads, qk_rope_head_dim] before rope, unit last stride; rows without a slot are rotated, too.
        angles: cos and sin, contiguous fp32 [n, qk_rope_head_dim / 2].
        interleaved: see `models.rope.RopeConfig`.
        others: as in `cache_write.write_rows`.

    Raises:
        ScaleError: a scale for a layout without one. LayoutError: unknown layout.
    """
    layout = row_layout(kv_layout, ckv.shape[-1], kpe.shape[-1])
    check_scale(layout, "ckv_scale", ckv_scale)
    check_scale(layout, "kpe_scale", kpe_scale)
    rows, heads = ckv.shape[0], q_pe.shape[1]
    if rows == 0:
        return
    flat = cache.view(torch.uint8).view(-1)
    words = flat.view(torch.float32)
    values, pointers, flags = scale_arguments(ckv_scale, kpe_scale, words)
    rope_write_kernel[(rows, 1 + triton.cdiv(heads, HEADS))](
        ckv, kpe, q_pe, *angles, flat, flat.view(torch.int16), words, slot_mapping,
        slot_mapping if counters is None else counters, *values, *pointers, ckv.stride(0), kpe.stride(0),
        q_pe.stride(0), q_pe.stride(1), heads, flags,
        **constexprs(layout, counting=counters is not None, interleaved=interleaved), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
