"""Queries of the Hopper attention kernels (`wgmma_decode`): from device memory into fp16 operands in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from uncast.kernels.gluon_compat import cta_barrier, smem_view
from uncast.kernels.unpack import split_queries


@gluon.jit
def load_q(q, offsets, ch0, W: gl.constexpr, L: gl.constexpr):
    """Query rows at `offsets` (shared memory, see `row_offsets`), channels ch0 .. ch0 + W; 0 where the offset is -1."""
    off = offsets.load(gl.SliceLayout(1, L))
    c = ch0 + gl.arange(0, W, gl.SliceLayout(0, L))
    return gl.load(q + (off.to(gl.int64) * 8)[:, None] + c[None, :], mask=(off >= 0)[:, None], other=0.0)


@gluon.jit
def _finite(x):
    """Bits of x >= 0, 0 for infinity and NaN: such a row must not take the others' scale with it."""
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(bits < 0x7F800000, bits, 0)


@gluon.jit
def _larger(a, b):
    """+- the larger magnitude of two 16-bit values; a NaN gives the other."""
    if a.dtype == gl.bfloat16:
        r = gl.inline_asm_elementwise(
            "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        r = gl.inline_asm_elementwise(
            "max.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2
        )
    return r


@gluon.jit
def _store_q(x, factor, dst_a, dst_b, BN: gl.constexpr, W: gl.constexpr):
    a, b = split_queries((x.to(gl.float32) * factor).to(gl.float16), BN, W, True)
    dst_a.store(a)
    dst_b.store(b)


@gluon.jit
def prepare_q(
    q_nope, q_pe, pe_factor, qa, qb, ra, rb, offsets, votes, meet, w: gl.constexpr, BN: gl.constexpr, DS: gl.constexpr,
    SHORT: gl.constexpr,
):  # fmt: skip
    """Warpgroup w writes its 256 latent channels (and w = 1 the rope) of Q to shared memory as fp16 (the rope of DS as bf16).

    All rows of the CTA share one power of two that puts the largest magnitude into 2^14 .. 2^15, so a row loses precision
    only where its scores are 2^-40 of the largest. Returns that power's inverse. `offsets`: shared memory, int32 [>= 2, BN] at
    its start: rows of q_nope and q_pe; `votes` int32 [3, 4] is scratch. SHORT: less code. Queries are read twice, the second
    time from L2 and 16 rows at a time in a loop: this runs once a launch, and instructions are fetched cold.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    whole = smem_view(offsets, gl.int32, [32, BN], rows)
    a = load_q(q_nope, whole.index(0), w * 256, 128, L)
    b = load_q(q_nope, whole.index(0), w * 256 + 128, 128, L)
    if w == 1:
        r = load_q(q_pe, whole.index(1), 0, 64, LR).to(gl.float32) * pe_factor
        top = _finite(gl.max(gl.abs(r).reshape([BN // 16, 4, 4, 8, 8]), 4))
        votes.index(2).store(gl.max(gl.max(top, 0).reshape([4, 32]), 1))
    if SHORT:  # noqa: SIM108 (a compile-time choice)
        larger = gl.abs(_larger(a, b).to(gl.float32))
    else:
        larger = gl.maximum(gl.abs(a.to(gl.float32)), gl.abs(b.to(gl.float32)))
    top = _finite(gl.max(larger.reshape([BN // 8, 4, 2, 16, 8]), 4))
    votes.index(w).store(gl.max(gl.max(top, 0).reshape([4, 32]), 1))
    cta_barrier()
    mbarrier.arrive(meet, count=1)
    mbarrier.wait(meet, 0)
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    largest = gl.maximum(gl.maximum(votes.index(0).load(four), votes.index(1).load(four)), votes.index(2).load(four))
    power = gl.maximum(gl.max(largest, 0) & 0x7F800000, 15 << 23)
    factor = (0x7F000000 - power + (14 << 23)).to(gl.float32, bitcast=True)
    if SHORT:
        # 16 rows of 64 channels are contiguous in shared memory, rows before channels
        NR: gl.constexpr = BN // 16
        block: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        sixteen = smem_view(offsets, gl.int32, [2 * BN, 16], rows)
        qa_blocks = smem_view(qa, gl.float16, [4 * NR, 16, 64], block)
        qb_blocks = smem_view(qb, gl.float16, [4 * NR, 16, 64], block)
        for i in range(2 * NR):
            x = load_q(q_nope, sixteen.index(i % NR), w * 256 + i // NR * 128, 128, L)
            _store_q(x, factor, qa_blocks.index(2 * NR * w + i), qb_blocks.index(2 * NR * w + i), 16, 128)
    else:
        _store_q(a, factor, qa.slice(w * 128, 64, 1), qb.slice(w * 128, 64, 1), BN, 128)
        _store_q(b, factor, qa.slice(w * 128 + 64, 64, 1), qb.slice(w * 128 + 64, 64, 1), BN, 128)
    if w == 1:
        if DS:
            ra.store((r * factor).to(gl.bfloat16))
        else:
            _store_q(r, factor, ra, rb, BN, 64)
    fence_async_shared()
    cta_barrier()
    mbarrier.arrive(meet, count=1)
    mbarrier.wait(meet, 1)
    return (power - (14 << 23)).to(gl.float32, bitcast=True)
