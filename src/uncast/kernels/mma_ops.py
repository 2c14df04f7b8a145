"""Device functions of `mma_decode`: copies into a stage, queries, scores, the value product and the store."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uncast.kernels.gluon_compat import cp_async, cp_async_commit, mma_v2
from uncast.kernels.unpack import split_queries, unpack_keys, unpack_values

BF16 = gl.constexpr("bf16")
E4M3 = gl.constexpr("fp8_e4m3")
DS_MLA = gl.constexpr("fp8_ds_mla")


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_pages(kv_indices, tok, end, shift):
    """Page number of each cache row `tok`; rows from `end` on read nothing."""
    return gl.load(kv_indices + (tok >> shift), mask=tok < end, other=0)


@gluon.jit
def row_offset(pages, tok, shift, STRIDE: gl.constexpr):
    """Offset of each row in units of which a row has STRIDE; 64 bits, a pool may exceed 2^31 elements."""
    return ((pages.to(gl.int64) << shift) + (tok & ((1 << shift) - 1))) * STRIDE


@gluon.jit
def copy_rows(dst, base, pages, tok, end, shift, STRIDE: gl.constexpr, L: gl.constexpr):
    """cp.async of dst's [rows, width] from rows `tok` at `base`; rows from `end` on become zeros."""
    off = row_offset(pages, tok, shift, STRIDE)
    c = gl.arange(0, dst.shape[1], gl.SliceLayout(0, L))
    cp_async(dst, base + off[:, None] + c[None, :], mask=(tok < end)[:, None] & (c >= 0)[None, :])


@gluon.jit
def issue_stage(
    latent, rope, scales, stage, ckv_base, kpe_base, scale_base, pages_n, pages_r, pages_s, start, end, shift,
    BT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copies rows start.. start + BT - 1 into stage `stage`. Strides below are `latent.layouts` row sizes in elements."""
    latent = latent.index(stage)
    rope = rope.index(stage)
    LN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tok_n = start + gl.arange(0, BT, gl.SliceLayout(1, LN))
    if LAYOUT == BF16:
        copy_rows(latent, ckv_base, pages_n, tok_n, end, shift, 576, LN)
        copy_rows(rope, kpe_base, pages_n, tok_n, end, shift, 576, LN)
    elif LAYOUT == E4M3:
        LR: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
        copy_rows(latent, ckv_base, pages_n, tok_n, end, shift, 288, LN)
        tok_r = start + gl.arange(0, BT, gl.SliceLayout(1, LR))
        copy_rows(rope, kpe_base, pages_r, tok_r, end, shift, 288, LR)
    else:
        copy_rows(latent, ckv_base, pages_n, tok_n, end, shift, 328, LN)
        copy_rows(rope, kpe_base, pages_n, tok_n, end, shift, 328, LN)
        tok_s = start + gl.arange(0, BT, gl.BlockedLayout([1], [32], [4], [0]))
        off = row_offset(pages_s, tok_s, shift, 164)
        for g in gl.static_range(4):
            cp_async(scales.index(stage * 4 + g), scale_base + off + g, mask=tok_s < end)
    cp_async_commit()


@gluon.jit
def load_query(q, q_start, row0, rows, num_heads, stride_t, stride_h, C0: gl.constexpr, BH: gl.constexpr, L: gl.constexpr,
               WIDTH: gl.constexpr):  # fmt: skip
    """[BH, WIDTH] channels C0.. of the folded rows row0..; 0 beyond `rows`."""
    r = row0 + gl.arange(0, BH, gl.SliceLayout(1, L))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    off = (q_start + r // num_heads).to(gl.int64) * stride_t + (r % num_heads).to(gl.int64) * stride_h
    return gl.load(q + off[:, None] + (C0 + c)[None, :], mask=(r < rows)[:, None] & (c >= 0)[None, :], other=0.0)


@gluon.jit
def abs_max(x):
    return gl.max(gl.abs(x.to(gl.float32)), 1)


@gluon.jit
def power_of_two(size):
    """(2^floor(log2 size), its inverse) per row; (0, 2^127) for a row of zeros."""
    bits = size.to(gl.int32, bitcast=True) & 0x7F800000
    return bits.to(gl.float32, bitcast=True), (0x7F000000 - bits).to(gl.float32, bitcast=True)


@gluon.jit
def store_split(x, inv, first, second, C0: gl.constexpr, BH: gl.constexpr, WIDTH: gl.constexpr, NATIVE: gl.constexpr):
    a, b = split_queries((x * inv[:, None]).to(gl.float16), BH, WIDTH, NATIVE)
    first.slice(C0, WIDTH // 2, 1).store(a)
    second.slice(C0, WIDTH // 2, 1).store(b)


@gluon.jit
def store_bf16(x, high, low, C0: gl.constexpr, WIDTH: gl.constexpr, TWO: gl.constexpr):
    """x as bf16; with TWO (fp16 queries) as a sum of two bf16, which holds all of fp16's bits."""
    h = x.to(gl.bfloat16)
    high.slice(C0, WIDTH, 1).store(h)
    if TWO:
        low.slice(C0, WIDTH, 1).store((x.to(gl.float32) - h.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def prepare_queries(
    q_nope, q_pe, qa, qb, ra, rb, rope_ratio, q_start, row0, rows, num_heads, nope_t, nope_h, pe_t, pe_h,
    BH: gl.constexpr, LAYOUT: gl.constexpr, NATIVE: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """Queries of the item into shared memory, in the order and format of the keys.

    FP8 latents: fp16, each row divided by a power of two so that its largest value lies in [1, 2): exact for bf16 queries
    of any size. Returns that power per row, fp32 [BH] (1 for layout bf16).
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n0 = load_query(q_nope, q_start, row0, rows, num_heads, nope_t, nope_h, 0, BH, L, 128)
    n1 = load_query(q_nope, q_start, row0, rows, num_heads, nope_t, nope_h, 128, BH, L, 128)
    n2 = load_query(q_nope, q_start, row0, rows, num_heads, nope_t, nope_h, 256, BH, L, 128)
    n3 = load_query(q_nope, q_start, row0, rows, num_heads, nope_t, nope_h, 384, BH, L, 128)
    r = load_query(q_pe, q_start, row0, rows, num_heads, pe_t, pe_h, 0, BH, LR, 64)
    power = gl.full([BH], 1.0, gl.float32, gl.SliceLayout(1, L))
    if LAYOUT == BF16:
        store_bf16(n0, qa, qb, 0, 128, TWO)
        store_bf16(n1, qa, qb, 128, 128, TWO)
        store_bf16(n2, qa, qb, 256, 128, TWO)
        store_bf16(n3, qa, qb, 384, 128, TWO)
        store_bf16(r, ra, rb, 0, 64, TWO)
    else:
        size = gl.maximum(gl.maximum(abs_max(n0), abs_max(n1)), gl.maximum(abs_max(n2), abs_max(n3)))
        if LAYOUT == E4M3:
            pe = r.to(gl.float32) * rope_ratio
            size = gl.maximum(size, gl.convert_layout(abs_max(pe), gl.SliceLayout(1, L)))
            power, inv = power_of_two(size)
            store_split(pe, gl.convert_layout(inv, gl.SliceLayout(1, LR)), ra, rb, 0, BH, 64, NATIVE)
        else:
            power, inv = power_of_two(size)
            store_bf16(r, ra, rb, 0, 64, TWO)
        store_split(n0.to(gl.float32), inv, qa, qb, 0, BH, 128, NATIVE)
        store_split(n1.to(gl.float32), inv, qa, qb, 64, BH, 128, NATIVE)
        store_split(n2.to(gl.float32), inv, qa, qb, 128, BH, 128, NATIVE)
        store_split(n3.to(gl.float32), inv, qa, qb, 192, BH, 128, NATIVE)
    return power


@gluon.jit
def qk_fp8(x, y, keys, qa, qb, NATIVE: gl.constexpr):
    """x += (first channels) and y += (second channels) of keys int16 [BT, W] . q [BH, W]."""
    MMA: gl.constexpr = x.type.layout
    ka, kb = unpack_keys(keys.load(gl.DotOperandLayout(0, MMA, 2)), NATIVE)
    x = mma_v2(ka, qa.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2)), x)
    y = mma_v2(kb, qb.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2)), y)
    return x, y


@gluon.jit
def qk_bf16(x, y, keys, qa, qb, TWO: gl.constexpr):
    """x += keys bf16 [BT, W] . qa, y += keys . qb (the low halves of fp16 queries)."""
    MMA: gl.constexpr = x.type.layout
    k = keys.load(gl.DotOperandLayout(0, MMA, 2))
    x = mma_v2(k, qa.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2)), x)
    if TWO:
        y = mma_v2(k, qb.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2)), y)
    return x, y


@gluon.jit
def scores(latent, rope, scales, stage, qa, qb, ra, rb, sc, nope_sc, BT: gl.constexpr, BH: gl.constexpr, MMA: gl.constexpr,
           LAYOUT: gl.constexpr, NATIVE: gl.constexpr, TWO: gl.constexpr):  # fmt: skip
    """Scores of one stage, base 2, [BT, BH]: sc (per row) times the products; nope_sc for fp8_ds_mla's latent part."""
    x = gl.zeros([BT, BH], gl.float32, MMA)
    y = gl.zeros([BT, BH], gl.float32, MMA)
    if LAYOUT == BF16:
        for c in gl.static_range(8):
            x, y = qk_bf16(x, y, latent.slice(c * 64, 64, 1), qa.slice(c * 64, 64, 1), qb.slice(c * 64, 64, 1), TWO)
        x, y = qk_bf16(x, y, rope, ra, rb, TWO)
        s = (x + y) * sc[None, :]
    elif LAYOUT == E4M3:
        for c in gl.static_range(4):
            x, y = qk_fp8(x, y, latent.slice(c * 64, 64, 1), qa.slice(c * 64, 64, 1), qb.slice(c * 64, 64, 1), NATIVE)
        x, y = qk_fp8(x, y, rope, ra, rb, NATIVE)
        s = (x + y) * sc[None, :]
    else:
        s = gl.zeros([BT, BH], gl.float32, MMA)
        for g in gl.static_range(4):
            u, v = qk_fp8(
                gl.zeros([BT, BH], gl.float32, MMA), gl.zeros([BT, BH], gl.float32, MMA),
                latent.slice(g * 64, 64, 1), qa.slice(g * 64, 64, 1), qb.slice(g * 64, 64, 1), NATIVE,
            )  # fmt: skip
            s += (u + v) * scales.index(stage * 4 + g).load(gl.SliceLayout(1, MMA))[:, None]
        x, y = qk_bf16(x, y, rope, ra, rb, TWO)
        s = s * nope_sc[None, :] + (x + y) * sc[None, :]
    return s


@gluon.jit
def scale_exponents(scales, stage, L: gl.constexpr):
    """e(t) as fp32 and 2^-e(t) per token, for the largest of its four scales."""
    s0, s1 = scales.index(stage * 4).load(L), scales.index(stage * 4 + 1).load(L)
    s2, s3 = scales.index(stage * 4 + 2).load(L), scales.index(stage * 4 + 3).load(L)
    bits = gl.maximum(gl.maximum(s0, s1), gl.maximum(s2, s3)).to(gl.int32, bitcast=True) & 0x7F800000
    return ((bits >> 23) - 127).to(gl.float32), (0x7F000000 - bits).to(gl.float32, bitcast=True)


@gluon.jit
def store_probabilities(p, low, pr, P_TERMS: gl.constexpr):
    """pr fp32 in p's type; with P_TERMS 2 as a sum of two, of which `low` holds what rounding to p left over."""
    high = pr.to(p.dtype)
    p.store(high)
    if P_TERMS == 2:
        low.store((pr - high.to(gl.float32)).to(p.dtype))


@gluon.jit
def pv_step(e, o, values, p, low, P_TERMS: gl.constexpr, LAYOUT: gl.constexpr, NATIVE: gl.constexpr):
    """e, o [64, BH] += the two halves of a channel group of `values` (rows = tokens) times p [BT, BH], or with P_TERMS 2 times
    p + low: a fragment of values is loaded once and meets both."""
    MMA: gl.constexpr = e.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for c in gl.static_range(p.shape[0] // 16):
        pp = p.slice(c * 16, 16, 0).load(B)
        v = values.slice(c * 16, 16, 0)
        if LAYOUT == BF16:
            ve = v.slice(0, 64, 1).permute((1, 0)).load(A)
            vo = v.slice(64, 64, 1).permute((1, 0)).load(A)
        else:
            ve, vo = unpack_values(v.permute((1, 0)).load(A), NATIVE)
        e = mma_v2(ve, pp, e)
        o = mma_v2(vo, pp, o)
        if P_TERMS == 2:
            ll = low.slice(c * 16, 16, 0).load(B)
            e = mma_v2(ve, ll, e)
            o = mma_v2(vo, ll, o)
    return e, o


@gluon.jit
def store_group(ptr, row_off, row_ok, e, o, inv, G: gl.constexpr, LAYOUT: gl.constexpr):
    """Writes one channel group of O^T times inv (per row); row_off, row_ok [BH] belong to `out_rows`' layout."""
    y = gl.join(e * inv[None, :], o * inv[None, :])
    Y: gl.constexpr = y.type.layout
    i = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, Y)))[:, None][:, :, None]
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, Y)))[None, :][:, None, :]
    c = G * 128 + k * 64 + i if LAYOUT == BF16 else G * 128 + i * 2 + k
    H: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, Y))
    off = gl.convert_layout(row_off, H)[None, :][:, :, None]
    ok = gl.convert_layout(row_ok, H)[None, :][:, :, None]
    gl.store(ptr + off + c, y.to(ptr.dtype.element_ty), mask=(ok != 0) & (c >= 0))
