"""The Hopper kernel's loop for many tiles a CTA (`wgmma_decode`, OVERLAP): fp8_e4m3 in blocks of 64 query rows.

A warpgroup's tile t needs scores, then weights, then their product with the values, each waiting for the one before. Here the
other warpgroup's tile t - 1, whose weights have been there for half a round, is accumulated between the steps of the softmax
of tile t, in four steps of 16 rows, so that the tensor cores work where the plain loop waits. Its code is longer, and a launch
fetches it cold from memory: it costs a launch more and a tile less (`wgmma_launch.overlaps` weighs that).

    p_ready, ckv_empty   as in `wgmma_decode`: a tile is released by each warpgroup once that has accumulated it
    tile 0               has no tile before it: weights of 0 (`clear_weights`) times the values of tile 0 are added, so that the
                         first tile is no code of its own; Triton 3.6 crashes if a branch encloses the steps
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from uncast.kernels.gluon_compat import cta_barrier
from uncast.kernels.unpack import unpack_values
from uncast.kernels.wgmma_ops import (
    HEADROOM,
    accumulate,
    clean_rows,
    column_max,
    ex2,
    get_scalar,
    hide_rows,
    needs_rescale,
    opaque_zero,
    put_scalar,
    scale_sums,
    scores,
)

TC = gl.constexpr(16)
"""Rows of a step of the accumulation."""


@gluon.jit
def clear_weights(p, BN: gl.constexpr, mma: gl.constexpr):
    """The weights of tile -1; `prepare_q` follows, whose fence and barriers make them visible to the tensor cores."""
    p.index(1).store(gl.zeros([64, BN], gl.float16, mma))


@gluon.jit
def _load_step(ckv, c: gl.constexpr, mma: gl.constexpr):
    """Rows c * TC .. of a tile, channel pairs x rows; ckv [64, 128] channel pairs."""
    return ckv.slice(c * TC, TC, 0).permute((1, 0)).load(gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def _issue_step(oe, oo, even, odd, p, c: gl.constexpr):
    """Starts O^T += V^T P^T of the rows c * TC .. of a tile; `even` and `odd` must live until it has been waited for."""
    oe = warpgroup_mma(even, p.slice(c * TC, TC, 0), oe, is_async=True)
    oo = warpgroup_mma(odd, p.slice(c * TC, TC, 0), oo, is_async=True)
    return oe, oo


@gluon.jit
def _weigh_tile(
    t, oe, oo, sums, factor, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax, limits, votes, ckv_full, ckv_empty,
    kpe_full, p_ready, kv_len, first_limit, tile0, w: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, KC: gl.constexpr,
):  # fmt: skip
    """Warpgroup w publishes the weights of its tile t and accumulates tile t - 1. Returns oe, oo and the softmax sums."""
    mma: gl.constexpr = oe.type.layout
    cols: gl.constexpr = gl.SliceLayout(0, mma)
    early = 2 * (t % ST) + 1 - w
    late = 2 * (t % ST) + w
    phase = (t // ST) & 1
    end = (tile0 + t) * 64 + 64
    if end > kv_len:
        mbarrier.wait(ckv_full.index(early), phase)
        mbarrier.wait(ckv_full.index(late), phase)
        clean_rows(ckv.index(early), kv_len - end + 64)
        clean_rows(ckv.index(late), kv_len - end + 64)
        cta_barrier()
    z = opaque_zero(t)
    acc = scores(
        ckv.index(early), ckv.index(late), kpe.index(w), kpe_full.index(w), (t // 2) & 1, ckv_full.index(early),
        ckv_full.index(late), phase, qa.index(z), qb.index(z), ra.index(z), rb.index(z), ckv.index(early), 0, w, mma, BN, KC,
        False, False,
    )  # fmt: skip
    # tile t - 1: its weights, column maxima and flag (a fresh barrier lets tile 0 pass)
    u = gl.maximum(t - 1, 0)
    mbarrier.wait(p_ready.index(1 - w), ((t + 1) // 2 + 1) & 1)
    if get_scalar(flag.index(u % 4)) * gl.minimum(t, 1) > 0:
        a = alpha.index(1 - w).load(cols)
        sums = scale_sums(sums, a)
        oe = oe * a[None, :]
        oo = oo * a[None, :]
    last_ckv = ckv.index(2 * (u % ST) + w)
    last_p = p.index(1 - w)
    raw = _load_step(last_ckv, 0, mma)
    m = colmax.load(cols)
    x = acc * factor - m[None, :]
    if end > first_limit:
        x = hide_rows(x, end - 64, limits, mma)
    flagged = 0
    # tile t - 2: the other warpgroup, like this one, is done with its weights and factors
    used = ckv_empty.index(2 * ((t - 2 + ST) % ST) + 1 - w)
    used_phase = ((t - 2 + ST) // ST + 1) & 1
    ve, vo = unpack_values(raw, True)
    raw = _load_step(last_ckv, 1, mma)
    oe, oo = _issue_step(oe, oo, ve, vo, last_p, 0)
    rescale = needs_rescale(x, votes.index(w), BN) | (t == 0)
    oe, oo, ve, vo = warpgroup_mma_wait(0, deps=[oe, oo, ve, vo])
    if rescale:
        mbarrier.wait(used, used_phase)
        up = gl.maximum(column_max(x, p.index(w), cols, BN) - HEADROOM, gl.where(t == 0, -1e29, 0.0))
        cta_barrier()
        x = x - up[None, :]
        colmax.store(m + up)
        a = ex2(gl.where(t == 0, 0.0, -up))
        sums = scale_sums(sums, a)
        alpha.index(w).store(a)
        flagged = gl.minimum(t, 1)
    put_scalar(flag.index(t % 4), flagged)
    ve, vo = unpack_values(raw, True)
    raw = _load_step(last_ckv, 2, mma)
    oe, oo = _issue_step(oe, oo, ve, vo, last_p, 1)
    weights = ex2(x)
    oe, oo, ve, vo = warpgroup_mma_wait(0, deps=[oe, oo, ve, vo])
    ve, vo = unpack_values(raw, True)
    raw = _load_step(last_ckv, 3, mma)
    oe, oo = _issue_step(oe, oo, ve, vo, last_p, 2)
    sums = sums + gl.sum(weights.reshape([4, 2, 8, BN]), 1)
    mbarrier.wait(used, used_phase)
    p.index(w).store(weights.to(gl.float16))
    oe, oo, ve, vo = warpgroup_mma_wait(0, deps=[oe, oo, ve, vo])
    ve, vo = unpack_values(raw, True)
    oe, oo = _issue_step(oe, oo, ve, vo, last_p, 3)
    fence_async_shared()
    oe, oo, ve, vo = warpgroup_mma_wait(0, deps=[oe, oo, ve, vo])
    cta_barrier()
    mbarrier.arrive(p_ready.index(w), count=1)
    mbarrier.arrive(ckv_empty.index(2 * (u % ST) + w), count=1, pred=t > 0)
    return oe, oo, sums


@gluon.jit
def _accumulate_tile(
    v, oe, oo, ckv, p, alpha, flag, p_ready, ckv_empty, w: gl.constexpr, ST: gl.constexpr
):  # fmt: skip
    """Warpgroup w accumulates its half of tile v and releases the tile."""
    s = v % ST
    mbarrier.wait(p_ready.index(v % 2), (v // 2) & 1)
    oe, oo = accumulate(
        oe, oo, ckv.index(2 * s + w), p.index(v % 2), alpha.index(v % 2), flag.index(v % 4), ckv.index(s), w, TC, False,
    )  # fmt: skip
    cta_barrier()
    mbarrier.arrive(ckv_empty.index(2 * s + w), count=1)
    return oe, oo


@gluon.jit
def overlapped_tiles(
    nt, oe, oo, sums, factor, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax, limits, votes, ckv_full, ckv_empty,
    kpe_full, p_ready, kv_len, first_limit, tile0, w: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, KC: gl.constexpr,
):  # fmt: skip
    """All `nt` > 0 tiles of an item for warpgroup w: as in the plain loop, the scores and weights of tiles w, w + 2, ... and
    its 256 channels of O^T for every tile. Returns oe, oo and the softmax sums of its tiles."""
    for j in range((nt + 1 - w) // 2):
        t = 2 * j + w
        oe, oo, sums = _weigh_tile(
            t, oe, oo, sums, factor, ckv, kpe, qa, qb, ra, rb, p, alpha, flag, colmax, limits, votes, ckv_full, ckv_empty,
            kpe_full, p_ready, kv_len, first_limit, tile0, w, BN, ST, KC,
        )  # fmt: skip
        oe, oo = _accumulate_tile(t, oe, oo, ckv, p, alpha, flag, p_ready, ckv_empty, w, ST)
    v = nt - 1
    if v % 2 != w:  # the last tile is the other warpgroup's, and no later one of this accumulates it
        oe, oo = _accumulate_tile(v, oe, oo, ckv, p, alpha, flag, p_ready, ckv_empty, w, ST)
        if get_scalar(flag.index(v % 4)) > 0:
            sums = scale_sums(sums, alpha.index(1 - w).load(gl.SliceLayout(0, oe.type.layout)))
    return oe, oo, sums
