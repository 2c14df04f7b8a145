"""Sparse decode and extend on Hopper: `wgmma_decode`'s warpgroups over the rows that each query token selects.

One CTA per SM owns one item of `sparse_ops`: BN heads of one query token and a range of its selected rows in tiles of 64. The
two warpgroups that compute and their registers are those of `wgmma_decode`, barriers are by halves; the TMA warps are
replaced:

    row warp             position (two tiles ahead) -> row number (one tile ahead) -> `numbers`, ahead of the copies
    gather warps 0, 1    row numbers -> cp.async of half a tile's rows, 256 contiguous bytes each; with the half that is read
                         first, rope and, fp8_ds_mla, the scales as they are; completes on that half's `ckv_full`. A number of
                         -1 becomes zeros. Any page size
    scale warp           fp8_ds_mla: a tile's scales as fp16 times a power of two, as in `wgmma_decode`, from shared memory

A split's results are fp16 and, for fp8_ds_mla, in units of 2^E as in `wgmma_decode`.

Shared memory is that of `wgmma_decode` with a rope slot for each latent slot (JOINT), 512 B of `numbers` and
(fp8_ds_mla) 1,024 B of raw scales per slot and one more slot of scales; fp8_e4m3 has 3 slots at BN 64.

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
from uncast.kernels.wgmma_load import publish_scales, scale_exponent
from uncast.kernels.wgmma_ops import put_scalar, row_offsets

ALL_LIVE = gl.constexpr(2147483647)


@gluon.jit
def _find_rows(
    line, pages, first, end, nt, kv_len, page_shift, numbers, ready, full, ST: gl.constexpr,
):  # fmt: skip
    """Row warp: the pool's row numbers of tile t, -1 for none, into slot t % (2 ST) of `numbers` [2 ST, 64], as soon as tile
    t - ST has landed: then tile t - 2 ST, which had the slot, is done."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    at = first + gl.arange(0, 64, L)
    rows = slots(pages, entries(line, at, end), kv_len, page_shift)
    position = entries(line, at + 64, end)
    for t in range(nt):
        n = t % (2 * ST)
        following = slots(pages, position, kv_len, page_shift)
        position = entries(line, at + (t + 2) * 64, end)
        mbarrier.wait(full.index(2 * (t % ST) + t % 2), ((t // ST) & 1) ^ 1)
        numbers.index(n).store(rows)
        cta_barrier()
        mbarrier.arrive(ready.index(n), count=1)
        rows = following


@gluon.jit
def _gather_tiles(
    ckv_base, kpe_base, words, numbers, ready, ckv, kpe, raw_scales, full, empty, nt, ST: gl.constexpr, DS: gl.constexpr,
):  # fmt: skip
    """Gather warps: the rows of tile t into slot t % ST, the half that is read first together with rope and scales; every
    thread arrives on a half's `full` when its copies have landed."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [2, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8] if DS else [8, 4], [2, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [2, 1], [1, 0])
    STRIDE: gl.constexpr = 328 if DS else 288
    for t in range(nt):
        s = t % ST
        n = t % (2 * ST)
        mbarrier.wait(ready.index(n), (t // (2 * ST)) & 1)
        for k in gl.static_range(2):
            half = (t + 1 + k) % 2
            mbarrier.wait(empty.index(2 * s + half), ((t // ST) & 1) ^ 1)
            if k == 0:
                if DS:
                    gather(raw_scales.index(s), words + 128, numbers.index(n).load(gl.SliceLayout(1, LS)), 164, LS)
                gather(kpe.index(s), kpe_base, numbers.index(n).load(gl.SliceLayout(1, LR)), STRIDE, LR)
            for c in gl.static_range(4):
                rows = numbers.index(n).slice(c * 16, 16, 0).load(gl.SliceLayout(1, L))
                gather(ckv.index(2 * s + half).slice(c * 16, 16, 0), ckv_base + half * 128, rows, STRIDE, L)
            async_copy.mbarrier_arrive(full.index(2 * s + half), increment_count=False)


@gluon.jit
def _convert_scales(raw_scales, scales, exponents, highest, full, ready, nt, ST: gl.constexpr):
    """Scale warp of fp8_ds_mla: a tile's scales and the highest exponent (`publish_scales`), in slot
    t % (ST + 1). Once the first half of tile t has landed, both of t - 1 - ST are done, and with them its scales."""
    SS: gl.constexpr = ready.shape[0]
    top_e = -100
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    for t in range(nt):
        s = t % SS
        mbarrier.wait(full.index(2 * (t % ST) + (t + 1) % 2), (t // ST) & 1)
        v = raw_scales.index(t % ST).load(L)
        top_e = publish_scales(v, scale_exponent(v), top_e, scales, exponents, highest, ready, s)


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
    ckv = gl.allocate_shared_memory(gl.int16, [2 * ST, 64, 128], wide)
    kpe = gl.allocate_shared_memory(gl.int16, [ST, 64, 64 if DS else 32], wide if DS else narrow)
    qa = gl.allocate_shared_memory(gl.float16, [1, BN, 256], wide)
    qb = gl.allocate_shared_memory(gl.float16, [1, BN, 256], wide)
    if DS:
        ra = gl.allocate_shared_memory(gl.bfloat16, [1, BN, 64], wide)
        rb = ra
        scales = gl.allocate_shared_memory(gl.float16, [4 * ST + 4, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        raw_scales = gl.allocate_shared_memory(gl.float32, [ST, 64, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    else:
        ra = gl.allocate_shared_memory(gl.float16, [1, BN, 32], narrow)
        rb = gl.allocate_shared_memory(gl.float16, [1, BN, 32], narrow)
        scales = ckv
        raw_scales = ckv
    exponents = gl.allocate_shared_memory(gl.int32, [ST + 1, 1], s1)
    scales_ready = gl.allocate_shared_memory(gl.int64, [ST + 1, 1], bar)
    p = gl.allocate_shared_memory(gl.float16, [2, 64, BN], p_smem)
    alpha = gl.allocate_shared_memory(gl.float32, [2, BN], s1)
    flag = gl.allocate_shared_memory(gl.int32, [4, 1], s1)
    colmax = gl.allocate_shared_memory(gl.float32, [BN], s1, gl.zeros([BN], gl.float32, L))
    numbers = gl.allocate_shared_memory(gl.int32, [2 * ST, 64], s1)
    numbers_ready = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], bar)
    offsets = gl.allocate_shared_memory(gl.int32, [BN], s1)
    votes = gl.allocate_shared_memory(gl.int32, [3, 4], s1)
    state = gl.allocate_shared_memory(gl.int32, [6 if DS else 4, 1], s1)
    ckv_full = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], bar)
    ckv_empty = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], bar)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    meet = gl.allocate_shared_memory(gl.int64, [1], bar)
    for s in gl.static_range(2 * ST):
        mbarrier.init(ckv_full.index(s), count=64)  # the threads of the gather warps
        mbarrier.init(ckv_empty.index(s), count=1)
        mbarrier.init(numbers_ready.index(s), count=1)
    for s in gl.static_range(ST + 1):
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
            OURS: gl.constexpr = 240 if BN == 64 else 232
            THEIRS: gl.constexpr = 24 if BN == 64 else 40
            if DS:
                gl.warp_specialize([
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        numbers, offsets, votes, state, ckv_full, ckv_empty, ckv_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, ALL_LIVE,
                        -1, 0, nt, 0, BN, ST, KC, TC, DS, True,
                    )),
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        numbers, offsets, votes, state, ckv_full, ckv_empty, ckv_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, ALL_LIVE,
                        -1, 0, nt, 1, BN, ST, KC, TC, DS, True,
                    )),
                    (_gather_tiles, (
                        ckv_base, kpe_base, cache_words, numbers, numbers_ready, ckv, kpe, raw_scales, ckv_full, ckv_empty, nt,
                        ST, DS,
                    )),
                    (_find_rows, (
                        line, pages, first, end, nt, kv_len, page_shift, numbers, numbers_ready, ckv_full, ST,
                    )),
                    (_convert_scales, (raw_scales, scales, exponents, state.index(4), ckv_full, scales_ready, nt, ST)),
                ], [4, 2, 1, 1], [OURS, THEIRS, THEIRS, THEIRS])  # fmt: skip
            else:
                gl.warp_specialize([
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        numbers, offsets, votes, state, ckv_full, ckv_empty, ckv_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, ALL_LIVE,
                        -1, 0, nt, 0, BN, ST, KC, TC, DS, True,
                    )),
                    (_warpgroup, (
                        q_nope, q_pe, out, lse, partial_o, partial_lse, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax,
                        numbers, offsets, votes, state, ckv_full, ckv_empty, ckv_full, p_ready, meet, scales, exponents,
                        scales_ready, pe_factor, score_factor, lse_stride_t, lse_stride_h, num_heads, lse_mode, ALL_LIVE,
                        -1, 0, nt, 1, BN, ST, KC, TC, DS, True,
                    )),
                    (_gather_tiles, (
                        ckv_base, kpe_base, cache_words, numbers, numbers_ready, ckv, kpe, raw_scales, ckv_full, ckv_empty, nt,
                        ST, DS,
                    )),
                    (_find_rows, (
                        line, pages, first, end, nt, kv_len, page_shift, numbers, numbers_ready, ckv_full, ST,
                    )),
                ], [4, 2, 1], [OURS, THEIRS, THEIRS])  # fmt: skip
        else:
            _store_empty(
                out, lse, partial_o, partial_lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, num_heads,
                token, num_heads, row0, part < 0, part, lse_mode, BN,
            )  # fmt: skip
