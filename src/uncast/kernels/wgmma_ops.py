"""Building blocks of the Hopper attention kernels (`wgmma_decode`): operands, softmax and output of one warpgroup.

A tile of 64 cache rows lies in shared memory as it lies in the cache, read as uint16 *channel pairs*: ckv [64, 256],
kpe [64, 32]. `ldmatrix` gives rows x channels (K), `ldmatrix.trans` gives channels x rows (V^T). Unpacking a 32-bit
register of e4m3 yields two fp16x2 registers that are already MMA operands, so no 16-bit copy of the cache exists anywhere:

    K    register = channels 4i..4i+3 of one row     -> (4i, 4i+1) and (4i+2, 4i+3), contracted with `qa` and `qb`
    V^T  register = channels 2c, 2c+1 of rows t, t+1 -> channel 2c and channel 2c+1, accumulated in `oe` and `oo`

`fp8_ds_mla` (DS below): the operands are multiplied by their row's scale of the channel group, times 2^-e, where e follows the
largest scale of the tile and keeps every product in fp16's range; the score gets e back, and the weight becomes 2^(x + e - m),
so that a tile with large scales weighs as it must against one with small ones. Scales of one tile may spread over 2^24
before small ones lose precision. The rope is bf16, times 2^-e, and has one bf16 operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from uncast.kernels.gluon_compat import cta_barrier, smem_view
from uncast.kernels.unpack import split_queries, unpack_keys, unpack_values

CVT_KEYS_SCALED = gl.constexpr("""{
.reg .b16 lo, hi;
mov.b32 {lo, hi}, $2;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}""")
CVT_VALUES_SCALED = gl.constexpr("""{
.reg .b32 e;
.reg .b16 lo, hi;
prmt.b32 e, $2, 0, 0x3120;
mov.b32 {lo, hi}, e;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}""")
HIDDEN = gl.constexpr(-1e30)
"""Score of a row a query must not see; its weight is exactly 0 because column maxima stay above -1e29."""
HEADROOM = gl.constexpr(5.0)
"""A new column maximum puts its largest weight at 2^5; weights may grow to 2^RESCALE_AT before the next rescale."""
RESCALE_AT = gl.constexpr(15.0)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def grid_dependency_wait(x):
    """Waits for the kernels this one depends on; returns `x`, so that what depends on `x` comes after."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents(x):
    """Lets the next kernel of the stream be scheduled; it still waits for this one's end before it reads."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


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
def load_q(q, offsets, ch0, W: gl.constexpr, L: gl.constexpr):
    """Query rows at `offsets` (shared memory, see `row_offsets`), channels ch0 .. ch0 + W, fp32; 0 where the offset is -1."""
    off = offsets.load(gl.SliceLayout(1, L))
    c = ch0 + gl.arange(0, W, gl.SliceLayout(0, L))
    return gl.load(q + (off.to(gl.int64) * 8)[:, None] + c[None, :], mask=(off >= 0)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _power(am0, am1, am2):
    """Exponent bits of the largest magnitude of a query row, at least 2^-112 so that both powers below are normal."""
    return gl.maximum(gl.maximum(gl.maximum(am0, am1), am2).to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23)


@gluon.jit
def _to_fp16(power):
    """2^14 over that power of two: a row's largest channel becomes 2^14 .. 2^15 in fp16."""
    return (0x7F000000 - power + (14 << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def _scaled(x, scale, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, "=&r,=&r,r,r", [x, scale], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def unpack_keys_scaled(x, scale):
    """`unpack_keys` times `scale` [rows, 1] (fp16, in x's layout)."""
    scale, x = gl.broadcast(scale, x)
    return _scaled(x, scale, CVT_KEYS_SCALED)


@gluon.jit
def unpack_values_scaled(x, scales, first, TC: gl.constexpr):
    """`unpack_values` of channel pairs [128, TC] times `scales` (shared memory [4, TC] fp16): rows `first`, `first` + 1 for
    the pairs 0..63 and 64..127."""
    op: gl.constexpr = x.type.layout
    x3 = x.reshape([2, 64, TC])
    group: gl.constexpr = gl.SliceLayout(1, x3.type.layout)
    s3, x3 = gl.broadcast(scales.slice(first, 2, 0).load(group)[:, None, :], x3)
    even, odd = _scaled(x3, s3, CVT_VALUES_SCALED)
    even = gl.convert_layout(even.reshape([128, TC]), op, assert_trivial=True)
    return even, gl.convert_layout(odd.reshape([128, TC]), op, assert_trivial=True)


@gluon.jit
def scale_bf16(x, power):
    """x times a power of two given as its bf16 value; one register holds two channels."""
    s, x = gl.broadcast(gl.full([1, 1], power, gl.bfloat16, x.type.layout), x)
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, s], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def power_of_two(e):
    return ((e + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store_q(x, factor, dst_a, dst_b, BN: gl.constexpr, W: gl.constexpr):
    a, b = split_queries((x * factor[:, None]).to(gl.float16), BN, W, True)
    dst_a.store(a)
    dst_b.store(b)


@gluon.jit
def prepare_q(
    q_nope, q_pe, pe_factor, score_factor, qa, qb, ra, rb, offsets, amax, colscale, meet, w: gl.constexpr, BN: gl.constexpr,
    DS: gl.constexpr,
):  # fmt: skip
    """Warpgroup w writes its 256 latent channels (and w = 1 the rope) of Q to shared memory as fp16, each row times its own
    power of two; `colscale` [BN] fp32 turns an accumulator into a base-2 score. `offsets` int32 [>= 2, BN]: rows of q_nope
    and q_pe; `amax` fp32 [>= 3, BN] is scratch."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a = load_q(q_nope, offsets.index(0), w * 256, 128, L)
    b = load_q(q_nope, offsets.index(0), w * 256 + 128, 128, L)
    if w == 1:
        r = load_q(q_pe, offsets.index(1), 0, 64, LR) * pe_factor
        amax.index(2).store(gl.max(gl.abs(r), 1))
    amax.index(w).store(gl.max(gl.maximum(gl.abs(a), gl.abs(b)), 1))
    cta_barrier()
    mbarrier.arrive(meet, count=1)
    mbarrier.wait(meet, 0)
    col: gl.constexpr = gl.SliceLayout(1, L)
    power = _power(amax.index(0).load(col), amax.index(1).load(col), amax.index(2).load(col))
    factor = _to_fp16(power)
    _store_q(a, factor, qa.slice(w * 128, 64, 1), qb.slice(w * 128, 64, 1), BN, 128)
    _store_q(b, factor, qa.slice(w * 128 + 64, 64, 1), qb.slice(w * 128 + 64, 64, 1), BN, 128)
    if w == 1:
        colr: gl.constexpr = gl.SliceLayout(1, LR)
        pr = _power(amax.index(0).load(colr), amax.index(1).load(colr), amax.index(2).load(colr))
        if DS:
            ra.store((r * _to_fp16(pr)[:, None]).to(gl.bfloat16))
        else:
            _store_q(r, _to_fp16(pr), ra, rb, BN, 64)
    else:
        colscale.store((power - (14 << 23)).to(gl.float32, bitcast=True) * score_factor)
    fence_async_shared()
    cta_barrier()
    mbarrier.arrive(meet, count=1)
    mbarrier.wait(meet, 1)


@gluon.jit
def clean_rows(tile, live):
    """Zeroes the rows from `live` on of a ckv tile [64, 256]: 0 weight times a NaN code behind a request's end is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    ok = gl.arange(0, 64, gl.SliceLayout(1, L)) < live
    for c in gl.static_range(8):
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
    ckv, kpe, kpe_full, kpe_phase, ckv_full, ckv_phase, qa, qb, ra, rb, scales, e, mma: gl.constexpr, BN: gl.constexpr,
    KC: gl.constexpr, DS: gl.constexpr,
):  # fmt: skip
    """S^T [64, BN] = K Q^T of a tile (unscaled accumulators). Conversions of a chunk run while the previous one multiplies."""
    op: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    NC: gl.constexpr = 256 // KC
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
    mbarrier.wait(ckv_full, ckv_phase)
    raw = ckv.slice(0, KC, 1).load(op)
    for c in gl.static_range(NC):
        kc, kd = _keys(raw, scales, c, KC, DS)
        if c + 1 < NC:
            raw = ckv.slice((c + 1) * KC, KC, 1).load(op)
        acc = warpgroup_mma(kc, qa.slice(c * KC, KC, 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(kd, qb.slice(c * KC, KC, 1).permute((1, 0)), acc, is_async=True)
        acc, ka, kb = warpgroup_mma_wait(2, deps=[acc, ka, kb])
        ka = kc
        kb = kd
    acc, ka, kb = warpgroup_mma_wait(0, deps=[acc, ka, kb])
    return acc


@gluon.jit
def hide_rows(x, tile_row0, limits, mma: gl.constexpr):
    """Masks the scores of rows that a query must not see: `limits` [BN] is the number of rows it sees."""
    rows = tile_row0 + gl.arange(0, 64, gl.SliceLayout(1, mma))
    return gl.where(rows[:, None] < limits.load(gl.SliceLayout(0, mma))[None, :], x, HIDDEN)


@gluon.jit
def warpgroup_max(x, votes, BN: gl.constexpr):
    """Largest score of the tile if positive (a negative result means only: none is positive). One warpgroup barrier."""
    xi = gl.max(gl.max(gl.max(x.reshape([4, 2, 8, BN // 8, 4, 2]), 5), 3), 1).reshape([4, 32]).to(gl.int32, bitcast=True)
    votes.store(gl.max(xi, 1))
    return gl.max(votes.load(gl.BlockedLayout([4], [32], [4], [0])), 0).to(gl.float32, bitcast=True)


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
        even, odd = unpack_values_scaled(raw, scales.slice(c * TC, TC, 1), 2 * w, TC)
    else:
        even, odd = unpack_values(raw, True)
    return even, odd


@gluon.jit
def accumulate(oe, oo, ckv, p, alpha, flag, scales, w: gl.constexpr, TC: gl.constexpr, DS: gl.constexpr):
    """O^T (256 channels of this warpgroup: even in `oe`, odd in `oo`) += V^T P^T of a tile; ckv [64, 128] channel pairs.

    The next TC rows are converted while the previous ones multiply.
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
    for c in gl.static_range(NC):
        oe = warpgroup_mma(ve, p.slice(c * TC, TC, 0), oe, is_async=True)
        oo = warpgroup_mma(vo, p.slice(c * TC, TC, 0), oo, is_async=True)
        if c + 1 < NC:
            raw = ckv.slice((c + 1) * TC, TC, 0).permute((1, 0)).load(op)
            we, wo = _values(raw, scales, w, c + 1, TC, DS)
        oe, oo, ve, vo = warpgroup_mma_wait(0, deps=[oe, oo, ve, vo])
        if c + 1 < NC:
            ve = we
            vo = wo
    return oe, oo


@gluon.jit
def column_totals(sums, buffer, meet, w: gl.constexpr, L: gl.constexpr, SIZE: gl.constexpr, BN: gl.constexpr):
    """Softmax sums [BN] of both warpgroups in layout L; `sums` is [4, 8, BN] (warps, lanes). `buffer` has SIZE rows [BN] fp32."""
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
    words = pack_fp16(oe, oo)
    if out.dtype.element_ty == gl.bfloat16:
        words = gl.where(direct, pack_bf16(oe, oo), words)
    base = gl.where(direct, out.to(gl.int64), partial_o.to(gl.int64)).to(gl.pointer_type(gl.int32))
    off = offsets.load(cols)
    c = w * 128 + gl.arange(0, 128, gl.SliceLayout(1, mma))
    gl.store(base + (off.to(gl.int64) * 4)[None, :] + c[:, None], words, mask=(off >= 0)[None, :])
