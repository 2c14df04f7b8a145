"""Decode and verify on Hopper (sm_90): two warpgroups of RS wgmma, fed by two TMA warps, one CTA per SM."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from uncast.kernels.gluon_compat import cta_barrier, smem_view, tma_load
from uncast.kernels.schedule import find_work
from uncast.kernels.wgmma_ops import (
    HEADROOM,
    LN2,
    RESCALE_AT,
    accumulate,
    clean_rows,
    column_max,
    column_totals,
    ex2,
    get_scalar,
    grid_dependency_wait,
    hide_rows,
    launch_dependents,
    opaque_zero,
    power_of_two,
    prepare_q,
    put_scalar,
    row_offsets,
    row_view,
    scale_sums,
    scores,
    store_outputs,
    warpgroup_max,
)

ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Layout of a view of scratch as indexable rows."""


@gluon.jit
def _load_ckv(desc, pages, tile0, nt, ring, full, empty, ST: gl.constexpr, PAGE: gl.constexpr):
    """Latent TMA warp: tile t goes to slot t % ST."""
    PER: gl.constexpr = PAGE // 64
    page = gl.load(pages + tile0 // PER)
    for t in range(nt):
        s = t % ST
        following = gl.load(pages + (tile0 + gl.minimum(t + 1, nt - 1)) // PER)
        mbarrier.wait(empty.index(s), ((t // ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), 64 * 512)
        tma_load(desc, [page * PAGE + (tile0 + t) % PER * 64, 0], full.index(s), ring.index(s))
        page = following


@gluon.jit
def _load_kpe(desc, pages, tile0, nt, ring, full, p_ready, PAGE: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr):
    """Rope TMA warp: two slots; a slot is free once its tile's weights are published."""
    PER: gl.constexpr = PAGE // 64
    page = gl.load(pages + tile0 // PER)
    for t in range(nt):
        s = t % 2
        following = gl.load(pages + (tile0 + gl.minimum(t + 1, nt - 1)) // PER)
        mbarrier.wait(p_ready.index(s), ((t // 2) & 1) ^ 1)
        mbarrier.expect(full.index(s), 128 * WIDTH)
        tma_load(desc, [page * PAGE + (tile0 + t) % PER * 64, COLUMN], full.index(s), ring.index(s))
        page = following


@gluon.jit
def _fetch_scales(cache, pages, tile, kv_len, PAGE: gl.constexpr):
    """The four scales of the 64 rows of a tile (fp8_ds_mla: fp32 words 128..131 of a row of 164); 0 behind the end."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    PER: gl.constexpr = PAGE // 64
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    g = gl.arange(0, 4, gl.SliceLayout(0, L))
    first = gl.load(pages + tile // PER).to(gl.int64) * PAGE + tile % PER * 64
    at = cache + first * 164 + 128 + row[:, None] * 164 + g[None, :]
    return gl.load(at, mask=(tile * 64 + row < kv_len)[:, None], other=0.0)


@gluon.jit
def _load_scales(cache, pages, tile0, nt, kv_len, scales, exponents, empty, ready, ST: gl.constexpr, PAGE: gl.constexpr):
    """Scale warp of fp8_ds_mla: publishes scale * 2^-e as fp16 [4, 64] and e, so that the largest becomes 2^6 .. 2^7."""
    v = _fetch_scales(cache, pages, tile0, kv_len, PAGE)
    for t in range(nt):
        s = t % ST
        following = _fetch_scales(cache, pages, tile0 + gl.minimum(t + 1, nt - 1), kv_len, PAGE)
        top = gl.max(gl.max(v.to(gl.int32, bitcast=True), 1), 0)
        e = gl.minimum(gl.maximum((top >> 23) - 127 - 6, -100), 100)
        mbarrier.wait(empty.index(s), ((t // ST) & 1) ^ 1)
        scales.index(s).permute((1, 0)).store((v * power_of_two(-e)).to(gl.float16))
        put_scalar(exponents.index(s), e, 1)
        cta_barrier()
        mbarrier.arrive(ready.index(s), count=1)
        v = following


@gluon.jit
def _warpgroup(
    q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax, colscale, limits,
    offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents, scales_ready, pe_factor,
    score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len, first_limit, tile0, nt,
    w: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, KC: gl.constexpr, TC: gl.constexpr, DS: gl.constexpr,
):  # fmt: skip
    """Warpgroup w: scores and weights of tiles w, w + 2, ..., and its 256 channels of O^T for every tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    cols: gl.constexpr = gl.SliceLayout(0, mma)
    prepare_q(
        q_nope, q_pe, pe_factor, score_factor, qa.index(0), qb.index(0), ra.index(0), rb.index(0),
        smem_view(p.index(0), gl.int32, [32, BN], ROWS), row_view(p.index(1), 32, BN), colscale, meet, w, BN, DS,
    )  # fmt: skip
    sums = gl.sum(gl.zeros([64, BN], gl.float32, mma).reshape([4, 2, 8, BN]), 1)
    oe = gl.zeros([128, BN], gl.float32, mma)
    oo = gl.zeros([128, BN], gl.float32, mma)
    nj = (nt + 1) // 2
    if w == 0:
        nj = nt // 2 + 1
    for j in range(nj):
        t = 2 * j + w
        if t < nt:
            s = t % ST
            end = (tile0 + t) * 64 + 64
            if end > kv_len:
                mbarrier.wait(ckv_full.index(s), (t // ST) & 1)
                clean_rows(ckv.index(s), kv_len - end + 64)
                cta_barrier()
            z = opaque_zero(t)
            e = 0
            if DS:
                mbarrier.wait(scales_ready.index(s), (t // ST) & 1)
                e = get_scalar(exponents.index(s))
            acc = scores(
                ckv.index(s), kpe.index(w), kpe_full.index(w), j & 1, ckv_full.index(s), (t // ST) & 1,
                qa.index(z), qb.index(z), ra.index(z), rb.index(z), scales.index(s), e, mma, BN, KC, DS,
            )  # fmt: skip
            if t > 0:
                mbarrier.wait(p_ready.index(1 - w), ((t - 1) // 2) & 1)
                if get_scalar(flag.index(1 - w)) > 0:
                    sums = scale_sums(sums, alpha.index(1 - w).load(cols))
            m = colmax.load(cols)
            if DS:
                x = acc * (colscale.load(cols) * power_of_two(e))[None, :] - (m - e.to(gl.float32))[None, :]
            else:
                x = acc * colscale.load(cols)[None, :] - m[None, :]
            if end > first_limit:
                x = hide_rows(x, end - 64, limits, mma)
            # tile t - 2 is consumed by both warpgroups: its weights, flag and factors may be overwritten
            mbarrier.wait(ckv_empty.index((t - 2 + ST) % ST), ((t - 2 + ST) // ST + 1) & 1)
            flagged = 0
            if (warpgroup_max(x, votes.index(w), BN) > RESCALE_AT) | (t == 0):
                up = gl.maximum(column_max(x, p.index(w), cols, BN) - HEADROOM, gl.where(t == 0, -1e29, 0.0))
                cta_barrier()
                x = x - up[None, :]
                colmax.store(m + up)
                if t > 0:
                    a = ex2(-up)
                    sums = scale_sums(sums, a)
                    alpha.index(w).store(a)
                    flagged = 1
            put_scalar(flag.index(w), flagged)
            weights = ex2(x)
            if DS:
                sums = sums + gl.sum(weights.reshape([4, 2, 8, BN]), 1) * power_of_two(-e)
            else:
                sums = sums + gl.sum(weights.reshape([4, 2, 8, BN]), 1)
            p.index(w).store(weights.to(gl.float16))
            fence_async_shared()
            cta_barrier()
            mbarrier.arrive(p_ready.index(w), count=1)
        for v in range(gl.maximum(t - 1, 0), gl.minimum(t + 1, nt)):
            sv = v % ST
            pv = v % 2
            mbarrier.wait(p_ready.index(pv), (v // 2) & 1)
            oe, oo = accumulate(
                oe, oo, ckv.index(sv).slice(w * 128, 128, 1), p.index(pv), alpha.index(pv), flag.index(pv),
                scales.index(sv), w, TC, DS,
            )  # fmt: skip
            if (v == nt - 1) & (pv != w):
                if get_scalar(flag.index(1 - w)) > 0:
                    sums = scale_sums(sums, alpha.index(1 - w).load(cols))
            cta_barrier()
            mbarrier.arrive(ckv_empty.index(sv), count=1)
    # once the last tile is accumulated, nobody reads the rope query any more
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = column_totals(sums, ra.index(0), meet, w, L, 32 if DS else 16, BN)
    part = get_scalar(state.index(0))
    direct = part < 0
    factor = gl.where(direct, get_scalar(state.index(1)).to(gl.float32, bitcast=True), 1.0)
    alpha.index(w).store(gl.where(total > 0, factor / total, 0.0))
    store_outputs(oe, oo, alpha.index(w), out, partial_o, offsets, direct, w)
    if w == 0:
        n = gl.arange(0, BN, L)
        top = colmax.load(L) + gl.log2(total)
        ok = offsets.load(L) >= 0
        gl.store(partial_lse + part * BN + n, top, mask=ok & (part >= 0))
        row = get_scalar(state.index(2)) + n
        at = (get_scalar(state.index(3)) + row // num_heads).to(gl.int64) * lse_stride_t + (row % num_heads) * lse_stride_h
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


@gluon.jit(do_not_specialize=["num_heads", "batch", "target", "causal", "invariant", "lse_mode", "scale_flags"])
def wgmma_decode_kernel(
    q_nope, q_pe, ckv_desc, kpe_desc, qo_indptr, kv_indptr, kv_indices, kv_len_arr, out, lse, partial_o, partial_lse, sched,
    cache_words, ckv_scale, kpe_scale, ckv_scale_ptr, kpe_scale_ptr, sm_scale_log2,
    nope_stride_t, nope_stride_h, pe_stride_t, pe_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    num_heads, batch, target, causal, invariant, lse_mode, scale_flags,
    BN: gl.constexpr, ST: gl.constexpr, KC: gl.constexpr, TC: gl.constexpr, PAGE: gl.constexpr, BATCH: gl.constexpr,
    OVERHEAD: gl.constexpr, DS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    s1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    r_smem: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    p_smem: gl.constexpr = gl.NVMMASharedLayout(128 if BN >= 64 else 2 * BN, 16, 2)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ckv = gl.allocate_shared_memory(gl.int16, [ST, 64, 256], ckv_desc.layout)
    kpe = gl.allocate_shared_memory(gl.int16, [2, 64, 64 if DS else 32], kpe_desc.layout)
    qa = gl.allocate_shared_memory(gl.float16, [1, BN, 256], q_smem)
    qb = gl.allocate_shared_memory(gl.float16, [1, BN, 256], q_smem)
    if DS:
        ra = gl.allocate_shared_memory(gl.bfloat16, [1, BN, 64], q_smem)
        rb = ra
        scales = gl.allocate_shared_memory(gl.float16, [ST, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    else:
        ra = gl.allocate_shared_memory(gl.float16, [1, BN, 32], r_smem)
        rb = gl.allocate_shared_memory(gl.float16, [1, BN, 32], r_smem)
        scales = ckv
    exponents = gl.allocate_shared_memory(gl.int32, [ST, 1], s1)
    scales_ready = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    p = gl.allocate_shared_memory(gl.float16, [2, 64, BN], p_smem)
    alpha = gl.allocate_shared_memory(gl.float32, [2, BN], s1)
    flag = gl.allocate_shared_memory(gl.int32, [2, 1], s1)
    colmax = gl.allocate_shared_memory(gl.float32, [BN], s1, gl.zeros([BN], gl.float32, L))
    colscale = gl.allocate_shared_memory(gl.float32, [BN], s1)
    limits = gl.allocate_shared_memory(gl.int32, [BN], s1)
    offsets = gl.allocate_shared_memory(gl.int32, [BN], s1)
    votes = gl.allocate_shared_memory(gl.int32, [2, 4], s1)
    state = gl.allocate_shared_memory(gl.int32, [4, 1], s1)
    ckv_full = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    ckv_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    kpe_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    meet = gl.allocate_shared_memory(gl.int64, [1], bar)
    for s in gl.static_range(ST):
        mbarrier.init(ckv_full.index(s), count=1)
        mbarrier.init(ckv_empty.index(s), count=2)
        mbarrier.init(scales_ready.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(kpe_full.index(s), count=1)
        mbarrier.init(p_ready.index(s), count=1)
    mbarrier.init(meet, count=2)
    item = grid_dependency_wait(launch_dependents(gl.program_id(0)))
    valid, b, q_start, q_len, kv_len, row0, tile0, tile1, num_splits, part = find_work(
        item, qo_indptr, kv_len_arr, sched, batch, num_heads, target, causal, invariant, BN, BATCH, OVERHEAD, num_warps
    )
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
            pages = kv_indices + gl.load(kv_indptr + b)
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
            fence_async_shared()
            cta_barrier()
            if DS:
                gl.warp_specialize([
                        (_warpgroup, (
                            q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                            colscale, limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                            scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                            first_limit, tile0, nt, 0, BN, ST, KC, TC, DS,
                        )),
                        (_warpgroup, (
                            q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                            colscale, limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                            scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                            first_limit, tile0, nt, 1, BN, ST, KC, TC, DS,
                        )),
                        (_load_ckv, (ckv_desc, pages, tile0, nt, ckv, ckv_full, ckv_empty, ST, PAGE)),
                        (_load_kpe, (kpe_desc, pages, tile0, nt, kpe, kpe_full, p_ready, PAGE, 264, 64)),
                        (_load_scales, (
                            cache_words, pages, tile0, nt, kv_len, scales, exponents, ckv_empty, scales_ready, ST, PAGE,
                        )),
                    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
            else:
                gl.warp_specialize([
                                (_warpgroup, (
                                    q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                                    colscale, limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                                    scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                                    first_limit, tile0, nt, 0, BN, ST, KC, TC, DS,
                                )),
                                (_warpgroup, (
                                    q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                                    colscale, limits, offsets, votes, state, ckv_full, ckv_empty, kpe_full, p_ready, meet, scales, exponents,
                                    scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, kv_len,
                                    first_limit, tile0, nt, 1, BN, ST, KC, TC, DS,
                                )),
                                (_load_ckv, (ckv_desc, pages, tile0, nt, ckv, ckv_full, ckv_empty, ST, PAGE)),
                                (_load_kpe, (kpe_desc, pages, tile0, nt, kpe, kpe_full, p_ready, PAGE, 256, 32)),
                            ], [4, 1, 1], [240, 24, 24])  # fmt: skip
        else:
            _store_empty(
                out, lse, partial_o, partial_lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, num_heads,
                q_start, rows, row0, num_splits <= 1, part, lse_mode, BN,
            )  # fmt: skip
