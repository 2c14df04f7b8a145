"""Portable sparse decode and extend: `mma_decode`'s products over the rows that each query token selects, sm_80 to sm_120.

One CTA (4 warps) owns one item of `sparse_ops`: BH heads of one query token and a range of its selected rows, taken in steps of
BT entries through a ring of ST stages. Shared memory, registers, softmax and the handling of scales are those of
`mma_decode`; what differs is where rows come from:

    positions   int32, loaded two steps ahead        entries of `indices`
    row numbers loaded one step ahead                through the request's page list; any page size
    rows        cp.async, 16 bytes a lane            an entry that selects nothing becomes zeros in shared memory, its P is 0

Floor: row_bytes per selected row and query token (L2 keeps what the head blocks of a token share), or 2 * 1088 FLOP per head
and selected row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uncast.kernels.gluon_compat import cp_async, cp_async_commit, cp_async_wait, cta_barrier
from uncast.kernels.mma_ops import (
    BF16,
    DS_MLA,
    E4M3,
    exp2,
    prepare_queries,
    pv_step,
    scale_exponents,
    scores,
    store_group,
    store_probabilities,
)
from uncast.kernels.sparse_ops import entries, find_item, gather, is_selected, slots

LAZY = gl.constexpr(6.0)
NO_MAX = gl.constexpr(-1.0e30)
INTEGER_FACTOR = gl.constexpr(256.0)

_SCALARS = [
    "nope_t", "nope_h", "pe_t", "pe_h", "out_t", "out_h", "lse_t", "lse_h",
    "batch", "num_heads", "topk", "splits", "per", "page_shift", "scale_flags", "lse_mode",
]  # fmt: skip
_UNALIGNED = [
    "indices", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "lse", "ckv_scale_ptr", "kpe_scale_ptr",
]  # fmt: skip


@gluon.jit
def issue_rows(
    latent, rope, scales, stage, ckv_base, kpe_base, scale_base, rows_n, rows_r, rows_s, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copies rows of the pool into stage `stage`. Strides below are `latent.layouts` row sizes in elements."""
    LN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    if LAYOUT == BF16:
        gather(latent.index(stage), ckv_base, rows_n, 576, LN)
        gather(rope.index(stage), kpe_base, rows_n, 576, LN)
    elif LAYOUT == E4M3:
        gather(latent.index(stage), ckv_base, rows_n, 288, LN)
        gather(rope.index(stage), kpe_base, rows_r, 288, LR)
    else:
        gather(latent.index(stage), ckv_base, rows_n, 328, LN)
        gather(rope.index(stage), kpe_base, rows_n, 328, LN)
        off = rows_s.to(gl.int64) * 164
        for g in gl.static_range(4):
            cp_async(scales.index(stage * 4 + g), scale_base + off + g, mask=rows_s >= 0)
    cp_async_commit()


@gluon.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_UNALIGNED)
def mma_sparse_kernel(
    q_nope, q_pe, ckv_base, kpe_base, scale_base, indices, qo_indptr, kv_indptr, kv_indices, kv_len_arr,
    out, lse, partial_o, partial_lse, sched, ckv_scale_ptr, kpe_scale_ptr,
    sm_scale, ckv_scale, kpe_scale, nope_t, nope_h, pe_t, pe_h, out_t, out_h, lse_t, lse_h,
    batch, num_heads, topk, splits, per, page_shift, scale_flags, lse_mode,
    BH: gl.constexpr, BT: gl.constexpr, ST: gl.constexpr, LAYOUT: gl.constexpr, NATIVE: gl.constexpr, TWO: gl.constexpr,
    P_TERMS: gl.constexpr, BATCH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: `SplitPlan.num_items` of `sparse_plan`. Strides of q_nope, q_pe and out are in units of 8 elements (16 bytes).

    indices: int32 [tokens, topk] positions; page_shift: log2 of the page size; the rest as in `mma_decode_kernel`.
    """
    FP8: gl.constexpr = LAYOUT != BF16
    valid, token, kv_start, kv_len, row0, begin, end, part = find_item(
        gl.program_id(0), qo_indptr, kv_indptr, kv_len_arr, indices, sched, batch, num_heads, topk, splits, per,
        BH, BATCH, num_warps,
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
        steps = (end - begin + BT - 1) // BT
        line = indices + token.to(gl.int64) * topk
        pages = kv_indices + kv_start
        at_n = begin + gl.arange(0, BT, LN)
        at_r = begin + gl.arange(0, BT, LR)
        at_s = begin + gl.arange(0, BT, LS)
        at_t = begin + gl.arange(0, BT, TS)
        for i in gl.static_range(ST - 1):
            issue_rows(
                latent, rope, scales, i, ckv_base, kpe_base, scale_base,
                slots(pages, entries(line, at_n + i * BT, end), kv_len, page_shift),
                slots(pages, entries(line, at_r + i * BT, end), kv_len, page_shift),
                slots(pages, entries(line, at_s + i * BT, end), kv_len, page_shift), LAYOUT,
            )  # fmt: skip
        power = prepare_queries(
            q_nope, q_pe, qa, qb, ra, rb, kpe_scale / ckv_scale, token, row0, num_heads, num_heads,
            nope_t * 8, nope_h * 8, pe_t * 8, pe_h * 8, BH, LAYOUT, NATIVE, TWO,
        )  # fmt: skip
        factor = gl.where(NATIVE or not FP8, 1.0, INTEGER_FACTOR)
        unit = sm_scale * ckv_scale * 1.4426950408889634
        nope_sc = gl.convert_layout(power, HS) * (unit * factor)
        sc = gl.full([BH], 1.0, gl.float32, HS) * unit if DS else nope_sc
        row = row0 + gl.arange(0, BH, HS)
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
        ahead = (ST - 1) * BT
        rows_n = slots(pages, entries(line, at_n + ahead, end), kv_len, page_shift)
        rows_r = slots(pages, entries(line, at_r + ahead, end), kv_len, page_shift)
        rows_s = slots(pages, entries(line, at_s + ahead, end), kv_len, page_shift)
        next_n = entries(line, at_n + ahead + BT, end)
        next_r = entries(line, at_r + ahead + BT, end)
        next_s = entries(line, at_s + ahead + BT, end)
        for i in range(steps):
            s = i % ST
            chosen = is_selected(entries(line, at_t + i * BT, end), kv_len)
            if ST > 1:
                cp_async_wait(ST - 2)
            cta_barrier()
            issue_rows(
                latent, rope, scales, (i + ST - 1) % ST, ckv_base, kpe_base, scale_base, rows_n, rows_r, rows_s, LAYOUT,
            )  # fmt: skip
            ahead += BT
            rows_n = slots(pages, next_n, kv_len, page_shift)
            rows_r = slots(pages, next_r, kv_len, page_shift)
            rows_s = slots(pages, next_s, kv_len, page_shift)
            next_n = entries(line, at_n + ahead + BT, end)
            next_r = entries(line, at_r + ahead + BT, end)
            next_s = entries(line, at_s + ahead + BT, end)
            if ST == 1:
                cp_async_wait(0)
                cta_barrier()
            keys = latent.index(s)
            x = scores(keys, rope.index(s), scales, s, qa, qb, ra, rb, sc, nope_sc, BT, BH, SMMA, LAYOUT, NATIVE, TWO)
            if DS:
                exponent, inverse = scale_exponents(scales, s, TS)
                x += exponent[:, None]
            x = gl.where(chosen[:, None] & (row < num_heads)[None, :], x, float("-inf"))
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
                pr = gl.where(chosen[:, None], pr * inverse[:, None], 0.0)
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
        if part >= 0:
            gl.store(partial_lse + part * BH + gl.arange(0, BH, HS), value)
            off = (part.to(gl.int64) * BH + orow - row0) * 512
            ok = (orow >= 0).to(gl.int32)
            store_group(partial_o, off, ok, e0, o0, inv_o, 0, LAYOUT)
            store_group(partial_o, off, ok, e1, o1, inv_o, 1, LAYOUT)
            store_group(partial_o, off, ok, e2, o2, inv_o, 2, LAYOUT)
            store_group(partial_o, off, ok, e3, o3, inv_o, 3, LAYOUT)
        else:
            if lse_mode > 0:
                at = token.to(gl.int64) * lse_t + row.to(gl.int64) * lse_h
                gl.store(lse + at, value * gl.where(lse_mode == 2, 0.6931471805599453, 1.0), mask=row < num_heads)
            off = (token.to(gl.int64) * out_t + orow.to(gl.int64) * out_h) * 8
            ok = (orow < num_heads).to(gl.int32)
            store_group(out, off, ok, e0, o0, inv_o, 0, LAYOUT)
            store_group(out, off, ok, e1, o1, inv_o, 1, LAYOUT)
            store_group(out, off, ok, e2, o2, inv_o, 2, LAYOUT)
            store_group(out, off, ok, e3, o3, inv_o, 3, LAYOUT)
