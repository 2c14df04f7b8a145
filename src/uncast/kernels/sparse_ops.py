"""Device functions of the sparse attention kernels: which CTA computes what, and where the selected rows lie.

A query token attends to the rows of its request that its line of `indices` [tokens, topk] names by position; entries below 0
or not below the request's length select nothing. Work is split from shapes alone (`sparse_plan`):

    tile           64 entries of a line, valid or not
    item           (token, split of its tiles, block of its heads), in that order: row blocks share their rows in L2
    first, end     the item's entries, cut to the tiles from the first to the last entry that selects a row: lines which end
                   in -1 (short contexts) cost what they select, and the first tile of an item has a row

Groups that need a combine are published in `sched` as `schedule` does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uncast.kernels.gluon_compat import cp_async

SPAN = gl.constexpr(2048)
"""Entries that a CTA looks at together."""


@gluon.jit
def _request(token, qo_indptr, batch, BATCH: gl.constexpr, NW: gl.constexpr):
    """The request whose query rows hold `token`: how many requests end at or before it."""
    PER_LANE: gl.constexpr = BATCH // 32 if BATCH <= 256 else 1
    i = gl.arange(0, BATCH, gl.BlockedLayout([PER_LANE], [32], [NW], [0]))
    ends = gl.load(qo_indptr + 1 + i, mask=i < batch, other=2147483647)
    return gl.sum((ends <= token).to(gl.int32), 0)


@gluon.jit
def is_selected(position, kv_len):
    return (position >= 0) & (position < kv_len)


@gluon.jit
def _selected_span(line, first, end, kv_len, NW: gl.constexpr):
    """The first and one behind the last of the entries first.. of a line (before `end`) that select a row; (end, first) if none
    does."""
    i = gl.arange(0, SPAN, gl.BlockedLayout([4], [32], [NW], [0]))
    low = gl.full([SPAN], 0, gl.int32, i.type.layout) + end
    high = gl.full([SPAN], 0, gl.int32, i.type.layout) + first
    for start in range(first, end, SPAN):
        at = start + i
        ok = is_selected(gl.load(line + at, mask=at < end, other=-1), kv_len)
        low = gl.minimum(low, gl.where(ok, at, end))
        high = gl.maximum(high, gl.where(ok, at + 1, first))
    return gl.min(low, 0), gl.max(high, 0)


@gluon.jit
def find_item(
    item, qo_indptr, kv_indptr, kv_len_arr, indices, sched, batch, num_heads, topk, splits, per,
    BLOCK_ROWS: gl.constexpr, BATCH: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """The work of CTA `item`; called by all NW warps. splits, per: of a token's tiles, and tiles of one.

    Returns scalars (valid, token, kv_start, kv_len, row0, first, end, part): heads row0.. of query token `token`, whose request
    has kv_len rows on the pages from kv_indices[kv_start] on; entries first <= i < end of its line; `part` is the partial
    block to write, -1 if splits is 1. `valid` is false behind the last query token.
    """
    blocks = (num_heads + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    token = item // (splits * blocks)
    rest = item - token * (splits * blocks)
    split = rest // blocks
    row0 = (rest - split * blocks) * BLOCK_ROWS
    live = gl.load(qo_indptr + batch)
    valid = token < live
    b = item * 0
    if BATCH > 1:
        b = gl.minimum(_request(token, qo_indptr, batch, BATCH, NW), batch - 1)
    kv_len = gl.load(kv_len_arr + b)
    kv_start = gl.load(kv_indptr + b)
    first = gl.minimum(split * per * 64, topk)
    end = gl.where(valid, gl.minimum(first + per * 64, topk), first)
    low, end = _selected_span(indices + token.to(gl.int64) * topk, first, end, kv_len, NW)
    first = gl.minimum(first + (low - first) // 64 * 64, end)
    part = gl.where(splits > 1, item, -1)
    if splits > 1:
        if item == 0:
            gl.store(sched, live * blocks)
        if valid & (split == 0):
            entry = sched + (token * blocks + rest + 1) * 8
            gl.store(entry, token * num_heads + row0)
            gl.store(entry + 1, gl.minimum(num_heads - row0, BLOCK_ROWS))
            gl.store(entry + 2, splits)
            gl.store(entry + 3, part)
            gl.store(entry + 4, blocks)
    return valid, token, kv_start, kv_len, row0, first, end, part


@gluon.jit
def entries(line, at, end):
    """Positions that the entries `at` of a line name; -1 from `end` on."""
    return gl.load(line + at, mask=at < end, other=-1)


@gluon.jit
def slots(pages, position, kv_len, shift):
    """Row number in the pool of each position, -1 for one that selects nothing."""
    ok = is_selected(position, kv_len)
    page = gl.load(pages + (position >> shift), mask=ok, other=0)
    return gl.where(ok, (page << shift) + (position & ((1 << shift) - 1)), -1)


@gluon.jit
def gather(dst, base, rows, STRIDE: gl.constexpr, L: gl.constexpr):
    """cp.async of dst's [rows, width] from row numbers `rows` at `base`, STRIDE elements apart; zeros for -1."""
    c = gl.arange(0, dst.shape[1], gl.SliceLayout(0, L))
    off = rows.to(gl.int64) * STRIDE
    cp_async(dst, base + off[:, None] + c[None, :], mask=(rows >= 0)[:, None] & (c >= 0)[None, :])
