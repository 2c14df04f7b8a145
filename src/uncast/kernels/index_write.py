"""Index keys of new tokens into their slots, one launch: layer norm, rope, rounding, bytes.

    one program = one row of keys (k_proj's output)
    key    = layer_norm(k), fp32, rounded to k's dtype; its first 2 HALF channels rotated, rounded
    bytes  = those of `latent.index_keys.store_keys`: a page has the codes of all its keys first, then their scales

e4m3 encoding in integers, as in `cache_write`. Floor: a launch; as torch operations these were 30 launches of a full layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.kernels.cache_write import encode_bf16, encode_e4m3, is_negative
from uncast.kernels.norm_rope import rotated
from uncast.latent.index_keys import IndexLayout

FP8, BF16 = tl.constexpr("fp8"), tl.constexpr("bf16")


@triton.jit
def store_channels(value, channel, live, scale, codes, shorts, words, LAYOUT: tl.constexpr):
    """Channels of one key: codes, shorts, words point at its first channel."""
    if LAYOUT == FP8:
        wide = tl.div_rn(value.to(tl.float32), scale)
        tl.store(codes + channel, encode_e4m3(wide, is_negative(value)), mask=live)
    elif LAYOUT == BF16:
        tl.store(shorts + channel, encode_bf16(value.to(tl.float32)), mask=live)
    else:
        tl.store(words + channel, value.to(tl.float32), mask=live)


@triton.jit
def largest(value, live):
    """Of the finite channels, by size."""
    size = tl.abs(value.to(tl.float32))
    return tl.max(tl.where(live & (size < float("inf")), size, 0.0), 0)


@triton.jit(do_not_specialize=["stride"])
def index_write_kernel(
    keys, norm, bias, cos, sin, codes, shorts, words, slots, stride, eps,
    LAYOUT: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, ROW_BYTES: tl.constexpr,
    KEY_BYTES: tl.constexpr, D_POW2: tl.constexpr, HALF_POW2: tl.constexpr, REST_POW2: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grid: rows. codes, shorts, words: the index cache of one layer as uint8, int16 and fp32; cos, sin fp32 [rows, HALF]."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = keys.dtype.element_ty
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        i, line = tl.arange(0, D_POW2), keys + row * stride
        v = tl.load(line + i, mask=i < D, other=0.0).to(tl.float32)
        mean = tl.sum(v, 0) / D
        v = tl.where(i < D, v - mean, 0.0)
        scale = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
        j, m = tl.arange(0, HALF_POW2), 2 * HALF + tl.arange(0, REST_POW2)
        pair, live = j < HALF, m < D
        one = 2 * j if INTERLEAVED else j
        other = 2 * j + 1 if INTERLEAVED else j + HALF
        first = (tl.load(line + one, mask=pair, other=0.0).to(tl.float32) - mean) * scale
        first = first * tl.load(norm + one, mask=pair, other=0.0) + tl.load(bias + one, mask=pair, other=0.0)
        second = (tl.load(line + other, mask=pair, other=0.0).to(tl.float32) - mean) * scale
        second = second * tl.load(norm + other, mask=pair, other=0.0) + tl.load(bias + other, mask=pair, other=0.0)
        rest = (tl.load(line + m, mask=live, other=0.0).to(tl.float32) - mean) * scale
        rest = (rest * tl.load(norm + m, mask=live, other=0.0) + tl.load(bias + m, mask=live, other=0.0)).to(dtype)
        c = tl.load(cos + row * HALF + j, mask=pair, other=0.0)
        s = tl.load(sin + row * HALF + j, mask=pair, other=0.0)
        a, b = rotated(first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32), c, s, dtype)
        page, offset = slot // PAGE, slot % PAGE
        base = page * (PAGE * ROW_BYTES) + offset * KEY_BYTES
        step = 1.0
        if LAYOUT == FP8:
            amax = tl.maximum(tl.maximum(largest(a, pair), largest(b, pair)), largest(rest, live))
            bits = tl.div_rn(tl.maximum(amax, 1e-4), 448.0).to(tl.int32, bitcast=True)
            step = (((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)) << 23).to(tl.float32, bitcast=True)
            tl.store(words + (page * (PAGE * ROW_BYTES) + PAGE * KEY_BYTES) // 4 + offset, step)
        at_codes, at_shorts, at_words = codes + base, shorts + base // 2, words + base // 4
        store_channels(a, one, pair, step, at_codes, at_shorts, at_words, LAYOUT)
        store_channels(b, other, pair, step, at_codes, at_shorts, at_words, LAYOUT)
        store_channels(rest, m, live, step, at_codes, at_shorts, at_words, LAYOUT)


def serves(layout: IndexLayout) -> bool:
    """Whether the kernel writes keys of `layout`: of one scale at most."""
    return layout.num_tiles <= 1


def constexprs(layout: IndexLayout, half: int, page_size: int, interleaved: bool) -> dict[str, object]:
    """Compile-time arguments; `half`: of the rope channels."""
    size = layout.head_dim
    return {
        "LAYOUT": layout.name, "D": size, "HALF": half, "PAGE": page_size, "ROW_BYTES": layout.row_bytes,
        "KEY_BYTES": layout.key_bytes, "D_POW2": triton.next_power_of_2(size), "HALF_POW2": triton.next_power_of_2(half),
        "REST_POW2": triton.next_power_of_2(max(1, size - 2 * half)), "INTERLEAVED": interleaved,
    }  # fmt: skip


def write_keys(
    keys: torch.Tensor,
    norm: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: IndexLayout,
) -> None:
    """Stores the keys of n tokens; may be captured in a CUDA graph.

    Args:
        keys: [n, head_dim], k_proj's output, unit last stride; norm, bias: [head_dim] of its layer norm with `eps`.
        angles: cos and sin, contiguous fp32 [n, rope / 2].
        cache: uint8 [num_pages, page_size, row_bytes], contiguous, 16-byte aligned; slot_mapping: int [n], negative skips.
    """
    if keys.shape[0] == 0:
        return
    flat = cache.view(-1)
    index_write_kernel[(keys.shape[0],)](
        keys, norm, bias, *angles, flat, flat.view(torch.int16), flat.view(torch.float32), slot_mapping, keys.stride(0), eps,
        **constexprs(layout, angles[0].shape[1], cache.shape[1], interleaved), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
