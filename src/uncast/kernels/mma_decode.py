"""Portable decode, verify and absorbed extend: MLA over a paged cache with mma.sync m16n8k16, sm_80 to sm_120.

One CTA (4 warps) owns one item of `schedule`: BH folded query rows (row = token * num_heads + head) of one request and a
range of its 64-row KV tiles, taken in steps of BT rows through a ring of ST stages filled by cp.async.

    device memory     a row as `latent.layouts` says; never anything wider
    shared memory     stage: latent int16 [BT, 256] (channel pairs) or bf16 [BT, 512], rope, fp8_ds_mla's scales [4][BT]
                      Q     fp16/bf16 [BH, 512] in the order of the unpacked keys, and rope [BH, 64]
                      P     [BT, BH], fp16, one per 128 channels for fp8_ds_mla; for layout bf16 P_TERMS of bf16: P = P0 + P1
    registers         S^T[BT, BH] = K Q^T: K by ldmatrix as the A operand, tokens over warps
                      O^T[512, BH] = V^T P^T: V by ldmatrix.trans as the A operand; 4 channel groups x 2 accumulators
                      [64, BH]: even and odd channels (FP8), first and second half of the group (bf16)

Tokens are the M of both products and query rows the N, so a row count is padded to 8 at most. Softmax is base 2 and lazy:
a row's maximum m moves only when a score exceeds it by 2^6, so P <= 2^6; rows never influence each other.

fp8_ds_mla: key group g of token t carries the scale s_g(t) > 0. The score is sum_g s_g acc_g. For the values, let e(t) be the
exponent of max_g s_g(t); y = x + e(t) takes the place of the score x in P = 2^(y - m), P_g = P * s_g(t) * 2^-e(t) is the
operand of group g, and the softmax sum adds P * 2^-e(t). Any scale in 2^-60..2^60 is exact to P's rounding.

Rows behind the sequence's end are written to shared memory as zeros by cp.async's zero fill and are never read from device
memory, nor are their page numbers; their P is 0.

Floor: row_bytes per cached token, times the number of row blocks where those miss L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uncast.kernels.find_work import find_work
from uncast.kernels.gluon_compat import cp_async_wait, cta_barrier
from uncast.kernels.mma_ops import (
    BF16,
    DS_MLA,
    E4M3,
    exp2,
    issue_stage,
    load_pages,
    prepare_queries,
    pv_step,
    scale_exponents,
    scores,
    store_group,
    store_probabilities,
)

LAZY = gl.constexpr(6.0)
NO_MAX = gl.constexpr(-1.0e30)
INTEGER_FACTOR = gl.constexpr(256.0)


_SCALARS = [
    "nope_t", "nope_h", "pe_t", "pe_h", "out_t", "out_h", "lse_t", "lse_h",
    "batch", "num_heads", "target", "causal", "invariant", "page_shift", "scale_flags", "lse_mode",
]  # fmt: skip
_UNALIGNED = [
    "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "lse", "ckv_scale_ptr", "kpe_scale_ptr",
]  # fmt: skip


@gluon.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_UNALIGNED)
def mma_decode_kernel(
    q_nope, q_pe, ckv_base, kpe_base, scale_base, qo_indptr, kv_indptr, kv_indices, kv_len_arr,
    out, lse, partial_o, partial_lse, sched, ckv_scale_ptr, kpe_scale_ptr,
    sm_scale, ckv_scale, kpe_scale, nope_t, nope_h, pe_t, pe_h, out_t, out_h, lse_t, lse_h,
    batch, num_heads, target, causal, invariant, page_shift, scale_flags, lse_mode,
    BH: gl.constexpr, BT: gl.constexpr, ST: gl.constexpr, LAYOUT: gl.constexpr, NATIVE: gl.constexpr, TWO: gl.constexpr,
    P_TERMS: gl.constexpr, BATCH: gl.constexpr, OVERHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: `SplitPlan.num_items`. Strides of q_nope, q_pe and out are in units of 8 elements (16 bytes).

    ckv_base, kpe_base, scale_base: the cache as int16/bf16, int16/bf16 and fp32, each starting at its field of row 0.
    scale_flags: bit 0 takes ckv_scale, bit 1 kpe_scale from the pointer instead of the value. lse_mode: see `combine`.
    """
    FP8: gl.constexpr = LAYOUT != BF16
    valid, b, q_start, q_len, kv_len, row0, tile0, tile1, num_splits, part = find_work(
        gl.program_id(0), qo_indptr, kv_len_arr, sched, batch, num_heads, target, causal, invariant,
        BH, BATCH, OVERHEAD, num_warps,
    )  # fmt: skip
    if valid:
        SN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        SR: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0]) if LAYOUT == E4M3 else SN
        SP: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // BH, BH // 8, [1, 0])
        KN: gl.constexpr = gl.int16 if FP8 else gl.bfloat16
        KR: gl.constexpr = gl.int16 if LAYOUT == E4M3 else gl.bfloat16
        QN: gl.constexpr = gl.float16 if FP8 else gl.bfloat16
        QR: gl.constexpr = gl.float16 if LAYOUT == E4M3 else gl.bfloat16
        WN: gl.constexpr = 256 if FP8 else 512
        WR: gl.constexpr = 32 if LAYOUT == E4M3 else 64
        DS: gl.constexpr = LAYOUT == DS_MLA
        latent = gl.allocate_shared_memory(KN, [ST, BT, WN], SN)
        rope = gl.allocate_shared_memory(KR, [ST, BT, WR], SR)
        qa = gl.allocate_shared_memory(QN, [BH, WN], SN)
        ra = gl.allocate_shared_memory(QR, [BH, WR], SR)
        qb = gl.allocate_shared_memory(QN, [BH, WN], SN) if FP8 or TWO else qa
        rb = gl.allocate_shared_memory(QR, [BH, WR], SR) if LAYOUT == E4M3 or TWO else ra
        p = gl.allocate_shared_memory(QN, [4 if DS else P_TERMS, BT, BH], SP)
        low = p.index(P_TERMS - 1)
        S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = gl.allocate_shared_memory(gl.float32, [ST * 4, BT], S1) if DS else latent
        SMMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [BT // 16, 64 // BT], [16, 8])
        OMMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
        LN: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
        LR: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
        LS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        HS: gl.constexpr = gl.SliceLayout(0, SMMA)
        TS: gl.constexpr = gl.SliceLayout(1, SMMA)

        if scale_flags & 1:
            ckv_scale = gl.load(ckv_scale_ptr)
        if scale_flags & 2:
            kpe_scale = gl.load(kpe_scale_ptr)
        rows = q_len * num_heads
        begin = tile0 * 64
        end = gl.minimum(tile1 * 64, kv_len)
        steps = gl.maximum(end - begin + BT - 1, 0) // BT
        indices = kv_indices + gl.load(kv_indptr + b)
        at_n = gl.arange(0, BT, LN)
        at_r = gl.arange(0, BT, LR)
        at_s = gl.arange(0, BT, LS)
        for i in gl.static_range(ST - 1):
            first = begin + i * BT
            issue_stage(
                latent, rope, scales, i, ckv_base, kpe_base, scale_base,
                load_pages(indices, first + at_n, end, page_shift), load_pages(indices, first + at_r, end, page_shift),
                load_pages(indices, first + at_s, end, page_shift), first, end, page_shift, BT, LAYOUT,
            )  # fmt: skip
        power = prepare_queries(
            q_nope, q_pe, qa, qb, ra, rb, kpe_scale / ckv_scale, q_start, row0, rows, num_heads,
            nope_t * 8, nope_h * 8, pe_t * 8, pe_h * 8, BH, LAYOUT, NATIVE, TWO,
        )  # fmt: skip
        factor = gl.where(NATIVE or not FP8, 1.0, INTEGER_FACTOR)
        unit = sm_scale * ckv_scale * 1.4426950408889634
        nope_sc = gl.convert_layout(power, HS) * (unit * factor)
        sc = gl.full([BH], 1.0, gl.float32, HS) * unit if DS else nope_sc
        row = row0 + gl.arange(0, BH, HS)
        limit = gl.where(row < rows, kv_len - (q_len - 1 - row // num_heads) * causal, 0)
        m = gl.full([BH], NO_MAX, gl.float32, HS)
        sums = gl.zeros([BT, BH], gl.float32, SMMA)
        e0 = gl.zeros([64, BH], gl.float32, OMMA)
        o0 = gl.zeros([64, BH], gl.float32, OMMA)
        e1 = gl.zeros([64, BH], gl.float32, OMMA)
        o1 = gl.zeros([64, BH], gl.float32, OMMA)
        e2 = gl.zeros([64, BH], gl.float32, OMMA)
        o2 = gl.zeros([64, BH], gl.float32, OMMA)
        e3 = gl.zeros([64, BH], gl.float32, OMMA)
        o3 = gl.zeros([64, BH], gl.float32, OMMA)
        GW: gl.constexpr = WN // 4
        ahead = begin + (ST - 1) * BT
        pages_n = load_pages(indices, ahead + at_n, end, page_shift)
        pages_r = load_pages(indices, ahead + at_r, end, page_shift)
        pages_s = load_pages(indices, ahead + at_s, end, page_shift)
        for i in range(steps):
            s = i % ST
            if ST > 1:
                cp_async_wait(ST - 2)
            cta_barrier()
            ahead = begin + (i + ST - 1) * BT
            fill = (i + ST - 1) % ST
            issue_stage(
                latent, rope, scales, fill, ckv_base, kpe_base, scale_base,
                pages_n, pages_r, pages_s, ahead, end, page_shift, BT, LAYOUT,
            )  # fmt: skip
            pages_n = load_pages(indices, ahead + BT + at_n, end, page_shift)
            pages_r = load_pages(indices, ahead + BT + at_r, end, page_shift)
            pages_s = load_pages(indices, ahead + BT + at_s, end, page_shift)
            if ST == 1:
                cp_async_wait(0)
                cta_barrier()
            keys = latent.index(s)
            x = scores(keys, rope.index(s), scales, s, qa, qb, ra, rb, sc, nope_sc, BT, BH, SMMA, LAYOUT, NATIVE, TWO)
            tok = begin + i * BT + gl.arange(0, BT, TS)
            if DS:
                exponent, inverse = scale_exponents(scales, s, TS)
                x += exponent[:, None]
            x = gl.where(tok[:, None] < limit[None, :], x, float("-inf"))
            d = x - m[None, :]
            if gl.max(gl.max(d, 1), 0) > LAZY:
                top = gl.max(x, 0)
                moved = gl.where(top > m + LAZY, top, m)
                a = exp2(m - moved)
                m = moved
                d = x - m[None, :]
                sums = sums * a[None, :]
                ao = gl.convert_layout(a, gl.SliceLayout(0, OMMA))[None, :]
                e0 = e0 * ao
                o0 = o0 * ao
                e1 = e1 * ao
                o1 = o1 * ao
                e2 = e2 * ao
                o2 = o2 * ao
                e3 = e3 * ao
                o3 = o3 * ao
            pr = exp2(d)
            if DS:
                pr = pr * inverse[:, None]
                sums += pr
                for g in gl.static_range(4):
                    p.index(g).store((pr * scales.index(s * 4 + g).load(TS)[:, None]).to(QN))
            else:
                sums += pr
                store_probabilities(p.index(0), low, pr, P_TERMS)
            cta_barrier()
            e0, o0 = pv_step(e0, o0, keys.slice(0, GW, 1), p.index(0), low, P_TERMS, LAYOUT, NATIVE)
            e1, o1 = pv_step(e1, o1, keys.slice(GW, GW, 1), p.index(1 if DS else 0), low, P_TERMS, LAYOUT, NATIVE)
            e2, o2 = pv_step(e2, o2, keys.slice(2 * GW, GW, 1), p.index(2 if DS else 0), low, P_TERMS, LAYOUT, NATIVE)
            e3, o3 = pv_step(e3, o3, keys.slice(3 * GW, GW, 1), p.index(3 if DS else 0), low, P_TERMS, LAYOUT, NATIVE)
        cp_async_wait(0)

        total = gl.sum(sums, 0)
        value = gl.where(total == 0, float("-inf"), m + gl.log2(total))
        inv = gl.where(total == 0, 0.0, (ckv_scale * factor) / total)
        inv_o = gl.convert_layout(inv, gl.SliceLayout(0, OMMA))
        orow = row0 + gl.arange(0, BH, gl.SliceLayout(0, OMMA))
        if num_splits > 1:
            gl.store(partial_lse + part * BH + gl.arange(0, BH, HS), value)
            off = (part.to(gl.int64) * BH + orow - row0) * 512
            ok = (orow >= 0).to(gl.int32)
            store_group(partial_o, off, ok, e0, o0, inv_o, 0, LAYOUT)
            store_group(partial_o, off, ok, e1, o1, inv_o, 1, LAYOUT)
            store_group(partial_o, off, ok, e2, o2, inv_o, 2, LAYOUT)
            store_group(partial_o, off, ok, e3, o3, inv_o, 3, LAYOUT)
        else:
            if lse_mode > 0:
                at = (q_start + row // num_heads).to(gl.int64) * lse_t + (row % num_heads).to(gl.int64) * lse_h
                gl.store(lse + at, value * gl.where(lse_mode == 2, 0.6931471805599453, 1.0), mask=row < rows)
            off = ((q_start + orow // num_heads).to(gl.int64) * out_t + (orow % num_heads).to(gl.int64) * out_h) * 8
            ok = (orow < rows).to(gl.int32)
            store_group(out, off, ok, e0, o0, inv_o, 0, LAYOUT)
            store_group(out, off, ok, e1, o1, inv_o, 1, LAYOUT)
            store_group(out, off, ok, e2, o2, inv_o, 2, LAYOUT)
            store_group(out, off, ok, e3, o3, inv_o, 3, LAYOUT)
