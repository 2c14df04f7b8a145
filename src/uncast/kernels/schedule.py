"""Work split: which CTA computes which tiles of which request, decided on the device from the lengths alone.

Every attention kernel is launched over a grid of *items*; item = (request, split of its KV tiles, block of its query
rows). The grid is an upper bound computed from shapes, so nothing is synchronised and a CUDA graph may be replayed with
other lengths; items above the real count exit at once.

    query rows of a request   q_len * num_heads, folded: row = token * num_heads + head, in blocks of `block_rows`
    KV tiles of a request     ceil(kv_len / 64)
    chunk                     tiles per split, one number for the whole batch: c0 = ceil(sum(tiles * blocks) / target)
                              is the smallest that fills `target` CTAs once; of eight candidates from c0 on the one with
                              the smallest estimated makespan is taken that fits the grid (`choose_chunk`)
    splits of a request       ceil(tiles / chunk), at least 1, then evened out
    order of items            request, split, row block (row blocks of one split are neighbours: they share tiles in L2)

Bounds: items <= max(target, blocks) + min(target, blocks) / 2, and the chunk is raised until they are: idle CTAs cost a
start and this schedule each, one after another on the few free multiprocessors. Partial results exist only for requests
with two or more splits, and those have at most 2 * target items, so scratch depends on the grid and not on the context.
Requests with one split write their output themselves. `batch_invariant` fixes splits = min(16, ceil(tiles / 16)), a
function of the request's own length.

The scheduled groups (request, row block) that need a combine are published in `sched`, int32 [1 + groups, 8]:
row 0 = (number of groups, ...), row g + 1 = (first output row, rows, splits, first partial block, stride in partial
blocks between splits). An output row is token * num_heads + head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = 64
"""Cache rows per tile."""
MIN_CHUNK = 2
"""Fewest tiles of a split unless a kernel's plan says otherwise: below it, a split's fixed cost exceeds its work."""
MAX_CHUNK = 1 << 19
"""Most tiles of a split (33 million rows), where the fp32 division of `ceil_div` is still exact."""
MAX_COST = (1 << 28) - 1
INVARIANT_CHUNK = 16
INVARIANT_SPLITS = 16
CANDIDATES = 8
SCHED_COLUMNS = 8
BATCH_BUCKETS = (1, 32, 256, 4096)


class ScheduleError(ValueError):
    """A batch that the schedule cannot hold."""


def batch_bucket(batch: int) -> int:
    """The bucket that holds `batch` requests; raises `ScheduleError` beyond the largest."""
    for bucket in BATCH_BUCKETS:
        if batch <= bucket:
            return bucket
    raise ScheduleError(f"batch is {batch}: the native kernels schedule at most {BATCH_BUCKETS[-1]} requests")


@dataclass(frozen=True)
class SplitPlan:
    """Launch bounds and scratch sizes of one batch shape.

    Attributes:
        batch, num_heads: of the problem.
        block_rows: query rows of one item.
        target: CTAs that run at once.
        overhead: fixed cost of one item, in tiles.
        batch_bucket: power of two >= batch that the kernel is compiled for.
        batch_invariant: see the module.
        num_items: grid size, an upper bound of the items.
        partial_blocks: upper bound of the partial results, each [block_rows, 512] fp32 and [block_rows] fp32.
        num_groups: upper bound of the groups to combine.
        min_chunk: fewest tiles of a split; the kernel is compiled for it.
    """

    batch: int
    num_heads: int
    block_rows: int
    target: int
    overhead: int
    batch_bucket: int
    batch_invariant: bool
    num_items: int
    partial_blocks: int
    num_groups: int
    min_chunk: int = MIN_CHUNK

    @property
    def can_split(self) -> bool:
        """Whether any request can have two splits, that is, whether a combine has to be launched."""
        return self.partial_blocks > 0


def item_overhead(block_rows: int) -> int:
    """Fixed cost of an item in tiles: its start, and its share of partial results, which grows with its rows."""
    return 1 + block_rows // 16


def plan_splits(
    *,
    batch: int,
    total_q: int,
    num_heads: int,
    block_rows: int,
    max_kv_len: int,
    num_ctas: int,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    min_chunk: int = MIN_CHUNK,
) -> SplitPlan:
    """Sizes of one batch shape, from shapes alone.

    Args:
        batch: requests. total_q: query tokens (upper bound). max_kv_len: upper bound of every length.
        num_ctas: CTAs of the kernel the device holds at once.
        max_q_len: upper bound of one request's query tokens; it tightens the grid (an idle CTA still costs its start).
        min_chunk: fewest tiles of a split.

    Raises:
        ScheduleError: batch beyond the largest bucket.
    """
    bucket = batch_bucket(batch)
    blocks = -(-total_q * num_heads // block_rows) + min(batch, total_q)
    if max_q_len is not None:
        blocks = min(blocks, batch * -(-max_q_len * num_heads // block_rows))
    max_tiles = -(-max_kv_len // TILE)
    if batch_invariant:
        splits = max(1, min(INVARIANT_SPLITS, -(-max_tiles // INVARIANT_CHUNK)))
        items = blocks * splits
        partial = items if splits > 1 else 0
        groups = blocks if splits > 1 else 0
    else:
        splits = max(1, -(-max_tiles // min_chunk))
        items = max(num_ctas, blocks) + (min(num_ctas, blocks) // 2 if batch > 1 else 0)
        items = min(items, blocks * splits)
        partial = min(2 * num_ctas, items) if splits > 1 else 0
        groups = min(num_ctas, blocks) if splits > 1 else 0
    return SplitPlan(
        batch,
        num_heads,
        block_rows,
        num_ctas,
        item_overhead(block_rows),
        bucket,
        batch_invariant,
        max(1, items),
        partial,
        groups,
        min_chunk,
    )


@dataclass(frozen=True)
class Item:
    """One unit of work; `part` is its partial block, -1 if it writes the output itself."""

    request: int
    row0: int
    tile0: int
    tile1: int
    num_splits: int
    part: int


def choose_chunk(plan: SplitPlan, tiles: Sequence[int], blocks: Sequence[int]) -> int:
    """The chunk the device takes; the same integer arithmetic as `find_work`."""
    total, num_blocks = sum(t * r for t, r in zip(tiles, blocks, strict=True)), sum(blocks)
    if plan.batch_bucket == 1:
        return min(max(plan.min_chunk, -(-tiles[0] // max(1, plan.target // max(1, num_blocks)))), MAX_CHUNK)
    c0 = min(max(plan.min_chunk, -(-total // plan.target)), MAX_CHUNK)
    room = plan.num_items - num_blocks
    fits = min(-(-total // room), MAX_CHUNK) if room > 0 else MAX_CHUNK
    if plan.batch_bucket > 256:
        return max(c0, fits)
    longest_request = max(tiles, default=0)

    def estimate(chunk: int) -> int:
        items = sum(r * max(1, -(-t // chunk)) for t, r in zip(tiles, blocks, strict=True))
        longest = min(chunk, longest_request) + plan.overhead
        waves = -(-items // plan.target)
        cost = min(waves * longest, -(-(total + items * plan.overhead) // plan.target) + longest)
        return min(cost, MAX_COST) if items <= plan.num_items else MAX_COST

    candidates = [-(-c0 * (CANDIDATES - 1 + k) // (CANDIDATES - 1)) for k in range(CANDIDATES)]
    candidates[-1] = max(candidates[-1], fits)
    return min(reversed(candidates), key=estimate)


def reference_items(plan: SplitPlan, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Iterator[Item]:
    """The items the device computes for these lengths, in order (without the causal cut of `tile1`)."""
    tiles = [-(-n // TILE) for n in kv_lens]
    blocks = [-(-q * plan.num_heads // plan.block_rows) for q in q_lens]
    chunk = choose_chunk(plan, tiles, blocks)
    part = 0
    for b, (t, r) in enumerate(zip(tiles, blocks, strict=True)):
        n = min(INVARIANT_SPLITS, -(-t // INVARIANT_CHUNK)) if plan.batch_invariant else -(-t // chunk)
        n = max(1, n)
        per = max(1, -(-t // n))
        n = max(1, -(-t // per))
        for s in range(n):
            for rb in range(r):
                index = part + s * r + rb if n > 1 else -1
                yield Item(b, rb * plan.block_rows, s * per, min(t, s * per + per), n, index)
        part += n * r if n > 1 else 0


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
    n = gl.where(invariant != 0, gl.minimum((tiles + 15) // 16, 16), ceil_div(tiles, chunk))
    n = gl.maximum(n, 1)
    per = gl.maximum(ceil_div(tiles, n), 1)
    return gl.maximum(ceil_div(tiles, per), 1), per


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
):  # fmt: skip
    """(request of `item`, its first item, its first partial block, its first group, chunk); request = batch beyond the last.

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
    return b, start, part0, group0, chunk


@gluon.jit
def find_work(
    item, qo_indptr, kv_len_arr, sched, batch, num_heads, target, causal, invariant,
    BLOCK_ROWS: gl.constexpr, BATCH: gl.constexpr, OVERHEAD: gl.constexpr, NW: gl.constexpr, MIN: gl.constexpr = 2,
):  # fmt: skip
    """The work of CTA `item` of a grid of `SplitPlan.num_items`; called by all `NW` warps of the CTA at its start.

    `causal` and `invariant` are 0 or 1; MIN is the plan's `min_chunk`. Returns scalars (valid, b, q_start, q_len, kv_len,
    row0, tile0, tile1, num_splits, part): rows row0.. of request b (folded, at most BLOCK_ROWS), tiles tile0 <= t < tile1
    (empty if tile1 <= tile0), `part` the partial block to write when num_splits > 1. `valid` is false for items beyond the
    last. Publishes the groups to combine in `sched`.
    """
    if BATCH == 1:
        b = item * 0
        start = b
        part0 = b
        group0 = b
        chunk = b
    else:
        b, start, part0, group0, chunk = _find_request(
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
