"""Up-projection of stored rows: keys and values of every head in fp16, straight from the paged cache, for un-absorbed extend.

    keys   [heads, rows, width]   W_UK c * 2^a in channels 0..nope, k_pe * 2^p in the next rope channels
    values [heads, rows, width]   W_UV c * 2^b in channels 0..v
    queries [heads, n, width]     q_nope 2^(e-a), q_pe 2^(e-p), with sm_scale = m 2^e, 1 <= m < 2: the library's scale is m

    one program = BM rows x BN channels (heads side by side); the rows' codes are the left operand, unpacked in registers:
        fp8_e4m3    codes (exact in fp16) x W in fp16;  ckv_scale in the epilogue, kpe_scale in the queries
        fp8_ds_mla  the same, one product per 128 channels, each times the row's fp32 scale
        bf16        bf16 x bf16

fp16, because bf16 keys and values would each add 1.65e-3 of error; its range is kept by powers of two that come from bounds:
|W c| <= (largest L1 norm of a row of W) * (largest |c|). `fp8_e4m3` needs no look at the rows for it (448 ckv_scale), the other
layouts one pass over scales or rows. Every factor stays on the device. W is brought to fp16 by a power of two per row (its
elements keep all bits down to 2^-14 of the row's largest). `fp8_ds_mla`'s scales are not multiplied to its codes: Triton brings
such an operand to registers by way of shared memory, and on an H200 (Triton 3.6) the results were wrong.

Floor for n rows: 2 n heads (nope + v) rank operations; 4 n heads width bytes written. On an H200 at 36,864 rows of GLM
(64 heads, 192 + 256): 1.08 TFLOP, 1.4 ms at 770 TFLOP/s, and 2.4 GB, 0.55 ms at 4.4 TB/s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from uncast.kernels.unpack import decode_codes

KEY_POWER, VALUE_POWER = 10, 14
"""No key exceeds 2^10 and no value 2^14; ordinary ones are 10 to 10,000 times smaller, well inside fp16's normal numbers."""

BF16 = tl.constexpr("bf16")
DS_MLA = tl.constexpr("fp8_ds_mla")
OF_KEYS, OF_VALUES, OF_QUERIES, OF_ROPE_QUERIES, OF_ROPE, OF_OUTPUT = map(tl.constexpr, range(6))
"""Indices into `factors` (fp32): what accumulators, q_nope, q_pe, a stored k_pe and a merged output are multiplied by."""
L1_KEYS, L1_VALUES, MAX_CKV, MAX_KPE = map(tl.constexpr, range(4))
"""Indices into `bounds` (fp32 bits as int32): largest L1 norm of a row of W_UK and of W_UV, largest |c| and |k_pe|."""


@triton.jit
def power_exponent(bound, TARGET: tl.constexpr):
    """k with 2^k * bound <= 2^TARGET, within +-100."""
    exponent = (bound.to(tl.int32, bitcast=True) >> 23) - 126
    return tl.minimum(tl.maximum(TARGET - exponent, -100), 100)


@triton.jit
def power_of_two(k):
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def raise_bound(bounds, index: tl.constexpr, x):
    """bounds[index] = max(bounds[index], finite |x|)."""
    size = tl.abs(x)
    top = tl.max(tl.where(size < float("inf"), size, 0.0), 0)
    tl.atomic_max(bounds + index, top.to(tl.int32, bitcast=True))


@triton.jit
def prepare_weights_kernel(
    w, prepared, row_factor, bounds, rows, w_stride_head,
    CH: tl.constexpr, RANK: tl.constexpr, BOUND: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    RANK_POW2: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(rows, BLOCK). Bound of W's rows; with SCALE also W / f in fp16 [rows, RANK] and f, a power of two."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, RANK_POW2)
    mask = (r < rows)[:, None] & (k < RANK)[None, :]
    source = w + (r // CH).to(tl.int64) * w_stride_head + (r % CH) * RANK
    x = tl.load(source[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
    size = tl.abs(x)
    raise_bound(bounds, BOUND, tl.sum(size, 1))
    if SCALE:
        bits = tl.max(size, 1).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 27 << 23), 227 << 23)
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
        target = prepared + r.to(tl.int64)[:, None] * RANK + k[None, :]
        tl.store(target, (x * inverse[:, None]).to(tl.float16), mask=mask)
        tl.store(row_factor + r, bits.to(tl.float32, bitcast=True), mask=r < rows)


@triton.jit
def row_slots(pages, row, live, page_shift):
    """int64 slot of each row of a request; rows that are not live read no table entry."""
    page = tl.load(pages + (row >> page_shift), mask=live, other=0).to(tl.int64)
    return (page << page_shift) + (row & ((1 << page_shift) - 1))


@triton.jit
def bound_rows_kernel(
    items, words, pages, bounds, count, page_shift,
    LAYOUT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROW_WORDS: tl.constexpr, SCALE_WORD: tl.constexpr,
    KPE_ITEM: tl.constexpr, RANK_POW2: tl.constexpr, ROPE_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(count, BLOCK). Bounds of |c| and |k_pe| over a request's rows (bf16, and fp8_ds_mla by its scales).

    items: the cache as bf16; words: as fp32."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = r < count
    slot = row_slots(pages, r, live, page_shift)
    j = tl.arange(0, ROPE_POW2)
    if LAYOUT == DS_MLA:
        g = tl.arange(0, 4)
        scales = tl.load(words + (slot * ROW_WORDS + SCALE_WORD)[:, None] + g[None, :], mask=live[:, None], other=0.0)
        raise_bound(bounds, MAX_CKV, tl.reshape(scales * 448.0, [BLOCK * 4]))
    else:
        k = tl.arange(0, RANK_POW2)
        mask = live[:, None] & (k < RANK)[None, :]
        ckv = tl.load(items + (slot * (ROW_WORDS * 2))[:, None] + k[None, :], mask=mask, other=0.0)
        raise_bound(bounds, MAX_CKV, tl.reshape(ckv.to(tl.float32), [BLOCK * RANK_POW2]))
    rope = items + slot * (ROW_WORDS * 2) + KPE_ITEM
    kpe = tl.load(rope[:, None] + j[None, :], mask=live[:, None] & (j < ROPE)[None, :], other=0.0)
    raise_bound(bounds, MAX_KPE, tl.reshape(kpe.to(tl.float32), [BLOCK * ROPE_POW2]))


@triton.jit
def factors_kernel(
    bounds, factors, ckv_scale_ptr, kpe_scale_ptr, ckv_scale, kpe_scale, scale_power, scale_flags,
    EXTERNAL: tl.constexpr, INTEGER: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """One program: bounds -> factors. scale_power: 2^e; INTEGER: `INTEGER_FACTOR` of unpacked codes, or 1."""
    if scale_flags & 1:
        ckv_scale = tl.load(ckv_scale_ptr)
    if scale_flags & 2:
        kpe_scale = tl.load(kpe_scale_ptr)
    top = ckv_scale * 448.0
    if not EXTERNAL:
        top = tl.load(bounds + MAX_CKV).to(tl.float32, bitcast=True)
    a = power_exponent(tl.load(bounds + L1_KEYS).to(tl.float32, bitcast=True) * top, KEY)
    b = power_exponent(tl.load(bounds + L1_VALUES).to(tl.float32, bitcast=True) * top, VALUE)
    tl.store(factors + OF_KEYS, ckv_scale * power_of_two(a) * INTEGER)
    tl.store(factors + OF_VALUES, ckv_scale * power_of_two(b) * INTEGER)
    tl.store(factors + OF_QUERIES, scale_power * power_of_two(-a))
    if EXTERNAL:
        tl.store(factors + OF_ROPE_QUERIES, scale_power * kpe_scale)
        tl.store(factors + OF_ROPE, INTEGER)
    else:
        p = power_exponent(tl.load(bounds + MAX_KPE).to(tl.float32, bitcast=True), KEY)
        tl.store(factors + OF_ROPE_QUERIES, scale_power * power_of_two(-p))
        tl.store(factors + OF_ROPE, power_of_two(p))
    tl.store(factors + OF_OUTPUT, power_of_two(-b))


@triton.jit(do_not_specialize=["start", "count"])
def up_project_kernel(
    items, words, pages, w, row_factor, factor, out, start, count, channels, w_stride_head, out_stride_head,
    out_stride_row, page_shift,
    LAYOUT: tl.constexpr, NATIVE: tl.constexpr, RANK: tl.constexpr, CH: tl.constexpr, ROW_ITEMS: tl.constexpr,
    ROW_WORDS: tl.constexpr, SCALE_WORD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(count, BM) * cdiv(channels, BN). out[h, r, ch] = factor * sum_k row[start + r, k] W[h, ch, k].

    items: the cache as uint8 codes or bf16; words: as fp32; w: fp16 with row_factor, or bf16. channels: heads * CH.
    """
    tiles_m = tl.cdiv(count, BM)
    tiles_n = tl.cdiv(channels, BN)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    width = tl.minimum(tiles_m - first, GROUP)
    r = (first + pid % (GROUP * tiles_n) % width) * BM + tl.arange(0, BM)
    n = pid % (GROUP * tiles_n) // width * BN + tl.arange(0, BN)
    live, valid = r < count, n < channels
    slot = row_slots(pages, start + r, live, page_shift)
    k = tl.arange(0, BK)
    a_ptr = items + (slot * ROW_ITEMS)[:, None] + k[None, :]
    b_ptr = w + (n // CH * w_stride_head + n % CH * RANK)[None, :] + k[:, None]
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for step in range(0, RANK // BK):
        a = tl.load(a_ptr + step * BK, mask=live[:, None], other=0)
        b = tl.load(b_ptr + step * BK, mask=valid[None, :], other=0.0)
        if LAYOUT == BF16:
            acc = tl.dot(a, b, acc)
        elif LAYOUT == DS_MLA:
            scale = tl.load(words + slot * ROW_WORDS + SCALE_WORD + step * BK // 128, mask=live, other=0.0)
            acc += tl.dot(decode_codes(a, NATIVE), b) * scale[:, None]
        else:
            acc = tl.dot(decode_codes(a, NATIVE), b, acc)
    f = tl.load(factor)
    if LAYOUT == BF16:
        acc *= f
    else:
        acc *= (tl.load(row_factor + n, mask=valid, other=0.0) * f)[None, :]
    target = out + (n // CH * out_stride_head + n % CH)[None, :] + (r * out_stride_row)[:, None]
    tl.store(target, acc.to(tl.float16), mask=live[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["start", "count", "heads"])
def place_rope_kernel(
    items, pages, factors, out, start, count, heads, out_stride_head, out_stride_row, page_shift,
    CODES: tl.constexpr, NATIVE: tl.constexpr, ROPE: tl.constexpr, ROPE_POW2: tl.constexpr, ROW_ITEMS: tl.constexpr,
    KPE_ITEM: tl.constexpr, NOPE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(count, BM). k_pe of each row into every head's channels NOPE.. of out; items: uint8 codes or bf16."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.arange(0, ROPE_POW2)
    live = r < count
    mask = live[:, None] & (j < ROPE)[None, :]
    slot = row_slots(pages, start + r, live, page_shift)
    x = tl.load(items + (slot * ROW_ITEMS)[:, None] + (KPE_ITEM + j)[None, :], mask=mask, other=0)
    if CODES:
        x = decode_codes(x, NATIVE)
    x = (x.to(tl.float32) * tl.load(factors + OF_ROPE)).to(tl.float16)
    target = out + (r * out_stride_row)[:, None] + (NOPE + j)[None, :]
    for head in range(heads):
        tl.store(target + head * out_stride_head, x, mask=mask)


@triton.jit(do_not_specialize=["tokens", "heads"])
def pack_queries_kernel(
    q_nope, q_pe, factors, out, tokens, heads, nope_stride_t, nope_stride_h, pe_stride_t, pe_stride_h,
    NOPE: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, NOPE_POW2: tl.constexpr, ROPE_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(tokens * heads, BLOCK). Queries [tokens, heads, ..] -> out fp16 [heads, tokens, WIDTH], saturating."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < tokens * heads
    token, head = (i // heads).to(tl.int64), (i % heads).to(tl.int64)
    target = out + (head * tokens + token) * WIDTH
    k, j = tl.arange(0, NOPE_POW2), tl.arange(0, ROPE_POW2)
    mask = live[:, None] & (k < NOPE)[None, :]
    x = tl.load(q_nope + (token * nope_stride_t + head * nope_stride_h)[:, None] + k[None, :], mask=mask, other=0.0)
    tl.store(target[:, None] + k[None, :], saturate(x.to(tl.float32) * tl.load(factors + OF_QUERIES)), mask=mask)
    mask = live[:, None] & (j < ROPE)[None, :]
    y = tl.load(q_pe + (token * pe_stride_t + head * pe_stride_h)[:, None] + j[None, :], mask=mask, other=0.0)
    tl.store(
        target[:, None] + (NOPE + j)[None, :],
        saturate(y.to(tl.float32) * tl.load(factors + OF_ROPE_QUERIES)),
        mask=mask,
    )


@triton.jit
def saturate(x):
    """fp16 of fp32 x; +-65504 instead of an infinity, NaN stays NaN."""
    capped = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return capped.to(tl.float16)
