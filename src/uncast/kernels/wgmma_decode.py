"""Decode and verify on Hopper: MLA over a paged FP8 cache with RS wgmma, one CTA per SM, one item of `schedule` per CTA.

An item is BN folded query rows (row = token * num_heads + head) of one request and a range of its 64-row KV tiles. Products are
swapped: S^T[64, BN] = K Q^T and O^T[512, BN] = V^T P^T with K and V^T as register operands, so rows are the N of the MMA.

    device memory    `fp8_e4m3`: 576 B a row; `fp8_ds_mla`: 656 B; read by TMA as int16 rows, never anything wider
    shared memory    ring of ST tiles, 32,768 B of latent each, and rope: 4,096 B (fp8_ds_mla: 8,192 B, and 2,048 B of scales)
                     per tile, as deep as the ring (JOINT) or, where that does not fit (fp8_e4m3, BN 64), two
                     Q 1,024 BN B of fp16 and its rope 128 BN B; P 2 x 128 BN B
                     total for BN 16 / 32 / 64: fp8_e4m3 207,760 / 230,608 / 231,312 B, fp8_ds_mla 195,632 / 218,480 / 221,136 B
    registers        O^T of one warpgroup: its 256 channels, even in `oe`, odd in `oo`, 2 x [128, BN] fp32; 240 a thread

    warpgroup w = 0, 1   S^T and softmax of tiles w, w + 2, ...; its half of O^T for every tile; P exchanged by `p`
    TMA warp(s)          latent and rope tiles; page numbers 32 at a time in registers
    scale warp           fp8_ds_mla: the rows' scales as fp16 times a power of two per tile (`wgmma_ops`)

OVERLAP (fp8_e4m3, BN 64), for batches of many tiles a CTA: the loop of `wgmma_overlap`; queries are prepared with less code.

A split's results are fp16: fp8_ds_mla's as multiples of 2^E, E the largest of its tiles' exponents, because its latents may
exceed fp16's range (they are below 448 * 2^(E + 7)); 2^E of each row lies `scale_offset` behind its `partial_lse`.

A slot holds a tile's halves apart, channels 0..255 and 256..511: warpgroup w accumulates from half w, so a half is free when
that one warpgroup is done. Warpgroup w reads half 1 - w of its tile first: with three slots that is the half freed first.
WHOLE (fp8_e4m3, BN 16 and 32: a ring of five): both halves come and go together, which costs a tile fewer waits.

Barriers: `ckv_full`/`ckv_empty` per half, WHOLE per slot (empty: its warpgroup has accumulated the tile, hence also its P,
flag and factors are free for it), `p_ready` per parity of the tile (P, column maximum, flag and factors are published), `meet`
(both).
Softmax is base 2 and lazy: the column maximum moves only when a score exceeds it by 2^10; then `flag` is set and `alpha`
holds the factors. The tile at a request's end is cleaned in shared memory, since weight 0 times a NaN code is NaN.

Floor: row_bytes per cached row (times the row blocks where those miss L2), or 2 * 1088 FLOP per query row and cached row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from uncast.kernels.find_work import find_work
from uncast.kernels.gluon_compat import cta_barrier, smem_view
from uncast.kernels.pdl import grid_dependency_wait
from uncast.kernels.wgmma_load import load_kpe, load_scales, load_tiles
from uncast.kernels.wgmma_ops import (
    HEADROOM,
    LN2,
    accumulate,
    clean_rows,
    column_max,
    column_totals,
    ex2,
    get_scalar,
    hide_rows,
    more_scores,
    needs_rescale,
    opaque_zero,
    power_of_two,
    put_scalar,
    row_offsets,
    scale_sums,
    scores,
    store_outputs,
)
from uncast.kernels.wgmma_overlap import clear_weights, overlapped_tiles
from uncast.kernels.wgmma_queries import prepare_q

ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Layout of a view of scratch as indexable rows."""


@gluon.jit
def _warpgroup(
    q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax, limits,
    offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents, scales_ready, pe_factor,
    score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len, first_limit, tile0, nt,
    w: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, KC: gl.constexpr, TC: gl.constexpr, DS: gl.constexpr,
    JOINT: gl.constexpr, OVERLAP: gl.constexpr = False, WHOLE: gl.constexpr = False,
):  # fmt: skip
    """Warpgroup w: scores and weights of tiles w, w + 2, ..., and its 256 channels of O^T for every tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    cols: gl.constexpr = gl.SliceLayout(0, mma)
    if OVERLAP and w == 0:
        clear_weights(p, BN, mma)
    factor = score_factor * prepare_q(
        q_nope, q_pe, pe_factor, qa.index(0), qb.index(0), ra.index(0), rb.index(0), p.index(0), votes, meet, w,
        BN, DS, OVERLAP,
    )  # fmt: skip
    sums = gl.sum(gl.zeros([64, BN], gl.float32, mma).reshape([4, 2, 8, BN]), 1)
    oe = gl.zeros([128, BN], gl.float32, mma)
    oo = gl.zeros([128, BN], gl.float32, mma)
    if OVERLAP:
        oe, oo, sums = overlapped_tiles(
            nt, oe, oo, sums, factor, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax, limits, votes, ckv_full, ckv_empty,
            kpe_full, p_ready, kv_len, first_limit, tile0, w, BN, ST, KC,
        )  # fmt: skip
    else:
        SS: gl.constexpr = scales_ready.shape[0]
        nj = (nt + 1) // 2
        if w == 0:
            nj = nt // 2 + 1
        for j in range(nj):
            t = 2 * j + w
            if t < nt:
                s = t % ST
                end = (tile0 + t) * 64 + 64
                ss = t % SS
                early = 2 * s + 1 - w
                late = 2 * s + w
                early_full = ckv_full.index(s if WHOLE else early)
                late_full = ckv_full.index(s if WHOLE else late)
                phase = (t // ST) & 1
                if end > kv_len:
                    mbarrier.wait(early_full, phase)
                    mbarrier.wait(late_full, phase)
                    clean_rows(ckv.index(early), kv_len - end + 64)
                    clean_rows(ckv.index(late), kv_len - end + 64)
                    cta_barrier()
                z = opaque_zero(t)
                e = 0
                split = 0
                if DS:
                    mbarrier.wait(scales_ready.index(ss), (t // SS) & 1)
                    e = get_scalar(exponents.index(ss))
                    split = e & 1
                    e = e >> 1
                if JOINT:
                    acc = scores(
                        ckv.index(early), ckv.index(late), kpe.index(s), early_full, phase, early_full, late_full, phase,
                        qa.index(z), qb.index(z), ra.index(z), rb.index(z), scales.index(4 * ss + split), e, w, mma, BN, KC,
                        DS, JOINT, WHOLE,
                    )  # fmt: skip
                else:
                    acc = scores(
                        ckv.index(early), ckv.index(late), kpe.index(w), kpe_full.index(w), j & 1, early_full, late_full,
                        phase, qa.index(z), qb.index(z), ra.index(z), rb.index(z), scales.index(4 * ss + split), e, w, mma,
                        BN, KC, DS, JOINT,
                    )  # fmt: skip
                if DS:
                    for k in range(2 * split):
                        part = scales.index(4 * ss + 2 + k)
                        acc = more_scores(acc, ckv.index(early), 1 - w, qa.index(z), qb.index(z), part, mma)
                        acc = more_scores(acc, ckv.index(late), w, qa.index(z), qb.index(z), part, mma)
                if t > 0:
                    mbarrier.wait(p_ready.index(1 - w), ((t - 1) // 2) & 1)
                    if get_scalar(flag.index((t - 1) % 4)) > 0:
                        sums = scale_sums(sums, alpha.index(1 - w).load(cols))
                m = colmax.load(cols)
                scale = factor
                if DS:
                    scale = factor * power_of_two(e)
                    m_tile = m - e.to(gl.float32)
                else:
                    m_tile = m
                x = acc * scale - m_tile[None, :]
                if end > first_limit:
                    x = hide_rows(x, end - 64, limits, mma)
                flagged = 0
                # tile t - 2: the other warpgroup, like this one, is done with its weights and factors
                before = (t - 2 + ST) % ST
                used = ckv_empty.index(before if WHOLE else 2 * before + 1 - w)
                used_phase = ((t - 2 + ST) // ST + 1) & 1
                if needs_rescale(x, votes.index(w), BN) | (t == 0):
                    mbarrier.wait(used, used_phase)
                    up = gl.maximum(column_max(x, p.index(w), cols, BN) - HEADROOM, gl.where(t == 0, -1e29, 0.0))
                    cta_barrier()
                    x = x - up[None, :]
                    colmax.store(m + up)
                    if t > 0:
                        a = ex2(-up)
                        sums = scale_sums(sums, a)
                        alpha.index(w).store(a)
                        flagged = 1
                put_scalar(flag.index(t % 4), flagged)
                weights = ex2(x)
                if DS:
                    sums = sums + gl.sum(weights.reshape([4, 2, 8, BN]), 1) * power_of_two(-e)
                else:
                    sums = sums + gl.sum(weights.reshape([4, 2, 8, BN]), 1)
                mbarrier.wait(used, used_phase)
                p.index(w).store(weights.to(gl.float16))
                fence_async_shared()
                cta_barrier()
                mbarrier.arrive(p_ready.index(w), count=1)
            for v in range(gl.maximum(t - 1, 0), gl.minimum(t + 1, nt)):
                sv = v % ST
                pv = v % 2
                mbarrier.wait(p_ready.index(pv), (v // 2) & 1)
                oe, oo = accumulate(
                    oe, oo, ckv.index(2 * sv + w), p.index(pv), alpha.index(pv), flag.index(v % 4),
                    scales.index(4 * (v % SS) if DS else sv), w, TC, DS,
                )  # fmt: skip
                if (v == nt - 1) & (pv != w):  # noqa: SIM102 (the flag is read for the last tile only)
                    if get_scalar(flag.index(v % 4)) > 0:
                        sums = scale_sums(sums, alpha.index(1 - w).load(cols))
                cta_barrier()
                mbarrier.arrive(ckv_empty.index(sv if WHOLE else 2 * sv + w), count=1)
    # once the last tile is accumulated, nobody reads the rope query any more
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = column_totals(sums, ra.index(0), meet, w, L, 32 if DS else 16, BN)
    part = get_scalar(state.index(0))
    direct = part < 0
    out_scale = gl.where(direct, get_scalar(state.index(1)).to(gl.float32, bitcast=True), 1.0)
    SCALED: gl.constexpr = state.shape[0] > 4
    if SCALED:
        exponent = get_scalar(state.index(4))
        out_scale = gl.where(direct, 1.0, power_of_two(-exponent))
    alpha.index(w).store(gl.where(total == 0, 0.0, out_scale / total))  # a NaN of a live row stays one
    store_outputs(oe, oo, alpha.index(w), out, partial_o, offsets, direct, w)
    if w == 0:
        n = gl.arange(0, BN, L)
        top = colmax.load(L) + gl.log2(total)
        ok = offsets.load(L) >= 0
        gl.store(partial_lse + part * BN + n, top, mask=ok & (part >= 0))
        if SCALED:
            unit = gl.full([BN], power_of_two(exponent), gl.float32, L)
            gl.store(partial_lse + get_scalar(state.index(5)) + part * BN + n, unit, mask=ok & (part >= 0))
        row = get_scalar(state.index(2)) + n
        at = (get_scalar(state.index(3)) + row // num_heads).to(gl.int64) * lse_stride_t + (
            row % num_heads
        ) * lse_stride_h
        gl.store(lse + at, top * gl.where(lse_mode == 2, LN2, 1.0), mask=ok & direct & (lse_mode > 0))


@gluon.jit
def _store_empty(
    out, lse, partial_o, partial_lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, num_heads, q_start, rows,
    row0, direct, part, lse_mode, BN: gl.constexpr,
):  # fmt: skip
    """An item without tiles: output 0, LSE -inf."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    c = gl.arange(0, 512, L)
    for n in range(gl.minimum(rows - row0, BN)):
        row = row0 + n
        token = (q_start + row // num_heads).to(gl.int64)
        head = row % num_heads
        if direct:
            gl.store(out + token * out_stride_t + head * out_stride_h + c, gl.zeros([512], out.dtype.element_ty, L))
            if lse_mode > 0:
                gl.store(lse + token * lse_stride_t + head * lse_stride_h, float("-inf"))
        else:
            at = part * BN + n
            gl.store(partial_o + at.to(gl.int64) * 512 + c, gl.zeros([512], gl.float16, L))
            gl.store(partial_lse + at, float("-inf"))


@gluon.jit(
    do_not_specialize=["num_heads", "batch", "target", "causal", "invariant", "lse_mode", "scale_flags", "scale_offset"]
)
def wgmma_decode_kernel(
    q_nope, q_pe, ckv_desc, kpe_desc, qo_indptr, kv_indptr, kv_indices, kv_len_arr, out, lse, partial_o, partial_lse, sched,
    cache_words, ckv_scale, kpe_scale, ckv_scale_ptr, kpe_scale_ptr, sm_scale_log2,
    nope_stride_t, nope_stride_h, pe_stride_t, pe_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    num_heads, batch, target, causal, invariant, lse_mode, scale_flags, scale_offset,
    BN: gl.constexpr, ST: gl.constexpr, KC: gl.constexpr, TC: gl.constexpr, PAGE: gl.constexpr, BATCH: gl.constexpr,
    OVERHEAD: gl.constexpr, MIN_CHUNK: gl.constexpr, DS: gl.constexpr, JOINT: gl.constexpr, OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    s1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    r_smem: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    p_smem: gl.constexpr = gl.NVMMASharedLayout(128 if BN >= 64 else 2 * BN, 16, 2)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ckv = gl.allocate_shared_memory(gl.int16, [2 * ST, 64, 128], ckv_desc.layout)
    kpe = gl.allocate_shared_memory(gl.int16, [ST if JOINT else 2, 64, 64 if DS else 32], kpe_desc.layout)
    qa = gl.allocate_shared_memory(gl.float16, [1, BN, 256], q_smem)
    qb = gl.allocate_shared_memory(gl.float16, [1, BN, 256], q_smem)
    if DS:
        ra = gl.allocate_shared_memory(gl.bfloat16, [1, BN, 64], q_smem)
        rb = ra
        scales = gl.allocate_shared_memory(gl.float16, [4 * ST, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    else:
        ra = gl.allocate_shared_memory(gl.float16, [1, BN, 32], r_smem)
        rb = gl.allocate_shared_memory(gl.float16, [1, BN, 32], r_smem)
        scales = ckv
    exponents = gl.allocate_shared_memory(gl.int32, [ST, 1], s1)
    scales_ready = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    p = gl.allocate_shared_memory(gl.float16, [2, 64, BN], p_smem)
    alpha = gl.allocate_shared_memory(gl.float32, [2, BN], s1)
    flag = gl.allocate_shared_memory(gl.int32, [4, 1], s1)
    colmax = gl.allocate_shared_memory(gl.float32, [BN], s1, gl.zeros([BN], gl.float32, L))
    limits = gl.allocate_shared_memory(gl.int32, [BN], s1)
    offsets = gl.allocate_shared_memory(gl.int32, [BN], s1)
    votes = gl.allocate_shared_memory(gl.int32, [3, 4], s1)
    state = gl.allocate_shared_memory(gl.int32, [6 if DS else 4, 1], s1)
    WHOLE: gl.constexpr = JOINT and not DS  # one barrier a slot
    BARRIERS: gl.constexpr = ST if WHOLE else 2 * ST
    ckv_full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], bar)
    ckv_empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], bar)
    kpe_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    meet = gl.allocate_shared_memory(gl.int64, [1], bar)
    for s in gl.static_range(BARRIERS):
        mbarrier.init(ckv_full.index(s), count=1)
        mbarrier.init(ckv_empty.index(s), count=2 if WHOLE else 1)
    for s in gl.static_range(ST):
        mbarrier.init(scales_ready.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(kpe_full.index(s), count=1)
        mbarrier.init(p_ready.index(s), count=1)
    mbarrier.init(meet, count=2)
    item = gl.program_id(0)
    item = grid_dependency_wait(item)
    kv_start = gl.load(kv_indptr + item * 0)  # for one request: in flight together with its lengths
    valid, b, q_start, q_len, kv_len, row0, tile0, tile1, num_splits, part = find_work(
        item, qo_indptr, kv_len_arr, sched, batch, num_heads, target, causal, invariant, BN, BATCH, OVERHEAD, num_warps,
        MIN_CHUNK, not OVERLAP,
    )  # fmt: skip
    if BATCH > 1:
        kv_start = gl.load(kv_indptr + b)
    nt = tile1 - tile0
    rows = q_len * num_heads
    if valid:
        if nt > 0:
            from_ptr = (scale_flags & 1) != 0
            latent_scale = gl.where(from_ptr, gl.load(ckv_scale_ptr, mask=from_ptr, other=1.0), ckv_scale)
            from_ptr = (scale_flags & 2) != 0
            rope_scale = gl.where(from_ptr, gl.load(kpe_scale_ptr, mask=from_ptr, other=1.0), kpe_scale)
            pe_factor = rope_scale / latent_scale
            score_factor = latent_scale * sm_scale_log2
            # one thread a row: where it is read and written, and how many cache rows it sees
            row = row0 + gl.arange(0, BN, L)
            read = smem_view(p.index(0), gl.int32, [32, BN], ROWS)
            read.index(0).store(row_offsets(row, rows, q_start, num_heads, nope_stride_t, nope_stride_h))
            read.index(1).store(row_offsets(row, rows, q_start, num_heads, pe_stride_t, pe_stride_h))
            at = row_offsets(row, rows, q_start, num_heads, out_stride_t, out_stride_h)
            at = gl.where((num_splits > 1) & (row < rows), (part * BN + row - row0) * 64, at)
            offsets.store(at)
            limits.store(gl.minimum(kv_len - (q_len - 1 - row // num_heads) * causal, kv_len))
            first_limit = gl.minimum(kv_len - (q_len - 1 - row0 // num_heads) * causal, kv_len)
            put_scalar(state.index(0), gl.where(num_splits > 1, part, -1))
            put_scalar(state.index(1), latent_scale.to(gl.int32, bitcast=True))
            put_scalar(state.index(2), row0)
            put_scalar(state.index(3), q_start)
            if DS:
                put_scalar(state.index(5), scale_offset)
            fence_async_shared()
            cta_barrier()
            if DS:
                gl.warp_specialize([
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                        first_limit, tile0, nt, 0, BN, ST, KC, TC, DS, JOINT,
                    )),
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                        first_limit, tile0, nt, 1, BN, ST, KC, TC, DS, JOINT,
                    )),
                    (load_tiles, (
                        ckv_desc, kpe_desc, kv_indices, kv_start, tile0, nt, ckv, kpe, ckv_full, ckv_empty, ST, PAGE, DS,
                        JOINT,
                    )),
                    (load_scales, (
                        cache_words, kv_indices, kv_start, tile0, nt, kv_len, scales, exponents, state.index(4), ckv_empty,
                        scales_ready, ST, PAGE,
                    )),
                ], [4, 1, 1], [240, 24, 24])  # fmt: skip
            elif JOINT:
                gl.warp_specialize([
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                        first_limit, tile0, nt, 0, BN, ST, KC, TC, DS, JOINT, False, WHOLE,
                    )),
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                        first_limit, tile0, nt, 1, BN, ST, KC, TC, DS, JOINT, False, WHOLE,
                    )),
                    (load_tiles, (
                        ckv_desc, kpe_desc, kv_indices, kv_start, tile0, nt, ckv, kpe, ckv_full, ckv_empty, ST, PAGE, DS,
                        JOINT, WHOLE,
                    )),
                ], [4, 1], [240, 24])  # fmt: skip
            else:
                gl.warp_specialize([
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                        first_limit, tile0, nt, 0, BN, ST, KC, TC, DS, JOINT, OVERLAP,
                    )),
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                        first_limit, tile0, nt, 1, BN, ST, KC, TC, DS, JOINT, OVERLAP,
                    )),
                    (load_tiles, (
                        ckv_desc, kpe_desc, kv_indices, kv_start, tile0, nt, ckv, kpe, ckv_full, ckv_empty, ST, PAGE, DS,
                        JOINT,
                    )),
                    (load_kpe, (kpe_desc, kv_indices, kv_start, tile0, nt, kpe, kpe_full, p_ready, PAGE)),
                ], [4, 1, 1], [240, 24, 24])  # fmt: skip
        else:
            _store_empty(
                out, lse, partial_o, partial_lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, num_heads,
                q_start, rows, row0, num_splits <= 1, part, lse_mode, BN,
            )  # fmt: skip
