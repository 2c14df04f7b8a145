"""Work split: which CTA computes which tiles of which request, decided on the device (`find_work`) from the lengths alone.

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
function of the request's own length. `alone_rows` (requests of one query, each so many of them rows of one sequence) gives
every request the chunk that it has in a batch of its own, ceil(tiles / (target / blocks)), if all of these items fit the
grid; the grid is one batch's of the sequences, times their rows, so that the rows of one sequence always fit.

The scheduled groups (request, row block) that need a combine are published in `sched`, int32 [1 + groups, 8]:
row 0 = (number of groups, ...), row g + 1 = (first output row, rows, splits, first partial block, stride in partial
blocks between splits). An output row is token * num_heads + head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
ALONE_BATCH = 32
"""Most requests of a plan with `alone_rows`: the bucket whose kernels know it."""
SCHED_COLUMNS = 8
BATCH_BUCKETS = (1, 32, 256, 4096)


class ScheduleError(ValueError):
    """A batch that the schedule cannot hold."""


def batch_bucket(batch: int, buckets: Sequence[int] = BATCH_BUCKETS) -> int:
    """The first of the ascending `buckets` that holds `batch` requests; raises `ScheduleError` beyond the largest."""
    for bucket in buckets:
        if batch <= bucket:
            return bucket
    raise ScheduleError(f"batch is {batch}: the native kernels schedule at most {buckets[-1]} requests")


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
        alone: whether requests have the splits that each has alone, see the module.
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
    alone: bool = False

    @property
    def mode(self) -> int:
        """How the kernel splits: 0 by the batch, 1 batch-invariant, 2 as alone."""
        return 1 if self.batch_invariant else 2 if self.alone else 0

    @property
    def own_slots(self) -> int:
        """Splits of a request of one query that is alone in a batch, at most."""
        return max(1, self.target // -(-self.num_heads // self.block_rows))

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
    alone_rows: int = 0,
    max_q_len: int | None = None,
    min_chunk: int = MIN_CHUNK,
    buckets: Sequence[int] = BATCH_BUCKETS,
) -> SplitPlan:
    """Sizes of one batch shape, from shapes alone.

    Args:
        batch: requests. total_q: query tokens (upper bound). max_kv_len: upper bound of every length.
        num_ctas: CTAs of the kernel the device holds at once.
        alone_rows: see the module; 0 splits by the batch.
        max_q_len: upper bound of one request's query tokens; it tightens the grid (an idle CTA still costs its start).
        min_chunk: fewest tiles of a split. buckets: what the kernel is compiled for, 1 or multiples of 32.

    Raises:
        ScheduleError: batch beyond the largest bucket, or beyond `ALONE_BATCH` with `alone_rows`.
    """
    if alone_rows and batch > ALONE_BATCH:
        raise ScheduleError(f"batch is {batch}: at most {ALONE_BATCH} requests can be split as if each were alone")
    bucket = batch_bucket(batch, buckets)
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
        if alone_rows and batch > 1:
            sequences = -(-batch // alone_rows)
            own = -(-blocks // alone_rows)
            items = max(num_ctas, own) + (min(num_ctas, own) // 2 if sequences > 1 else 0)
            items = max(min(items * alone_rows, blocks * splits), blocks)
            partial, groups = (items, blocks) if splits > 1 else (0, 0)
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
        bool(alone_rows),
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


def own_chunk(plan: SplitPlan, tiles: int) -> int:
    """Tiles of a split of a request of one query that is alone in a batch."""
    return min(max(plan.min_chunk, -(-tiles // plan.own_slots)), MAX_CHUNK)


def chunks(plan: SplitPlan, tiles: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Tiles of a split, by request."""
    own = [own_chunk(plan, t) for t in tiles]
    items = sum(r * max(1, -(-t // c)) for t, r, c in zip(tiles, blocks, own, strict=True))
    if plan.alone and plan.batch_bucket > 1 and items <= plan.num_items:
        return own
    return [choose_chunk(plan, tiles, blocks)] * len(tiles)


def reference_items(plan: SplitPlan, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Iterator[Item]:
    """The items the device computes for these lengths, in order (without the causal cut of `tile1`)."""
    tiles = [-(-n // TILE) for n in kv_lens]
    blocks = [-(-q * plan.num_heads // plan.block_rows) for q in q_lens]
    part = 0
    for b, (t, r, chunk) in enumerate(zip(tiles, blocks, chunks(plan, tiles, blocks), strict=True)):
        n = min(INVARIANT_SPLITS, -(-t // INVARIANT_CHUNK)) if plan.batch_invariant else -(-t // chunk)
        n = max(1, n)
        per = max(1, -(-t // n))
        n = max(1, -(-t // per))
        for s in range(n):
            for rb in range(r):
                index = part + s * r + rb if n > 1 else -1
                yield Item(b, rb * plan.block_rows, s * per, min(t, s * per + per), n, index)
        part += n * r if n > 1 else 0
