"""Producer warps of the Hopper decode kernel (`wgmma_decode`): tiles of the cache by TMA, scales of fp8_ds_mla by loads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from uncast.kernels.gluon_compat import cta_barrier, tma_load
from uncast.kernels.pdl import launch_dependents
from uncast.kernels.wgmma_ops import power_of_two, put_scalar, seven_bits


@gluon.jit
def _pages(kv_indices, kv_start, first, last):
    """Entries first .. first + 32 (not behind `last`) of a request's page list, one a lane."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.load(kv_indices + kv_start + first + lane, mask=first + lane <= last, other=0)


@gluon.jit
def _page(pages, i):
    """Entry i of `_pages`."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(lane == i, pages, 0), 0)


@gluon.jit
def load_tiles(
    ckv_desc, kpe_desc, kv_indices, kv_start, tile0, nt, ckv, kpe, full, empty, ST: gl.constexpr, PAGE: gl.constexpr,
    DS: gl.constexpr, JOINT: gl.constexpr, WHOLE: gl.constexpr = False,
):  # fmt: skip
    """TMA warp: latent (and with JOINT the rope) of tile t goes to slot t % ST; WHOLE at once, else first the half that is read
    first."""
    PER: gl.constexpr = PAGE // 64
    last = (tile0 + nt - 1) // PER
    for first in range(tile0 // PER, last + 1, 32):
        pages = _pages(kv_indices, kv_start, first, last)
        for tile in range(gl.maximum(first * PER, tile0), gl.minimum((first + 32) * PER, tile0 + nt)):
            row = _page(pages, tile // PER - first) * PAGE + tile % PER * 64
            t = tile - tile0
            s = t % ST
            if WHOLE:
                mbarrier.wait(empty.index(s), ((t // ST) & 1) ^ 1)
                mbarrier.expect(full.index(s), 64 * (512 + 64))
                tma_load(kpe_desc, [row, 256], full.index(s), kpe.index(s))
                tma_load(ckv_desc, [row, 0], full.index(s), ckv.index(2 * s))
                tma_load(ckv_desc, [row, 128], full.index(s), ckv.index(2 * s + 1))
            else:
                early = 1 - t % 2
                mbarrier.wait(empty.index(2 * s + early), ((t // ST) & 1) ^ 1)
                if JOINT:
                    mbarrier.expect(full.index(2 * s + early), 64 * (256 + (128 if DS else 64)))
                    tma_load(kpe_desc, [row, 264 if DS else 256], full.index(2 * s + early), kpe.index(s))
                else:
                    mbarrier.expect(full.index(2 * s + early), 64 * 256)
                tma_load(ckv_desc, [row, early * 128], full.index(2 * s + early), ckv.index(2 * s + early))
                late = t % 2
                mbarrier.wait(empty.index(2 * s + late), ((t // ST) & 1) ^ 1)
                mbarrier.expect(full.index(2 * s + late), 64 * 256)
                tma_load(ckv_desc, [row, late * 128], full.index(2 * s + late), ckv.index(2 * s + late))
    launch_dependents(nt)  # so late that this kernel's cache rows do not evict the combine's code again


@gluon.jit
def load_kpe(kpe_desc, kv_indices, kv_start, tile0, nt, kpe, full, p_ready, PAGE: gl.constexpr):
    """Rope TMA warp (without JOINT): two slots; a slot is free once its tile's weights are published."""
    PER: gl.constexpr = PAGE // 64
    last = (tile0 + nt - 1) // PER
    for first in range(tile0 // PER, last + 1, 32):
        pages = _pages(kv_indices, kv_start, first, last)
        for tile in range(gl.maximum(first * PER, tile0), gl.minimum((first + 32) * PER, tile0 + nt)):
            row = _page(pages, tile // PER - first) * PAGE + tile % PER * 64
            t = tile - tile0
            s = t % 2
            mbarrier.wait(p_ready.index(s), ((t // 2) & 1) ^ 1)
            mbarrier.expect(full.index(s), 64 * 64)
            tma_load(kpe_desc, [row, 256], full.index(s), kpe.index(s))


@gluon.jit
def _fetch_scales(cache, page, tile, kv_len, PAGE: gl.constexpr):
    """The four scales of the 64 rows of a tile (fp8_ds_mla: fp32 words 128..131 of a row of 164); 0 behind the end."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    g = gl.arange(0, 4, gl.SliceLayout(0, L))
    first = (page.to(gl.int64) * PAGE + tile % (PAGE // 64) * 64) * 164 + 128
    return gl.load(cache + first + row[:, None] * 164 + g[None, :], mask=(tile * 64 + row < kv_len)[:, None], other=0.0)


@gluon.jit
def scale_exponent(v):
    """The e that puts the largest scale of a tile, v [64, 4] fp32, into 2^6 .. 2^7 as v * 2^-e."""
    top = gl.max(gl.max(v.to(gl.int32, bitcast=True), 1), 0)
    return gl.minimum(gl.maximum((top >> 23) - 127 - 6, -100), 100)


@gluon.jit
def publish_scales(v, e, top_e, scales, exponents, highest, ready, s):
    """One warp publishes a tile's scales times 2^-e as fp16 [4, 64] in slot 4 s; and 2 e, plus 1 if one is no power of two:
    then slots 4 s + 1.. + 3 hold them as sums of 7-bit numbers. `highest`: the largest e so far, which is returned, too."""
    v = v * power_of_two(-e)
    scales.index(4 * s).permute((1, 0)).store(v.to(gl.float16))
    inexact = gl.max(gl.max(v.to(gl.int32, bitcast=True) & 0x7FFFFF, 1), 0)
    put_scalar(exponents.index(s), 2 * e + gl.minimum(inexact, 1), 1)
    top_e = gl.maximum(top_e, e)
    put_scalar(highest, top_e, 1)
    if inexact > 0:
        for k in range(3):
            scales.index(4 * s + 1 + k).permute((1, 0)).store(seven_bits(v).to(gl.float16))
            v = v - seven_bits(v)
    cta_barrier()
    mbarrier.arrive(ready.index(s), count=1)
    return top_e


@gluon.jit
def load_scales(
    cache, kv_indices, kv_start, tile0, nt, kv_len, scales, exponents, highest, empty, ready, ST: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Scale warp of fp8_ds_mla: a tile's scales, read one tile ahead, go to slot t % ST (`publish_scales`)."""
    top_e = -100
    PER: gl.constexpr = PAGE // 64
    last = (tile0 + nt - 1) // PER
    for first in range(tile0 // PER, last + 1, 32):
        pages = _pages(kv_indices, kv_start, first, last)
        begin = gl.maximum(first * PER, tile0)
        end = gl.minimum((first + 32) * PER, tile0 + nt)
        v = _fetch_scales(cache, _page(pages, begin // PER - first), begin, kv_len, PAGE)
        for tile in range(begin, end):
            nxt = gl.minimum(tile + 1, end - 1)
            following = _fetch_scales(cache, _page(pages, nxt // PER - first), nxt, kv_len, PAGE)
            e = scale_exponent(v)
            t = tile - tile0
            s = t % ST
            mbarrier.wait(empty.index(2 * s), ((t // ST) & 1) ^ 1)
            mbarrier.wait(empty.index(2 * s + 1), ((t // ST) & 1) ^ 1)
            top_e = publish_scales(v, e, top_e, scales, exponents, highest, ready, s)
            v = following
