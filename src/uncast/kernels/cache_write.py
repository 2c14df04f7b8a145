"""Cache writer: latent and rope'd key of new tokens into their slots, any layout, one launch.

    one program = one row: load ckv [rank] and kpe [rope], encode, store the row's bytes at slot * row_bytes
    e4m3 encoding in integers (no FP8 type reaches the compiler, so it runs on every GPU and in Triton's interpreter):
        |x| >= 2^-6   round the fp32 mantissa to 3 bits, half to even, and rebias the exponent by 120
        |x| <  2^-6   |x| + 2^14 in fp32 rounds to a multiple of 2^-9, half to even; its low bits are the code
        |x| >  448    the code of 448; NaN: 0x7f
        sign          of the input's bits: a division may drop the sign of a NaN

Bytes are those of `latent.codec.encode_rows`: the same divisions (round to nearest), the same scale, the same counters.
Floor: rank + rope values read, row_bytes written per token; at decode sizes it is one launch's latency.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.latent.codec import Scale, check_scale
from uncast.latent.layouts import row_layout

FP32 = tl.constexpr("fp32")
BF16 = tl.constexpr("bf16")
DS_MLA = tl.constexpr("fp8_ds_mla")


@triton.jit
def is_negative(x):
    """The sign bit of bf16, fp16 or fp32 x."""
    bits = x.to(tl.int16, bitcast=True) if x.dtype.primitive_bitwidth == 16 else x.to(tl.int32, bitcast=True)
    return bits < 0


@triton.jit
def encode_e4m3(x, negative):
    """Codes (uint8) of fp32 |x| with the given sign, saturating."""
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    capped = tl.minimum(size, 0x43E00000)
    normal = ((capped + 0x7FFFF + ((capped >> 20) & 1)) >> 20) - 960
    shifted = capped.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(capped < 0x3C800000, subnormal, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | tl.where(negative, 0x80, 0)).to(tl.uint8)


@triton.jit
def encode_bf16(x):
    """bf16 bits (int16) of fp32 x, half to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit
def count(scaled, live, counters):
    """Adds the saturated, subnormal and NaN values of `scaled` to counters [3]."""
    size = tl.abs(scaled)
    saturated = tl.sum((live & (size > 448.0)).to(tl.int32), 0)
    subnormal = tl.sum((live & (size > 0.0) & (size < 0.015625)).to(tl.int32), 0)
    nan = tl.sum((live & (scaled != scaled)).to(tl.int32), 0)
    tl.atomic_add(counters, saturated.to(tl.int64), mask=saturated > 0)
    tl.atomic_add(counters + 1, subnormal.to(tl.int64), mask=subnormal > 0)
    tl.atomic_add(counters + 2, nan.to(tl.int64), mask=nan > 0)


@triton.jit
def tile_scale(x):
    """2^ceil(log2(max(amax / 448, 1e-4))) of the finite values of x, by the bits; see `codec.ds_mla_scales`."""
    size = tl.abs(x)
    amax = tl.max(tl.where(size < float("inf"), size, 0.0), 0)
    bits = tl.maximum(tl.div_rn(amax, 448.0), 1e-4).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_latent(
    source, slot, bytes_ptr, shorts_ptr, words_ptr, counters, scale,
    LAYOUT: tl.constexpr, RANK: tl.constexpr, ROW_BYTES: tl.constexpr, COUNT: tl.constexpr, RANK_POW2: tl.constexpr,
):  # fmt: skip
    """The latent at `source` [RANK] into its place in the row of `slot`."""
    i = tl.arange(0, RANK_POW2)
    if LAYOUT == FP32:
        x = tl.load(source + i, mask=i < RANK, other=0.0).to(tl.float32)
        tl.store(words_ptr + slot * (ROW_BYTES // 4) + i, x, mask=i < RANK)
    elif LAYOUT == BF16:
        x = tl.load(source + i, mask=i < RANK, other=0.0).to(tl.float32)
        tl.store(shorts_ptr + slot * (ROW_BYTES // 2) + i, encode_bf16(x), mask=i < RANK)
    elif LAYOUT == DS_MLA:
        k = tl.arange(0, 128)
        for g in tl.static_range(4):
            part = tl.load(source + g * 128 + k)
            tile = tile_scale(part.to(tl.float32))
            scaled = tl.div_rn(part.to(tl.float32), tile)
            tl.store(bytes_ptr + slot * ROW_BYTES + g * 128 + k, encode_e4m3(scaled, is_negative(part)))
            tl.store(words_ptr + slot * (ROW_BYTES // 4) + 128 + g, tile)
            if COUNT:
                count(scaled, k < 128, counters)
    else:
        stored = tl.load(source + i, mask=i < RANK, other=0.0)
        scaled = tl.div_rn(stored.to(tl.float32), scale + tl.zeros([RANK_POW2], tl.float32))
        tl.store(bytes_ptr + slot * ROW_BYTES + i, encode_e4m3(scaled, is_negative(stored)), mask=i < RANK)
        if COUNT:
            count(scaled, i < RANK, counters)


@triton.jit
def store_rope(
    stored, j, live, slot, bytes_ptr, shorts_ptr, words_ptr, counters, scale,
    LAYOUT: tl.constexpr, RANK: tl.constexpr, ROW_BYTES: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rope channels j [WIDTH] of a row, where `live`; stored: their values, rotated."""
    y = stored.to(tl.float32)
    if LAYOUT == FP32:
        tl.store(words_ptr + slot * (ROW_BYTES // 4) + RANK + j, y, mask=live)
    elif LAYOUT == BF16:
        tl.store(shorts_ptr + slot * (ROW_BYTES // 2) + RANK + j, encode_bf16(y), mask=live)
    elif LAYOUT == DS_MLA:
        tl.store(shorts_ptr + slot * (ROW_BYTES // 2) + 264 + j, encode_bf16(y), mask=live)
    else:
        scaled = tl.div_rn(y, scale + tl.zeros([WIDTH], tl.float32))
        tl.store(bytes_ptr + slot * ROW_BYTES + RANK + j, encode_e4m3(scaled, is_negative(stored)), mask=live)
        if COUNT:
            count(scaled, live, counters)


@triton.jit(do_not_specialize=["ckv_stride", "kpe_stride", "scale_flags"], do_not_specialize_on_alignment=["slots"])
def cache_write_kernel(
    ckv, kpe, bytes_ptr, shorts_ptr, words_ptr, slots, counters, ckv_scale, kpe_scale, ckv_scale_ptr, kpe_scale_ptr,
    ckv_stride, kpe_stride, scale_flags,
    LAYOUT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROW_BYTES: tl.constexpr, COUNT: tl.constexpr,
    RANK_POW2: tl.constexpr, ROPE_POW2: tl.constexpr,
):  # fmt: skip
    """Grid: rows. bytes_ptr, shorts_ptr, words_ptr: the cache as uint8, int16 and fp32. scale_flags: bit 0 takes ckv_scale,
    bit 1 kpe_scale from the pointer."""
    row = tl.program_id(0).to(tl.int64)
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
        j = tl.arange(0, ROPE_POW2)
        rope = tl.load(kpe + row * kpe_stride + j, mask=j < ROPE, other=0.0)
        store_rope(
            rope, j, j < ROPE, slot, bytes_ptr, shorts_ptr, words_ptr, counters, kpe_scale,
            LAYOUT, RANK, ROW_BYTES, COUNT, ROPE_POW2,
        )  # fmt: skip


def scale_arguments(
    ckv_scale: Scale, kpe_scale: Scale, words: torch.Tensor
) -> tuple[list[float], list[torch.Tensor], int]:
    """The scales' values, pointers and flags as the kernels take them; `words`: a pointer for what is not read."""
    scales = (ckv_scale, kpe_scale)
    there = [isinstance(s, torch.Tensor) and s.device == words.device for s in scales]
    values = [1.0 if s is None or on else float(s) for s, on in zip(scales, there, strict=True)]
    pointers = [s if isinstance(s, torch.Tensor) and on else words for s, on in zip(scales, there, strict=True)]
    return values, pointers, there[0] | there[1] << 1


def write_rows(
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_layout: str,
    ckv_scale: Scale = None,
    kpe_scale: Scale = None,
    counters: torch.Tensor | None = None,
) -> None:
    """Stores n rows; may be captured in a CUDA graph.

    Args:
        ckv: [n, kv_lora_rank], kpe: [n, qk_rope_head_dim] with rope applied; bf16, fp16 or fp32, any row stride.
        cache: [num_pages, page_size, row_bytes], contiguous bytes.
        slot_mapping: int64 or int32 [n], page * page_size + offset; a negative slot is skipped.
        counters: int64 [3] that gains saturated, subnormal and NaN values of the FP8 parts.

    Raises:
        ScaleError: a scale for a layout without one. LayoutError: unknown layout.
    """
    layout = row_layout(kv_layout, ckv.shape[-1], kpe.shape[-1])
    check_scale(layout, "ckv_scale", ckv_scale)
    check_scale(layout, "kpe_scale", kpe_scale)
    if ckv.shape[0] == 0:
        return
    ckv, kpe = (x if x.stride(-1) == 1 else x.contiguous() for x in (ckv, kpe))
    flat = cache.view(torch.uint8).view(-1)
    words = flat.view(torch.float32)
    values, pointers, flags = scale_arguments(ckv_scale, kpe_scale, words)
    cache_write_kernel[(ckv.shape[0],)](
        ckv, kpe, flat, flat.view(torch.int16), words, slot_mapping, slot_mapping if counters is None else counters,
        *values, *pointers, ckv.stride(0), kpe.stride(0), flags,
        LAYOUT=layout.name, RANK=layout.kv_lora_rank, ROPE=layout.qk_rope_head_dim, ROW_BYTES=layout.row_bytes,
        COUNT=counters is not None, RANK_POW2=triton.next_power_of_2(layout.kv_lora_rank),
        ROPE_POW2=triton.next_power_of_2(max(1, layout.qk_rope_head_dim)), num_warps=4,
    )  # fmt: skip
