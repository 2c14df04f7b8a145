"""The device side of `schedule`: what one CTA of an attention kernel works on, from the lengths alone."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uncast.kernels.schedule import ALONE_BATCH

ALONE_BUCKET = gl.constexpr(ALONE_BATCH)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def ceil_div(a, c):
    """ceil(a / c) for c > 0, a + c < 2^21, through an fp32 reciprocal; exact because the +0.5 outweighs the rounding."""
    r = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [c.to(gl.float32)], dtype=gl.float32, is_pure=True, pack=1
    )
    return (((a + c - 1).to(gl.float32) + 0.5) * r).to(gl.int32)


@gluon.jit
def _splits(tiles, chunk, invariant):
    """Splits of requests of `tiles` tiles and the tiles of each split, evened out."""
    n = gl.where(invariant == 1, gl.minimum((tiles + 15) // 16, 16), ceil_div(tiles, chunk))
    n = gl.maximum(n, 1)
    per = gl.maximum(ceil_div(tiles, n), 1)
    return gl.maximum(ceil_div(tiles, per), 1), per


@gluon.jit
def _own_chunk(tiles, slots, MIN: gl.constexpr):
    """Tiles of a split of a request that is alone in a batch and has so many slots."""
    return gl.minimum(gl.maximum(ceil_div(tiles, slots), MIN), 1 << 19)


@gluon.jit
def _lengths(qo_indptr, kv_len_arr, i, batch, num_heads, BLOCK_ROWS: gl.constexpr):
    """Tiles and row blocks of requests `i`; 0 beyond the batch."""
    ok = i < batch
    kv = gl.load(kv_len_arr + i, mask=ok, other=0)
    q = gl.load(qo_indptr + i + 1, mask=ok, other=0) - gl.load(qo_indptr + i, mask=ok, other=0)
    return (kv + 63) // 64, (q * num_heads + (BLOCK_ROWS - 1)) // BLOCK_ROWS


@gluon.jit
def _choose_chunk(
    tiles, blocks, target, total, num_blocks, c0, fits, BATCH: gl.constexpr, OVERHEAD: gl.constexpr, NW: gl.constexpr
):
    """`choose_chunk` on the device: the batch along each warp's lanes, the candidates over the warps."""
    L: gl.constexpr = gl.BlockedLayout([1, BATCH // 32], [1, 32], [NW, 1], [1, 0])
    tiles = gl.convert_layout(tiles, gl.SliceLayout(0, L))
    blocks = gl.convert_layout(blocks, gl.SliceLayout(0, L))
    k = gl.arange(0, 8, gl.SliceLayout(1, L))
    chunk = (c0 * (7 + k) + 6) // 7
    chunk = gl.where(k == 7, gl.maximum(chunk, fits), chunk)
    n = gl.maximum(ceil_div(tiles[None, :], chunk[:, None]), 1)
    items = gl.sum(n * blocks[None, :], 1)
    longest = gl.minimum(chunk, gl.max(tiles, 0)) + OVERHEAD
    waves = (items + target - 1) // target
    work = (total + items * OVERHEAD + target - 1) // target
    cost = gl.minimum(gl.minimum(waves * longest, work + longest), (1 << 28) - 1)
    cost = gl.where(items <= gl.num_programs(0), cost, (1 << 28) - 1)
    best = 7 - (gl.min(cost * 8 + (7 - k), 0) & 7)
    return gl.where(best == 7, gl.maximum(2 * c0, fits), (c0 * (7 + best) + 6) // 7)


@gluon.jit
def _find_request(
    item, qo_indptr, kv_len_arr, sched, batch, num_heads, target, invariant,
    BLOCK_ROWS: gl.constexpr, BATCH: gl.constexpr, OVERHEAD: gl.constexpr, NW: gl.constexpr, MIN: gl.constexpr,
    ALONE: gl.constexpr,
):  # fmt: skip
    """(request of `item`, its first item, its first partial block, its first group, chunk, slots of each request that is split
    as if it were alone, else 0); request = batch beyond the last.

    Up to 256 requests every warp holds the whole batch, so that sums and scans need no barrier.
    """
    PER_LANE: gl.constexpr = BATCH // 32 if BATCH <= 256 else 1
    L: gl.constexpr = gl.BlockedLayout([PER_LANE], [32], [NW], [0])
    i = gl.arange(0, BATCH, L)
    tiles, blocks = _lengths(qo_indptr, kv_len_arr, i, batch, num_heads, BLOCK_ROWS)
    total = gl.sum(tiles * blocks, 0)
    num_blocks = gl.sum(blocks, 0)
    c0 = gl.minimum(gl.maximum((total + target - 1) // target, MIN), 1 << 19)
    room = gl.num_programs(0) - num_blocks
    fits = gl.where(room > 0, gl.minimum((total + room - 1) // gl.maximum(room, 1), 1 << 19), 1 << 19)
    if BATCH <= 256:
        chunk = _choose_chunk(tiles, blocks, target, total, num_blocks, c0, fits, BATCH, OVERHEAD, NW)
    else:
        chunk = gl.maximum(c0, fits)
    slots = batch * 0
    if ALONE:
        slots = gl.maximum(target // gl.maximum((num_heads + (BLOCK_ROWS - 1)) // BLOCK_ROWS, 1), 1)
        own = _own_chunk(tiles, slots, MIN)
        own_items = gl.sum(gl.maximum(ceil_div(tiles, own), 1) * blocks, 0)
        slots = gl.where((invariant == 2) & (own_items <= gl.num_programs(0)), slots, 0)
        n, _ = _splits(tiles, gl.where(slots > 0, own, chunk), invariant)
    else:
        n, _ = _splits(tiles, chunk, invariant)
    ends = gl.associative_scan(n * blocks, 0, _add)
    before = ends <= item
    b = gl.sum(before.to(gl.int32), 0)
    start = gl.max(gl.where(before, ends, 0), 0)
    split = n > 1
    part0 = gl.sum(gl.where(before & split, n * blocks, 0), 0)
    group0 = gl.sum(gl.where(before & split, blocks, 0), 0)
    if item == 0:
        gl.store(sched, gl.sum(gl.where(split, blocks, 0), 0))
    return b, start, part0, group0, chunk, slots


@gluon.jit
def find_work(
    item, qo_indptr, kv_len_arr, sched, batch, num_heads, target, causal, invariant,
    BLOCK_ROWS: gl.constexpr, BATCH: gl.constexpr, OVERHEAD: gl.constexpr, NW: gl.constexpr, MIN: gl.constexpr = 2,
    ALONE: gl.constexpr = True,
):  # fmt: skip
    """The work of CTA `item` of a grid of `SplitPlan.num_items`; called by all `NW` warps of the CTA at its start.

    `causal` is 0 or 1, `invariant` the plan's `mode`; MIN is the plan's `min_chunk`; ALONE: whether that may be the mode for
    requests as if alone, whose code a launch of the bucket `schedule.ALONE_BATCH` fetches. Returns scalars (valid, b, q_start,
    q_len, kv_len, row0, tile0, tile1, num_splits, part): rows row0.. of request b (folded, at most BLOCK_ROWS), tiles tile0 <=
    t < tile1 (empty if tile1 <= tile0), `part` the partial block to write when num_splits > 1. `valid` is false for items
    beyond the last. Publishes the groups to combine in `sched`.
    """
    AS_ALONE: gl.constexpr = ALONE and BATCH == ALONE_BUCKET
    if BATCH == 1:
        b = item * 0
        start = b
        part0 = b
        group0 = b
        chunk = b
        own_slots = b
    else:
        b, start, part0, group0, chunk, own_slots = _find_request(
            item,
            qo_indptr,
            kv_len_arr,
            sched,
            batch,
            num_heads,
            target,
            invariant,
            BLOCK_ROWS,
            BATCH,
            OVERHEAD,
            NW,
            MIN,
            AS_ALONE,
        )
    valid = b < batch
    b = gl.minimum(b, batch - 1)
    kv_len = gl.load(kv_len_arr + b)
    q_start = gl.load(qo_indptr + b)
    q_len = gl.load(qo_indptr + b + 1) - q_start
    t = (kv_len + 63) // 64
    rows = q_len * num_heads
    nb = (rows + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    if BATCH == 1:
        slots = gl.maximum(target // gl.maximum(nb, 1), 1)
        chunk = gl.minimum(gl.maximum((t + slots - 1) // slots, MIN), 1 << 19)
    elif AS_ALONE:
        chunk = gl.where(own_slots > 0, _own_chunk(t, gl.maximum(own_slots, 1), MIN), chunk)
    num_splits, per = _splits(t, chunk, invariant)
    if BATCH == 1:
        valid = item < num_splits * nb
        if item == 0:
            gl.store(sched, gl.where(num_splits > 1, nb, 0))
    nb = gl.maximum(nb, 1)
    split = (item - start) // nb
    rb = item - start - split * nb
    row0 = rb * BLOCK_ROWS
    tile0 = split * per
    last = gl.minimum(row0 + BLOCK_ROWS, rows) - 1
    visible = kv_len - (q_len - 1 - last // num_heads) * causal
    tile1 = gl.minimum(gl.minimum(tile0 + per, t), (gl.maximum(visible, 0) + 63) // 64)
    part = part0 + split * nb + rb
    if valid & (num_splits > 1) & (split == 0):
        entry = sched + (group0 + rb + 1) * 8
        gl.store(entry, q_start * num_heads + row0)
        gl.store(entry + 1, gl.minimum(rows - row0, BLOCK_ROWS))
        gl.store(entry + 2, num_splits)
        gl.store(entry + 3, part)
        gl.store(entry + 4, nb)
    return valid, b, q_start, q_len, kv_len, row0, tile0, tile1, num_splits, part
