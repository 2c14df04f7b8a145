"""Sparse decode and extend on Hopper: `wgmma_decode`'s warpgroups over the rows that each query token selects.

One CTA per SM owns one item of `sparse_ops`: BN heads of one query token and a range of its selected rows in tiles of 64. The
two warpgroups that compute, their registers and barriers are those of `wgmma_decode`; the TMA warps are replaced:

    gather warps 0, 1    position (two tiles ahead) -> row number (one tile ahead) -> cp.async of latent and rope, 16 bytes a
                         lane, completing on `ckv_full`; any page size. An entry that selects nothing becomes zeros
    choice warp          which of a tile's rows are selected, into `chosen`; fp8_ds_mla: also the rows' scales, as in
                         `wgmma_decode`; completes on `scales_ready` (fp8_ds_mla) or `ckv_full`

A split's results are fp16 and, for fp8_ds_mla, in units of 2^E as in `wgmma_decode`.

Shared memory is that of `wgmma_decode` with a rope slot for each latent slot (JOINT) and 256 B of `chosen` per slot:
fp8_e4m3 with 3 slots at BN 64.

Floor: row_bytes per selected row and query token (L2 keeps what the head blocks of a token share), or 2 * 1088 FLOP per head
and selected row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from uncast.kernels.gluon_compat import cta_barrier, smem_view
from uncast.kernels.pdl import grid_dependency_wait, launch_dependents
from uncast.kernels.sparse_ops import entries, find_item, gather, slots
from uncast.kernels.wgmma_decode import ROWS, _store_empty, _warpgroup
from uncast.kernels.wgmma_ops import power_of_two, put_scalar, row_offsets, seven_bits

ALL_LIVE = gl.constexpr(2147483647)


@gluon.jit
def _gather_tiles(
    ckv_base, kpe_base, line, pages, first, end, nt, kv_len, page_shift, ckv, kpe, full, empty, ST: gl.constexpr,
    DS: gl.constexpr,
):  # fmt: skip
    """Gather warps: the rows of tile t into slot t % ST; every thread arrives on `full` when its copies have landed."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [2, 1], [1, 0])
    STRIDE: gl.constexpr = 328 if DS else 288
    at = first + gl.arange(0, 64, gl.SliceLayout(1, L))
    at_r = first + gl.arange(0, 64, gl.SliceLayout(1, LR))
    rows = slots(pages, entries(line, at, end), kv_len, page_shift)
    position = entries(line, at + 64, end)
    if not DS:
        rows_r = slots(pages, entries(line, at_r, end), kv_len, page_shift)
        position_r = entries(line, at_r + 64, end)
    for t in range(nt):
        s = t % ST
        mbarrier.wait(empty.index(s), ((t // ST) & 1) ^ 1)
        gather(ckv.index(s), ckv_base, rows, STRIDE, L)
        if DS:
            gather(kpe.index(s), kpe_base, rows, STRIDE, L)
        else:
            gather(kpe.index(s), kpe_base, rows_r, STRIDE, LR)
        async_copy.mbarrier_arrive(full.index(s), increment_count=False)
        rows = slots(pages, position, kv_len, page_shift)
        position = entries(line, at + (t + 2) * 64, end)
        if not DS:
            rows_r = slots(pages, position_r, kv_len, page_shift)
            position_r = entries(line, at_r + (t + 2) * 64, end)


@gluon.jit
def _fetch_scales(words, rows, L: gl.constexpr):
    """The four scales of each row (fp8_ds_mla: fp32 words 128..131 of 164); 0 for none."""
    off = rows.to(gl.int64) * 164 + 128
    return gl.load(
        words + off[:, None] + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :], mask=(rows >= 0)[:, None], other=0.0
    )


@gluon.jit
def _publish_choices(
    words, line, pages, first, end, nt, kv_len, page_shift, chosen, scales, exponents, highest, full, empty, ready,
    ST: gl.constexpr, DS: gl.constexpr,
):  # fmt: skip
    """Choice warp: `chosen` [ST, 64] of each tile, and fp8_ds_mla's scales and highest exponent in the form of
    `wgmma_decode._load_scales`."""
    top_e = -100
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    at = first + gl.arange(0, 64, gl.SliceLayout(1, L))
    rows = slots(pages, entries(line, at, end), kv_len, page_shift)
    next_rows = slots(pages, entries(line, at + 64, end), kv_len, page_shift)
    position = entries(line, at + 128, end)
    v = _fetch_scales(words, rows, L) if DS else rows
    for t in range(nt):
        s = t % ST
        following = _fetch_scales(words, next_rows, L) if DS else rows
        last_rows = slots(pages, position, kv_len, page_shift)
        position = entries(line, at + (t + 3) * 64, end)
        if DS:
            top = gl.max(gl.max(v.to(gl.int32, bitcast=True), 1), 0)
            e = gl.minimum(gl.maximum((top >> 23) - 127 - 6, -100), 100)
            v = v * power_of_two(-e)
            inexact = gl.max(gl.max(v.to(gl.int32, bitcast=True) & 0x7FFFFF, 1), 0)
        mbarrier.wait(empty.index(s), ((t // ST) & 1) ^ 1)
        chosen.index(s).store((rows >= 0).to(gl.int32))
        if DS:
            scales.index(4 * s).permute((1, 0)).store(v.to(gl.float16))
            put_scalar(exponents.index(s), 2 * e + gl.minimum(inexact, 1), 1)
            top_e = gl.maximum(top_e, e)
            put_scalar(highest, top_e, 1)
            if inexact > 0:
                for k in range(3):
                    scales.index(4 * s + 1 + k).permute((1, 0)).store(seven_bits(v).to(gl.float16))
                    v = v - seven_bits(v)
        cta_barrier()
        if DS:
            mbarrier.arrive(ready.index(s), count=1)
        else:
            mbarrier.arrive(full.index(s), count=1)
        rows = next_rows
        next_rows = last_rows
        v = following


_SCALARS = ["num_heads", "batch", "topk", "splits", "per", "page_shift", "lse_mode", "scale_flags", "scale_offset"]


@gluon.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=["indices"])
def wgmma_sparse_kernel(
    q_nope, q_pe, ckv_base, kpe_base, cache_words, indices, qo_indptr, kv_indptr, kv_indices, kv_len_arr, out, lse,
    partial_o, partial_lse, sched, ckv_scale, kpe_scale, ckv_scale_ptr, kpe_scale_ptr, sm_scale_log2,
    nope_stride_t, nope_stride_h, pe_stride_t, pe_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    num_heads, batch, topk, splits, per, page_shift, lse_mode, scale_flags, scale_offset,
    BN: gl.constexpr, ST: gl.constexpr, KC: gl.constexpr, TC: gl.constexpr, BATCH: gl.constexpr, DS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: `SplitPlan.num_items` of `sparse_plan`. ckv_base, kpe_base: the cache as int16, each starting at its field of row
    0; cache_words: as fp32. indices: int32 [tokens, topk] positions; page_shift: log2 of the page size; scale_offset: where the
    scales of partial results lie behind `partial_lse` (fp8_ds_mla)."""
    s1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    p_smem: gl.constexpr = gl.NVMMASharedLayout(128 if BN >= 64 else 2 * BN, 16, 2)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ckv = gl.allocate_shared_memory(gl.int16, [ST, 64, 256], wide)
    kpe = gl.allocate_shared_memory(gl.int16, [ST, 64, 64 if DS else 32], wide if DS else narrow)
    qa = gl.allocate_shared_memory(gl.float16, [1, BN, 256], wide)
    qb = gl.allocate_shared_memory(gl.float16, [1, BN, 256], wide)
    if DS:
        ra = gl.allocate_shared_memory(gl.bfloat16, [1, BN, 64], wide)
        rb = ra
        scales = gl.allocate_shared_memory(gl.float16, [4 * ST, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    else:
        ra = gl.allocate_shared_memory(gl.float16, [1, BN, 32], narrow)
        rb = gl.allocate_shared_memory(gl.float16, [1, BN, 32], narrow)
        scales = ckv
    exponents = gl.allocate_shared_memory(gl.int32, [ST, 1], s1)
    scales_ready = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    p = gl.allocate_shared_memory(gl.float16, [2, 64, BN], p_smem)
    alpha = gl.allocate_shared_memory(gl.float32, [2, BN], s1)
    flag = gl.allocate_shared_memory(gl.int32, [4, 1], s1)
    colmax = gl.allocate_shared_memory(gl.float32, [BN], s1, gl.zeros([BN], gl.float32, L))
    chosen = gl.allocate_shared_memory(gl.int32, [ST, 64], s1)
    offsets = gl.allocate_shared_memory(gl.int32, [BN], s1)
    votes = gl.allocate_shared_memory(gl.int32, [3, 4], s1)
    state = gl.allocate_shared_memory(gl.int32, [6 if DS else 4, 1], s1)
    ckv_full = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    ckv_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    meet = gl.allocate_shared_memory(gl.int64, [1], bar)
    for s in gl.static_range(ST):
        mbarrier.init(ckv_full.index(s), count=64 if DS else 65)  # 2 gather warps, and the choice warp
        mbarrier.init(ckv_empty.index(s), count=2)
        mbarrier.init(scales_ready.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(p_ready.index(s), count=1)
    mbarrier.init(meet, count=2)
    item = grid_dependency_wait(launch_dependents(gl.program_id(0)))
    valid, token, kv_start, kv_len, row0, first, end, part = find_item(
        item, qo_indptr, kv_indptr, kv_len_arr, indices, sched, batch, num_heads, topk, splits, per, BN, BATCH, num_warps,
    )  # fmt: skip
    nt = (end - first + 63) // 64
    if valid:
        if nt > 0:
            from_ptr = (scale_flags & 1) != 0
            latent_scale = gl.where(from_ptr, gl.load(ckv_scale_ptr, mask=from_ptr, other=1.0), ckv_scale)
            from_ptr = (scale_flags & 2) != 0
            rope_scale = gl.where(from_ptr, gl.load(kpe_scale_ptr, mask=from_ptr, other=1.0), kpe_scale)
            pe_factor = rope_scale / latent_scale
            score_factor = latent_scale * sm_scale_log2
            line = indices + token.to(gl.int64) * topk
            pages = kv_indices + kv_start
            # one thread a row: where it is read and written
            row = row0 + gl.arange(0, BN, L)
            read = smem_view(p.index(0), gl.int32, [32, BN], ROWS)
            read.index(0).store(row_offsets(row, num_heads, token, num_heads, nope_stride_t, nope_stride_h))
            read.index(1).store(row_offsets(row, num_heads, token, num_heads, pe_stride_t, pe_stride_h))
            at = row_offsets(row, num_heads, token, num_heads, out_stride_t, out_stride_h)
            offsets.store(gl.where((part >= 0) & (row < num_heads), (part * BN + row - row0) * 64, at))
            put_scalar(state.index(0), part)
            put_scalar(state.index(1), latent_scale.to(gl.int32, bitcast=True))
            put_scalar(state.index(2), row0)
            put_scalar(state.index(3), token)
            if DS:
                put_scalar(state.index(5), scale_offset)
            fence_async_shared()
            cta_barrier()
            gl.warp_specialize([
                (_warpgroup, (
                    q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                    chosen, offsets, votes, state, ckv_full, ckv_empty, ckv_full, p_ready, meet, scales, exponents,
                    scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, ALL_LIVE,
                    -1, 0, nt, 0, BN, ST, KC, TC, DS, True,
                )),
                (_warpgroup, (
                    q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                    chosen, offsets, votes, state, ckv_full, ckv_empty, ckv_full, p_ready, meet, scales, exponents,
                    scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, ALL_LIVE,
                    -1, 0, nt, 1, BN, ST, KC, TC, DS, True,
                )),
                (_gather_tiles, (
                    ckv_base, kpe_base, line, pages, first, end, nt, kv_len, page_shift, ckv, kpe, ckv_full, ckv_empty,
                    ST, DS,
                )),
                (_publish_choices, (
                    cache_words, line, pages, first, end, nt, kv_len, page_shift, chosen, scales, exponents,
                    state.index(4 if DS else 0), ckv_full, ckv_empty, scales_ready, ST, DS,
                )),
            ], [4, 2, 1], [232, 40, 40])  # fmt: skip
        else:
            _store_empty(
                out, lse, partial_o, partial_lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, num_heads,
                token, num_heads, row0, part < 0, part, lse_mode, BN,
            )  # fmt: skip
