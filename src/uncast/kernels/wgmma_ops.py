"""Building blocks of the Hopper attention kernels (`wgmma_decode`): operands, softmax and output of one warpgroup.

A tile of 64 cache rows lies in shared memory as it lies in the cache, read as uint16 *channel pairs*: ckv two halves of
[64, 128], kpe [64, 32]. `ldmatrix` gives rows x channels (K), `ldmatrix.trans` gives channels x rows (V^T). Unpacking a 32-bit
register of e4m3 yields two fp16x2 registers that are already MMA operands, so no 16-bit copy of the cache exists anywhere:

    K    register = channels 4i..4i+3 of one row     -> (4i, 4i+1) and (4i+2, 4i+3), contracted with `qa` and `qb`
    V^T  register = channels 2c, 2c+1 of rows t, t+1 -> channel 2c and channel 2c+1, accumulated in `oe` and `oo`

`fp8_ds_mla` (DS below): the operands are multiplied by their row's scale of the channel group, times 2^-e, where e follows the
largest scale of the tile and keeps every product in fp16's range; the score gets e back, and the weight becomes 2^(x + e - m),
so that a tile with large scales weighs as it must against one with small ones. Scales of one tile may spread over 2^24
before small ones lose precision. Keys times a power of two are exact, as writers make the scales; where a tile has others,
the keys' scales are split into three numbers of 7 bits, whose products are exact, and the scores are summed in three passes
(values take the scale rounded to fp16). The rope is bf16, times 2^-e, and has one bf16 operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from uncast.kernels.gluon_compat import cta_barrier, smem_view
from uncast.kernels.unpack import (
    unpack_keys,
    unpack_keys_scaled,
    unpack_values,
    unpack_values_scaled,
)

HIDDEN = gl.constexpr(-1e30)
"""Score of a row a query must not see; its weight is exactly 0 because column maxima stay above -1e29."""
HEADROOM = gl.constexpr(5.0)
"""A new column maximum puts its largest weight at 2^5; weights may grow to 2^15 (RESCALE_AT: 15.0 as bits)."""
RESCALE_AT = gl.constexpr(0x41700000)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def opaque_zero(x):
    """0 that the compiler cannot hoist: keeps loop-invariant wgmma descriptors and limits out of the registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ex2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def put_scalar(slot, x, WARPS: gl.constexpr = 4):
    slot.store(gl.full([1], x, slot.dtype, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def get_scalar(slot):
    """A scalar kept in shared memory (int32 [1]): what only the rare paths and the end need costs no register."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def row_offsets(row, rows, q_start, num_heads, stride_t, stride_h):
    """Offset / 8 of the folded rows `row` (token * num_heads + head) of a request in a [tokens, heads, ...] tensor; -1 behind
    `rows`. int32 reaches 2^34 elements; strides are multiples of 8."""
    at = (q_start + row // num_heads).to(gl.int64) * stride_t + (row % num_heads).to(gl.int64) * stride_h
    return gl.where(row < rows, (at >> 3).to(gl.int32), -1)


@gluon.jit
def _scaled_values(x, scales, first, TC: gl.constexpr):
    """`unpack_values_scaled` of channel pairs [128, TC] by `scales` (shared memory [4, TC] fp16): row `first` for the pairs
    0..63, the next for the pairs 64..127."""
    op: gl.constexpr = x.type.layout
    x3 = x.reshape([2, 64, TC])
    group: gl.constexpr = gl.SliceLayout(1, x3.type.layout)
    even, odd = unpack_values_scaled(x3, scales.slice(first, 2, 0).load(group)[:, None, :])
    even = gl.convert_layout(even.reshape([128, TC]), op, assert_trivial=True)
    return even, gl.convert_layout(odd.reshape([128, TC]), op, assert_trivial=True)


@gluon.jit
def scale_bf16(x, power):
    """x times a power of two given as its bf16 value; one register holds two channels."""
    s, x = gl.broadcast(gl.full([1, 1], power, gl.bfloat16, x.type.layout), x)
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, s], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def power_of_two(e):
    return ((e + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def clean_rows(tile, live):
    """Zeroes the rows from `live` on of half a ckv tile [64, 128]: 0 weight times a NaN code behind a request's end is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    ok = gl.arange(0, 64, gl.SliceLayout(1, L)) < live
    for c in gl.static_range(4):
        part = tile.slice(c * 32, 32, 1)
        part.store(gl.where(ok[:, None], part.load(L), 0))


@gluon.jit
def _keys(raw, scales, c: gl.constexpr, KC: gl.constexpr, DS: gl.constexpr):
    """fp16 operands of the key channel pairs c * KC .. of a tile; `scales` fp16 [4, 64]."""
    if DS:
        k1, k2 = unpack_keys_scaled(raw, scales.slice(c * KC // 64, 1, 0).permute((1, 0)).load(raw.type.layout))
    else:
        k1, k2 = unpack_keys(raw, True)
    return k1, k2


@gluon.jit
def scores(
    early, late, kpe, kpe_full, kpe_phase, early_full, late_full, ckv_phase, qa, qb, ra, rb, scales, e, w: gl.constexpr,
    mma: gl.constexpr, BN: gl.constexpr, KC: gl.constexpr, DS: gl.constexpr, JOINT: gl.constexpr, WHOLE: gl.constexpr = False,
):  # fmt: skip
    """S^T [64, BN] = K Q^T of a tile (unscaled accumulators). Conversions of a chunk run while the previous one multiplies.
    early, late: the tile's halves 1 - w and w. WHOLE: one barrier says that both are there."""
    op: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    NC: gl.constexpr = 128 // KC
    EARLY: gl.constexpr = 128 - 128 * w
    LATE: gl.constexpr = 128 * w - 128
    mbarrier.wait(kpe_full, kpe_phase)
    acc = gl.zeros([64, BN], gl.float32, mma)
    if DS:
        ka = scale_bf16(kpe.load(op).to(gl.bfloat16, bitcast=True), power_of_two(-e).to(gl.bfloat16))
        acc = warpgroup_mma(ka, ra.permute((1, 0)), acc, use_acc=False, is_async=True)
        kb = ka
    else:
        ka, kb = unpack_keys(kpe.load(op), True)
        acc = warpgroup_mma(ka, ra.permute((1, 0)), acc, use_acc=False, is_async=True)
        acc = warpgroup_mma(kb, rb.permute((1, 0)), acc, is_async=True)
    if not JOINT:
        mbarrier.wait(early_full, ckv_phase)
    raw = early.slice(0, KC, 1).load(op)
    for c in gl.static_range(2 * NC):
        kc, kd = _keys(raw, scales, (EARLY if c < NC else LATE) // KC + c, KC, DS)
        if c + 1 < NC:
            raw = early.slice((c + 1) * KC, KC, 1).load(op)
        elif (WHOLE or c + 1 > NC) and c + 1 < 2 * NC:
            raw = late.slice((c + 1 - NC) * KC, KC, 1).load(op)
        q1 = qa.slice((EARLY if c < NC else LATE) + c * KC, KC, 1)
        q2 = qb.slice((EARLY if c < NC else LATE) + c * KC, KC, 1)
        acc = warpgroup_mma(kc, q1.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(kd, q2.permute((1, 0)), acc, is_async=True)
        if c + 1 == NC and not WHOLE:
            mbarrier.wait(late_full, ckv_phase)
            raw = late.slice(0, KC, 1).load(op)
        acc, ka, kb = warpgroup_mma_wait(2, deps=[acc, ka, kb])
        ka = kc
        kb = kd
    acc, ka, kb = warpgroup_mma_wait(0, deps=[acc, ka, kb])
    return acc


@gluon.jit
def more_scores(acc, ckv, half: gl.constexpr, qa, qb, scales, mma: gl.constexpr):
    """Adds the product of half a tile whose keys are multiplied by `scales` (fp16 [4, 64]): few registers, not fast."""
    op: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    for c in gl.static_range(8):
        ka, kb = _keys(ckv.slice(c * 16, 16, 1).load(op), scales, half * 8 + c, 16, True)
        acc = warpgroup_mma(ka, qa.slice(half * 128 + c * 16, 16, 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(kb, qb.slice(half * 128 + c * 16, 16, 1).permute((1, 0)), acc, is_async=True)
        acc, ka, kb = warpgroup_mma_wait(0, deps=[acc, ka, kb])
    return acc


@gluon.jit
def seven_bits(x):
    """x truncated to 7 significant bits: times an e4m3 code it is exact in fp16."""
    return (x.to(gl.int32, bitcast=True) & 0x7FFE0000).to(gl.float32, bitcast=True)


@gluon.jit
def hide_rows(x, tile_row0, limits, mma: gl.constexpr):
    """Masks the scores of rows that a query must not see. `limits`: int32 [BN], the number of rows each query sees; or, sparse,
    [2 ST, 64], the numbers of a tile's rows in the pool, negative for one that is not selected."""
    if limits.rank == 2:
        number = limits.index(tile_row0 // 64 % limits.shape[0]).load(gl.SliceLayout(1, mma))
        hidden = gl.where((number >= 0)[:, None], x, HIDDEN)
    else:
        rows = tile_row0 + gl.arange(0, 64, gl.SliceLayout(1, mma))
        hidden = gl.where(rows[:, None] < limits.load(gl.SliceLayout(0, mma))[None, :], x, HIDDEN)
    return hidden


@gluon.jit
def needs_rescale(x, votes, BN: gl.constexpr):
    """Whether a score of the tile exceeds RESCALE_AT; compared as integers, so that a NaN cannot hide another row's score."""
    xi = (
        gl.max(gl.max(gl.max(x.reshape([4, 2, 8, BN // 8, 4, 2]), 5), 3), 1).reshape([4, 32]).to(gl.int32, bitcast=True)
    )
    votes.store(gl.max(xi, 1))
    return gl.max(votes.load(gl.BlockedLayout([4], [32], [4], [0])), 0) > RESCALE_AT


@gluon.jit
def row_view(buffer, ROWS: gl.constexpr, BN: gl.constexpr):
    """`buffer` as ROWS indexable rows [BN] fp32."""
    return smem_view(buffer, gl.float32, [ROWS, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_warp_rows(buffer, x, first, ROWS: gl.constexpr, BN: gl.constexpr):
    """Stores x [4, BN], one row per warp, as rows first .. first + 4 of `row_view`."""
    view = smem_view(buffer, gl.float32, [ROWS, BN], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    view.slice(first, 4, 0).store(x)


@gluon.jit
def column_max(x, buffer, cols: gl.constexpr, BN: gl.constexpr):
    """Maximum over the 64 rows of each column; `buffer` (a weight tile) is scratch for one row per warp."""
    store_warp_rows(buffer, gl.max(x.reshape([4, 16, BN]), 1), 0, 32, BN)
    rows = row_view(buffer, 32, BN)
    m01 = gl.maximum(rows.index(0).load(cols), rows.index(1).load(cols))
    return gl.maximum(m01, gl.maximum(rows.index(2).load(cols), rows.index(3).load(cols)))


@gluon.jit
def scale_sums(sums, a):
    return sums * gl.convert_layout(a, gl.SliceLayout(0, gl.SliceLayout(0, sums.type.layout)))[None, :][None, :, :]


@gluon.jit
def _values(raw, scales, w: gl.constexpr, c: gl.constexpr, TC: gl.constexpr, DS: gl.constexpr):
    """fp16 operands of the rows c * TC .. of a tile, warpgroup w's channel pairs; `scales` fp16 [4, 64]."""
    if DS:
        even, odd = _scaled_values(raw, scales.slice(c * TC, TC, 1), 2 * w, TC)
    else:
        even, odd = unpack_values(raw, True)
    return even, odd


@gluon.jit
def accumulate(oe, oo, ckv, p, alpha, flag, scales, w: gl.constexpr, TC: gl.constexpr, DS: gl.constexpr):
    """O^T (256 channels of this warpgroup: even in `oe`, odd in `oo`) += V^T P^T of a tile; ckv [64, 128] channel pairs.

    TC rows are converted while the previous ones multiply; they are issued before those are waited for.
    """
    mma: gl.constexpr = oe.type.layout
    op: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    NC: gl.constexpr = 64 // TC
    raw = ckv.slice(0, TC, 0).permute((1, 0)).load(op)
    if get_scalar(flag) > 0:
        a = alpha.load(gl.SliceLayout(0, mma))
        oe = oe * a[None, :]
        oo = oo * a[None, :]
    ve, vo = _values(raw, scales, w, 0, TC, DS)
    we = ve
    wo = vo
    for c in gl.static_range(NC):
        oe = warpgroup_mma(ve, p.slice(c * TC, TC, 0), oe, is_async=True)
        oo = warpgroup_mma(vo, p.slice(c * TC, TC, 0), oo, is_async=True)
        if c > 0:
            oe, oo, we, wo = warpgroup_mma_wait(2, deps=[oe, oo, we, wo])
        we = ve
        wo = vo
        if c + 1 < NC:
            raw = ckv.slice((c + 1) * TC, TC, 0).permute((1, 0)).load(op)
            ve, vo = _values(raw, scales, w, c + 1, TC, DS)
    oe, oo, we, wo = warpgroup_mma_wait(0, deps=[oe, oo, we, wo])
    return oe, oo


@gluon.jit
def column_totals(sums, buffer, meet, w: gl.constexpr, L: gl.constexpr, SIZE: gl.constexpr, BN: gl.constexpr):
    """Softmax sums [BN] of both warpgroups in layout L. `sums` is [4, 8, BN] (warps, lanes), `buffer` SIZE rows [BN] fp32."""
    store_warp_rows(buffer, gl.sum(sums, 1), w * 4, SIZE, BN)
    cta_barrier()
    mbarrier.arrive(meet, count=1)
    mbarrier.wait(meet, 0)
    rows = row_view(buffer, SIZE, BN)
    total = rows.index(0).load(L)
    for k in gl.static_range(1, 8):
        total += rows.index(k).load(L)
    return total


@gluon.jit
def pack_bf16(even, odd):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def pack_fp16(even, odd):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def store_outputs(oe, oo, factor, out, partial_o, offsets, direct, w: gl.constexpr):
    """Stores O^T times `factor` (shared memory [BN]) as channel pairs: to `out` in its dtype, or as fp16 to `partial_o`."""
    mma: gl.constexpr = oe.type.layout
    cols: gl.constexpr = gl.SliceLayout(0, mma)
    f = factor.load(cols)[None, :]
    oe = oe * f
    oo = oo * f
    if out.dtype.element_ty == gl.bfloat16:
        if direct:  # noqa: SIM108 (a branch, so that only one conversion is executed)
            words = pack_bf16(oe, oo)
        else:
            words = pack_fp16(oe, oo)
    else:
        words = pack_fp16(oe, oo)
    base = gl.where(direct, out.to(gl.int64), partial_o.to(gl.int64)).to(gl.pointer_type(gl.int32))
    off = offsets.load(cols)
    c = w * 128 + gl.arange(0, 128, gl.SliceLayout(1, mma))
    gl.store(base + (off.to(gl.int64) * 4)[None, :] + c[:, None], words, mask=(off >= 0)[None, :])
