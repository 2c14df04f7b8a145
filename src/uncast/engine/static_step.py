"""Decode steps in buffers that stay where they are, so that a CUDA graph can hold the whole step.

    one copy to the device     token ids, positions, slots, lengths, sources of every row; new entries of block tables
    a part, one graph:         ids = where(source < 0, ids, tokens chosen in the step before)
                               the model, attention planned once over these buffers, logits
                               best = argmax, finite = isfinite(max)
    tail, no graph             rows that sample draw their token (`sampler.sample_rows`)
    one copy to the host       what was chosen and whether it was finite, in pinned memory, with an event

A part is a range of requests with one query row each. By default one part runs, the smallest of `buckets` that holds the
batch; in deterministic mode parts are tiles of `ROW_TILE` rows and as many run as the batch needs. Rows beyond the batch have
slot -1 and length 0: they are written nowhere, attend to nothing and no byte counts them.

On a CPU, or with graphs off, a part is called instead of replayed; everything else is the same code. Where several processes
share the model, each has these buffers and parts; rank 0 stages a step and tells the others (`Staged`), and its ids, some of
which only its device knows, are the first thing that they exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from uncast.attention import AttentionPlan, MLAPagedAttention
from uncast.engine.graphs import captured, release
from uncast.engine.on_its_way import OnItsWay
from uncast.engine.planning import Planning
from uncast.engine.sampler import Draw, sample_rows
from uncast.kernels.row_tile import ROW_TILE
from uncast.latent.pool import PagedPool
from uncast.models.decoder import ForwardBatch, MLADecoder
from uncast.models.indexer import IndexCache

BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Requests of a part. A row of no one still reads the experts that it is routed to, so small batches have none."""
KNOWN = -1
"""Source of a row whose token the host knows."""
_IDS, _POSITIONS, _SLOTS, _LENGTHS, _SOURCES = range(5)


@dataclass(frozen=True)
class StepParts:
    """What of a runner its steps are made of.

    Attributes:
        alone: whether a row of a pass of up to `ROW_TILE` rows is to have the bits that it has alone; not with `max_topk`.
        max_topk: of steps with sparse attention; 0: there are none.
        width: pages of the longest request.
    """

    decoder: MLADecoder
    pool: PagedPool
    counters: torch.Tensor
    backend: str
    deterministic: bool
    drafts: bool
    max_topk: int
    width: int
    planning: Planning
    alone: bool = False

    def alone_rows(self, rows: int, of_each: int = 1) -> int:
        """`Problem.alone_rows` of a dense pass of so many requests with one query, `of_each` of them rows of one sequence."""
        return of_each if self.alone and rows <= ROW_TILE else 0


@dataclass(frozen=True)
class StepRequest:
    """One request of a step: its last row, of `token`, is the one before row `kv_len`.

    Attributes:
        source: the row of the step before that chose the token, else `KNOWN`.
    """

    pages: Seq[int]
    kv_len: int
    token: int
    source: int = KNOWN


@dataclass(frozen=True)
class Staged:
    """A step as the device gets it; everything that a rank has to know to run its part of it.

    Attributes:
        rows: ids, positions, slots, lengths and sources of every row of the buffers.
        places, values: new entries of the block tables, as places in the flattened buffer and pages.
        requests: how many; topk: of their attention.
    """

    rows: list[list[int]]
    places: list[int]
    values: list[int]
    requests: int
    topk: int


class Chosen(OnItsWay):
    """Tokens that a step chose, on their way to the host."""

    def __init__(self, results: torch.Tensor, rows: int) -> None:
        """results: int64 [2, rows at least]: tokens, and whether their logits were finite."""
        super().__init__(results)
        self._rows = rows

    def read(self) -> tuple[list[int], list[bool]]:
        """Of each row its token and whether its logits were finite; waits for them."""
        tokens, finite = self._lists()
        return tokens[: self._rows], [bool(value) for value in finite[: self._rows]]


@dataclass
class _Part:
    """Requests [first, last) of the buffers; what runs them, by topk, and the plans behind it."""

    first: int
    last: int
    run: dict[int, Callable[[], None]] = field(default_factory=dict)
    plans: dict[int, AttentionPlan] = field(default_factory=dict)


class StaticStep:
    """Steps of up to `max_requests` requests with one query row each.

    Attributes:
        logits: float32 [rows, vocab]; hidden: [rows, hidden_size] with drafts, else None; valid until the next step.
    """

    def __init__(self, parts: StepParts, max_requests: int, buckets: Seq[int] = BUCKETS) -> None:
        self._parts = parts
        if parts.deterministic:
            max_requests = -(-max_requests // ROW_TILE) * ROW_TILE
        self.max_requests = max_requests
        rows, decoder = max_requests, parts.decoder
        config, device = decoder.config, decoder.device
        self._device = device
        self._inputs = torch.zeros((5, rows), dtype=torch.int64, device=device)
        self._inputs[_SLOTS].fill_(-1)
        self._inputs[_SOURCES].fill_(KNOWN)
        self._results = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self._previous = torch.zeros(rows, dtype=torch.int64, device=device)
        self._every_row = torch.arange(rows, device=device)
        self._lengths = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_requests, parts.width), dtype=torch.int32, device=device)
        self._held: list[list[int]] = [[] for _ in range(max_requests)]
        self.logits = torch.zeros((rows, config.vocab_size), dtype=torch.float32, device=device)
        self.hidden: torch.Tensor | None = None
        if parts.drafts:
            self.hidden = torch.zeros((rows, config.hidden_size), dtype=decoder.dtype, device=device)
        if parts.deterministic:
            self._all = [_Part(first, first + ROW_TILE) for first in range(0, max_requests, ROW_TILE)]
        else:
            sizes = sorted({size for size in buckets if 0 < size < max_requests} | {max_requests})
            self._all = [_Part(0, size) for size in sizes]
        self.used: list[AttentionPlan] = []

    @property
    def longest(self) -> int:
        """Cached rows that a request may have."""
        return self._parts.width * self._parts.pool.page_size

    @property
    def sizes(self) -> list[int]:
        """Requests of each part."""
        return [part.last - part.first for part in self._all]

    def prepare(self, graphs: bool) -> None:
        """Plans every part, runs it without a request and, with `graphs`, captures it in a CUDA graph; large ones first, in one
        pool of memory."""
        topks = {self._parts.max_topk} if self._parts.deterministic else {0, self._parts.max_topk}
        pool = torch.cuda.graph_pool_handle() if graphs else None
        for part in reversed(self._all):
            for topk in topks:
                call = self._planned(part, topk)
                part.run[topk] = captured(call, pool) if graphs else call
                part.run[topk]()

    def run(
        self,
        requests: Seq[StepRequest],
        draws: Seq[tuple[int, Draw]] = (),
        tell: Callable[[Staged], None] | None = None,
    ) -> int:
        """Starts a step; nothing waits for it. Its logits and `choose` follow in the order of the device.

        Args:
            draws: (row, how it samples) of the rows that do not take their likeliest token.
            tell: called with the step before it starts.

        Returns:
            How many rows the step has.
        """
        longest = max(request.kv_len for request in requests)
        topk = self._parts.max_topk if self._parts.deterministic or longest > self._parts.max_topk else 0
        width = self._parts.width  # more pages than a context has may be reserved
        places, values = new_entries(self._held, [request.pages[:width] for request in requests], width)
        staged = Staged(self._rows(requests), places, values, len(requests), topk)
        if tell is not None:
            tell(staged)
        self.replay(staged)
        self.used = [self._counted(part, topk, requests) for part in self._needed(len(requests))]
        draw_rows(self.logits, self._results[0], draws, deterministic=self._parts.deterministic)
        return len(requests)

    def replay(self, staged: Staged) -> None:
        """Starts a staged step, up to the likeliest token of each row."""
        self._previous.copy_(self._results[0])
        if staged.places:
            sent = to_device([staged.places, staged.values], self._device)
            self._tables.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
        self._inputs.copy_(to_device(staged.rows, self._device), non_blocking=True)
        for part in self._needed(staged.requests):
            part.run[staged.topk]()

    def release(self) -> None:
        """Gives the graphs up, and with them what they hold of a process group; no step may follow."""
        for part in self._all:
            for run in part.run.values():
                release(run)
            part.run = {}

    def chosen(self, rows: int) -> Chosen:
        """What the last step chose, underway to the host."""
        return Chosen(self._results, rows)

    def _needed(self, requests: int) -> list[_Part]:
        if self._parts.deterministic:
            return [part for part in self._all if part.first < requests]
        return [next(part for part in self._all if part.last >= requests)]

    def _rows(self, requests: Seq[StepRequest]) -> list[list[int]]:
        """The rows of `_inputs`."""
        size, missing = self._parts.pool.page_size, self._inputs.shape[1] - len(requests)
        ids, positions, slots, sources = list[int](), list[int](), list[int](), list[int]()
        for request in requests:
            position = request.kv_len - 1
            ids.append(request.token)
            positions.append(position)
            slots.append(request.pages[position // size] * size + position % size)
            sources.append(request.source)
        none, lengths = [0] * missing, [request.kv_len for request in requests]
        return [ids + none, positions + none, slots + [-1] * missing, lengths + none, sources + [KNOWN] * missing]

    def _planned(self, part: _Part, topk: int) -> Callable[[], None]:
        parts, size = self._parts, part.last - part.first
        attention = MLAPagedAttention(parts.backend, cuda_graph=self._device.type == "cuda")
        starts = torch.arange(size + 1, dtype=torch.int32, device=self._device)
        requests = slice(part.first, part.last)
        part.plans[topk] = parts.planning.plan_static(
            attention,
            parts.pool,
            starts,
            self._tables[requests],
            self._lengths[requests],
            1,
            topk,
            parts.alone_rows(size),
        )
        index = None
        if parts.pool.index_storage is not None and parts.pool.index_layout is not None:
            index = IndexCache(parts.pool.index_storage, parts.pool.index_layout)
        ids, positions, slots, _, sources = (values[requests] for values in self._inputs)
        batch = ForwardBatch(
            ids, positions, slots, attention, parts.pool.storage, parts.counters,
            self._every_row[:size], index,
        )  # fmt: skip

        @torch.inference_mode()
        def call() -> None:
            self._lengths[requests].copy_(self._inputs[_LENGTHS][requests])
            batch.token_ids = torch.where(sources < 0, ids, self._previous[sources.clamp_min(0)])
            if parts.decoder.parallel is not None:
                parts.decoder.parallel.from_first(batch.token_ids)
            logits, hidden = parts.decoder.forward_hidden(batch, every=parts.drafts)
            largest, best = logits.max(-1)
            self.logits[requests].copy_(logits)
            self._results[0, requests].copy_(best)
            self._results[1, requests].copy_(largest.isfinite())
            if self.hidden is not None:
                self.hidden[requests].copy_(hidden)

        return call

    def _counted(self, part: _Part, topk: int, requests: Seq[StepRequest]) -> AttentionPlan:
        """The part's plan with this step's lengths for its byte counts, all of it on the host."""
        plan, size = part.plans[topk], part.last - part.first
        mine = requests[part.first : part.last]
        starts = torch.arange(size + 1, dtype=torch.int32)
        lengths = torch.tensor([r.kv_len for r in mine] + [0] * (size - len(mine)), dtype=torch.int32)
        problem = replace(plan.problem, qo_indptr=starts, kv_len_arr=lengths)
        if plan.copy_layout is not None:  # such a backend's bytes depend on page numbers, too
            ends = [0]
            for request in mine:
                ends.append(ends[-1] + len(request.pages))
            indptr = torch.tensor(ends + [ends[-1]] * (size - len(mine)), dtype=torch.int32)
            pages = torch.tensor(list(chain(*(r.pages for r in mine))), dtype=torch.int32)
            problem = replace(problem, kv_indptr=indptr, kv_indices=pages, pages_per_request=None)
        return plan.counting(problem)


def new_entries(held: list[list[int]], pages: Seq[Seq[int]], width: int) -> tuple[list[int], list[int]]:
    """The entries of block tables that the device does not have yet: their places in a buffer of `width` columns, and pages.

    Args:
        held: by row, the pages that the device has; brought up to date.
        pages: by row, the pages that it is to have.
    """
    places, values = list[range](), list[Seq[int]]()
    for row, wanted in enumerate(pages):
        if held[row] == wanted:
            continue
        known = len(held[row]) if wanted[: len(held[row])] == held[row] else 0
        places.append(range(row * width + known, row * width + len(wanted)))
        values.append(wanted[known:])
        held[row] = list(wanted)
    return list(chain(*places)), list(chain(*values))


def draw_rows(logits: torch.Tensor, tokens: torch.Tensor, draws: Seq[tuple[int, Draw]], *, deterministic: bool) -> None:
    """Puts the tokens of rows that sample into `tokens` int64 [rows], a few rows at a time: each needs several copies of its
    logits, float32 [rows, vocab]. In deterministic mode whole tiles: how a sum over the vocabulary is cut may depend on how
    many rows there are."""
    if not deterministic:
        for first in range(0, len(draws), ROW_TILE):
            few = draws[first : first + ROW_TILE]
            _draw_few(logits, tokens, [row for row, _ in few], [draw for _, draw in few])
        return
    by_row = dict(draws)
    for first in sorted({row // ROW_TILE * ROW_TILE for row in by_row}):
        rows = list(range(first, first + ROW_TILE))
        _draw_few(logits, tokens, rows, [by_row.get(row, Draw()) for row in rows])


def _draw_few(logits: torch.Tensor, tokens: torch.Tensor, rows: list[int], draws: list[Draw]) -> None:
    packed = to_device([[float(row) for row in rows], *zip(*(draw.packed() for draw in draws), strict=True)],
                       logits.device, torch.float64)  # fmt: skip
    index = packed[0].long()
    tokens.index_copy_(0, index, sample_rows(logits[index], packed[1:], tokens[index]))


def to_device(
    values: Seq[Seq[int]] | Seq[Seq[float]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A tensor of host numbers on `device`; the copy waits for nothing (torch keeps pinned memory until it is done)."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
