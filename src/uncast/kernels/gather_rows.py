"""Gather: live FP8 rows of a paged cache -> BF16 rows packed in request order, one launch; for `gather_cast` only.

    one program = ROWS rows of the scratch: row r is row r % PAGE of page pages[r // PAGE]
    fp8_e4m3     bf16(e4m3(code) * scale)                     one scale each for ckv and kpe
    fp8_ds_mla   bf16(e4m3(code) * scale of its 128 channels), and kpe's bf16 bits as they are

    scratch row  [ ckv bf16 x RANK | kpe bf16 x ROPE ]        the bytes of layout `bf16`

Values are `latent.codec.decode_rows`' in fp32, rounded half to even: the bits of a cast by torch. Rows past a request's length
in its last page are copied with it; they may hold anything and nothing reads them.
Floor: row_bytes read and 2 * (RANK + ROPE) bytes written per row; the native backend moves neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.kernels.cache_write import encode_bf16
from uncast.kernels.unpack import INTEGER_FACTOR, decode_codes, is_native
from uncast.latent.codec import Scale
from uncast.latent.layouts import RowLayout

DS_MLA = tl.constexpr("fp8_ds_mla")
FACTOR = tl.constexpr(INTEGER_FACTOR)
ROWS, NUM_WARPS = 8, 4


@triton.jit
def decode_values(codes, NATIVE: tl.constexpr):
    """fp32 values of uint8 codes."""
    values = decode_codes(codes, NATIVE).to(tl.float32)
    return values if NATIVE else values * FACTOR


@triton.jit(do_not_specialize=["rows", "scale_flags"])
def gather_rows_kernel(
    bytes_ptr, shorts_ptr, words_ptr, pages, out, ckv_scale, kpe_scale, ckv_scale_ptr, kpe_scale_ptr, rows, scale_flags,
    LAYOUT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROW_BYTES: tl.constexpr, PAGE: tl.constexpr,
    NATIVE: tl.constexpr, RANK_POW2: tl.constexpr, ROPE_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(rows, BLOCK). bytes_ptr, shorts_ptr, words_ptr: the cache as uint8, int16 and fp32; out: int16 [rows, RANK +
    ROPE]. scale_flags: bit 0 takes ckv_scale, bit 1 kpe_scale from the pointer."""
    target = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = target < rows
    page = tl.load(pages + target // PAGE, mask=live, other=0).to(tl.int64)
    source = (page * PAGE + target % PAGE)[:, None]
    base = target[:, None] * (RANK + ROPE)
    live = live[:, None]
    j = tl.arange(0, ROPE_POW2)[None, :]
    if LAYOUT == DS_MLA:
        k = tl.arange(0, 128)[None, :]
        for g in tl.static_range(4):
            codes = tl.load(bytes_ptr + source * ROW_BYTES + g * 128 + k, mask=live, other=0)
            scale = tl.load(words_ptr + source * (ROW_BYTES // 4) + 128 + g, mask=live, other=0.0)
            tl.store(out + base + g * 128 + k, encode_bf16(decode_values(codes, NATIVE) * scale), mask=live)
        rope = tl.load(shorts_ptr + source * (ROW_BYTES // 2) + 264 + j, mask=live, other=0)
        tl.store(out + base + RANK + j, rope, mask=live)
    else:
        if scale_flags & 1:
            ckv_scale = tl.load(ckv_scale_ptr)
        if scale_flags & 2:
            kpe_scale = tl.load(kpe_scale_ptr)
        i = tl.arange(0, RANK_POW2)[None, :]
        codes = tl.load(bytes_ptr + source * ROW_BYTES + i, mask=live & (i < RANK), other=0)
        tl.store(out + base + i, encode_bf16(decode_values(codes, NATIVE) * ckv_scale), mask=live & (i < RANK))
        codes = tl.load(bytes_ptr + source * ROW_BYTES + RANK + j, mask=live & (j < ROPE), other=0)
        tl.store(out + base + RANK + j, encode_bf16(decode_values(codes, NATIVE) * kpe_scale), mask=live & (j < ROPE))


def constexprs(layout: RowLayout, page_size: int, arch: int) -> dict[str, object]:
    """Compile-time arguments for a layout, a page size and a chip (0: Triton's interpreter)."""
    rank, rope = layout.kv_lora_rank, layout.qk_rope_head_dim
    return {
        "LAYOUT": layout.name, "RANK": rank, "ROPE": rope, "ROW_BYTES": layout.row_bytes, "PAGE": page_size,
        "NATIVE": is_native(arch), "RANK_POW2": triton.next_power_of_2(rank), "ROPE_POW2": triton.next_power_of_2(rope),
        "BLOCK": ROWS,
    }  # fmt: skip


def gather_rows(
    cache: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    layout: RowLayout,
    *,
    arch: int,
    ckv_scale: Scale = None,
    kpe_scale: Scale = None,
) -> None:
    """Writes the BF16 values of whole pages to `out`; no sync, may be captured in a CUDA graph.

    Args:
        cache: uint8 [num_pages, page_size, row_bytes] in `layout`, an FP8 one; contiguous, from a 16-byte boundary.
        pages: int32 [n], numbers of pages in `cache`.
        out: uint8 [n or more, page_size, bf16 row bytes], contiguous.
        arch: compute capability as major * 10 + minor; 0 in Triton's interpreter.
    """
    rows = pages.shape[0] * cache.shape[1]
    if rows == 0:
        return
    flat = cache.view(-1)
    words = flat.view(torch.float32)
    on_device = [isinstance(s, torch.Tensor) and s.device == flat.device for s in (ckv_scale, kpe_scale)]
    values = [
        1.0 if s is None or there else float(s) for s, there in zip((ckv_scale, kpe_scale), on_device, strict=True)
    ]
    pointers = [s if there else words for s, there in zip((ckv_scale, kpe_scale), on_device, strict=True)]
    gather_rows_kernel[(triton.cdiv(rows, ROWS),)](
        flat, flat.view(torch.int16), words, pages, out.view(-1).view(torch.int16), *values, *pointers, rows,
        on_device[0] | on_device[1] << 1, **constexprs(layout, cache.shape[1], arch), num_warps=NUM_WARPS,
    )  # fmt: skip
