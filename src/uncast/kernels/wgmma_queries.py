"""Queries of the Hopper attention kernels (`wgmma_decode`): from device memory into fp16 operands in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from uncast.kernels.gluon_compat import cta_barrier
from uncast.kernels.unpack import split_queries


@gluon.jit
def load_q(q, offsets, ch0, W: gl.constexpr, L: gl.constexpr):
    """Query rows at `offsets` (shared memory, see `row_offsets`), channels ch0 .. ch0 + W, fp32; 0 where the offset is -1."""
    off = offsets.load(gl.SliceLayout(1, L))
    c = ch0 + gl.arange(0, W, gl.SliceLayout(0, L))
    return gl.load(q + (off.to(gl.int64) * 8)[:, None] + c[None, :], mask=(off >= 0)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _finite(x):
    """Bits of x >= 0, 0 for infinity and NaN: such a row must not take the others' scale with it."""
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(bits < 0x7F800000, bits, 0)


@gluon.jit
def _store_q(x, factor, dst_a, dst_b, BN: gl.constexpr, W: gl.constexpr):
    a, b = split_queries((x * factor).to(gl.float16), BN, W, True)
    dst_a.store(a)
    dst_b.store(b)


@gluon.jit
def prepare_q(
    q_nope, q_pe, pe_factor, qa, qb, ra, rb, offsets, votes, meet, w: gl.constexpr, BN: gl.constexpr, DS: gl.constexpr,
):  # fmt: skip
    """Warpgroup w writes its 256 latent channels (and w = 1 the rope) of Q to shared memory as fp16 (the rope of DS as bf16).

    All rows of the CTA share one power of two that puts the largest magnitude into 2^14 .. 2^15, so a row loses precision
    only where its scores are 2^-40 of the largest. Returns that power's inverse. `offsets` int32 [>= 2, BN]: rows of q_nope
    and q_pe; `votes` int32 [3, 4] is scratch.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a = load_q(q_nope, offsets.index(0), w * 256, 128, L)
    b = load_q(q_nope, offsets.index(0), w * 256 + 128, 128, L)
    if w == 1:
        r = load_q(q_pe, offsets.index(1), 0, 64, LR) * pe_factor
        top = _finite(gl.max(gl.abs(r).reshape([BN // 16, 4, 4, 8, 8]), 4))
        votes.index(2).store(gl.max(gl.max(top, 0).reshape([4, 32]), 1))
    top = _finite(gl.max(gl.maximum(gl.abs(a), gl.abs(b)).reshape([BN // 8, 4, 2, 16, 8]), 4))
    votes.index(w).store(gl.max(gl.max(top, 0).reshape([4, 32]), 1))
    cta_barrier()
    mbarrier.arrive(meet, count=1)
    mbarrier.wait(meet, 0)
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    largest = gl.maximum(gl.maximum(votes.index(0).load(four), votes.index(1).load(four)), votes.index(2).load(four))
    power = gl.maximum(gl.max(largest, 0) & 0x7F800000, 15 << 23)
    factor = (0x7F000000 - power + (14 << 23)).to(gl.float32, bitcast=True)
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
