"""Steps that verify drafts and make the next ones, in buffers that stay where they are: on a GPU two graphs' replays a step.

    one copy to the device     by request: its tokens and drafts, where they begin, how many rows it has pages for
    verify, one graph:         tokens = where(source < 0, the host's, those left by row `source` of the step before)
                               the model over 1 + drafts rows of each request, logits, the likeliest tokens
    tail, no graph             rows that sample draw their token
    draft, one graph:          accepted = how many drafts are what was chosen at their places
                               the MTP layer over the same rows, now with the tokens chosen: the first draft of the next step
                               its passes of one row per request: the other drafts
                               left for the step after: the last token chosen, its drafts, where they begin
    one copy to the host       what was chosen, how much of it was accepted, and the next drafts

What was accepted decides where the next step begins, and only the device knows it at once; so positions, places in the pool
and lengths are made on the device, and the step after can start before the host has read anything. Rows of the MTP layer beyond
what was accepted hold guesses and are written again by the next step before anyone attends to them.

By default one part runs, the smallest of `buckets` that holds the batch. If it has at most `ROW_TILE` rows and a row is to have
the bits that it has alone (`StepParts.alone`), every row is a request of its own for attention, as decode has it. In
deterministic mode every row is, and every pass a tile of `ROW_TILE` rows. Requests beyond the batch have no pages: they are
written nowhere and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from uncast.attention import AttentionPlan, MLAPagedAttention
from uncast.engine.drafted import DraftedRequest, Report
from uncast.engine.graphs import captured, release
from uncast.engine.sampler import Draw
from uncast.engine.static_step import KNOWN, StepParts, draw_rows, new_entries, to_device
from uncast.engine.step_bytes import DraftPasses, counted_at
from uncast.kernels.row_tile import ROW_TILE
from uncast.models.decoder import ForwardBatch


class _Requests:
    """What attention takes as one: block tables [requests, width], and lengths."""

    def __init__(self, tables: torch.Tensor) -> None:
        self.lengths = torch.zeros(tables.shape[0], dtype=torch.int32, device=tables.device)
        self.tables = tables


class _Rows:
    """Buffers of rows that are run together."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.ids, self.positions, self.slots = (_zeros(device, count) for _ in range(3))


_Passes = Sequence[tuple[slice, ForwardBatch]]


def _zeros(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


class DraftedStep:
    """Steps of up to `max_requests` requests with `drafts` drafts each.

    Attributes:
        drafts, q_len: per request, and the rows that verify them: one more.
        sizes: requests of each part.
        logits: float32 [rows, vocab]; hidden: [rows, hidden_size], `q_len` rows a request; valid until the next step.
    """

    def __init__(self, parts: StepParts, max_requests: int, drafts: int, buckets: Sequence[int]) -> None:
        self._parts, self.drafts, self.q_len, self.max_requests = parts, drafts, 1 + drafts, max_requests
        config, device, q = parts.decoder.config, parts.decoder.device, self.q_len
        self._device = device
        if parts.deterministic:  # as many requests as fill one tile, two tiles, ...
            found = {min(ROW_TILE * tiles // q, max_requests) for tiles in buckets}
            self.sizes, requests = sorted({*found, max_requests} - {0}), -(-max_requests // ROW_TILE) * ROW_TILE
        else:
            self.sizes = sorted({size for size in buckets if 0 < size < max_requests} | {max_requests})
            requests = max_requests
        self._requests, rows = requests, requests * q
        width = parts.width + parts.pool.pages_for(2 * q)  # attention may look beyond the last row, at rows of no one
        self._inputs = _zeros(device, requests, q + 4)  # tokens, start, rows with pages, most, source
        self._left = _zeros(device, requests, q + 1)  # tokens and start of the step after
        self._report = _zeros(device, requests, 3 * q)
        self._results, self._start = _zeros(device, 2, rows), _zeros(device, requests)
        self._every_row = torch.arange(rows, device=device)
        self._tables = torch.zeros((requests, width), dtype=torch.int32, device=device)
        self._held: list[list[int]] = [[] for _ in range(requests)]
        self._further, self._verified = _Rows(device, requests), _Rows(device, rows)
        self._one_query, self._many_queries = _Requests(self._tables), _Requests(self._tables)
        most = max((size * q for size in self.sizes if self._by_row(size)), default=0)
        each = rows if parts.deterministic else most
        self._each_row = _Requests(torch.zeros((each, width), dtype=torch.int32, device=device))
        self.logits = torch.zeros((rows, config.vocab_size), dtype=torch.float32, device=device)
        self.hidden = torch.zeros((rows, config.hidden_size), dtype=parts.decoder.dtype, device=device)
        self._further_hidden = torch.zeros_like(self.hidden[:requests])
        if parts.deterministic:
            self._outputs, self._guesses = torch.zeros_like(self.hidden), _zeros(device, rows)
        self._verify: dict[int, Callable[[], None]] = {}
        self._draft: dict[int, Callable[[], None]] = {}
        self._plans: dict[int, tuple[AttentionPlan, AttentionPlan]] = {}

    @property
    def longest(self) -> int:
        """Cached rows that a request may have."""
        return self._parts.width * self._parts.pool.page_size

    def _by_row(self, size: int) -> bool:
        """Whether each row of a verification of so many requests is a request of its own for attention."""
        return self._parts.deterministic or self._parts.alone_rows(size * self.q_len) > 0

    def prepare(self, graphs: bool) -> None:
        """Plans every part, runs it without a request and, with `graphs`, captures it in two CUDA graphs; large ones first, in
        one pool of memory."""
        pool = torch.cuda.graph_pool_handle() if graphs else None
        for size in reversed(self.sizes):
            for calls, call in zip((self._verify, self._draft), self._planned(size), strict=True):
                calls[size] = captured(call, pool) if graphs else call
                calls[size]()

    def release(self) -> None:
        """Gives the graphs up; no step may follow."""
        for calls in (self._verify, self._draft):
            for run in calls.values():
                release(run)
            calls.clear()

    def size_for(self, requests: int) -> int:
        """Requests of the part that runs so many."""
        return next(size for size in self.sizes if size >= requests)

    def verify(self, requests: Sequence[DraftedRequest], draws: Sequence[tuple[int, Draw]] = ()) -> None:
        """Starts a step, up to the choice of tokens; nothing waits for it.

        Args:
            draws: (row, how it samples) of the rows that do not take their likeliest token.
        """
        # Attention may look at rows that there is no page for, and hides them: the first page, so that no other's NaN comes in.
        own = [list(r.pages[: self._parts.width]) for r in requests]
        beyond = self._tables.shape[1] - self._parts.width
        tables = [pages + pages[:1] * beyond for pages in own]
        places, values = new_entries(self._held, tables, self._tables.shape[1])
        if places:
            sent = to_device([places, values], self._device)
            self._tables.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
        page, q = self._parts.pool.page_size, self.q_len
        rows = [
            [*(r.tokens if r.source == KNOWN else [0] * q), r.start, min(len(r.pages) * page, self.longest), r.most,
             r.source]
            for r in requests
        ]  # fmt: skip
        nobody = [*[0] * (q + 3), KNOWN]
        rows += [nobody] * (self._requests - len(rows))
        self._inputs.copy_(to_device(rows, self._device), non_blocking=True)
        self._verify[self.size_for(len(requests))]()
        draw_rows(self.logits, self._results[0], draws, deterministic=self._parts.deterministic)

    def draft(self, requests: int, chosen: Sequence[Sequence[int]] | None = None) -> Report:
        """Starts the rest of the step of so many requests; nothing waits for it.

        Args:
            chosen: tokens that the host chose for each row of each request, in place of the device's choice.
        """
        if chosen is not None:
            tokens = list(chain(*chosen))
            self._results[0, : len(tokens)].copy_(to_device([tokens], self._device)[0])
        self._draft[self.size_for(requests)]()
        return Report(self._report, requests, self.drafts)

    def counted(self, starts: Sequence[int], accepted: Sequence[int] = ()) -> tuple[AttentionPlan, DraftPasses]:
        """For byte counts on the host, of a step whose requests began at these rows: the model's plan and, with so many drafts
        accepted, the passes of the MTP layer."""
        size = self.size_for(len(starts))
        q, (verify, further) = self.q_len, self._plans[size]
        if self._by_row(size):
            lengths = [start + place for start in starts for place in range(1, q + 1)]
            verify = counted_at(verify, range(len(lengths) + 1), lengths)
        else:
            verify = counted_at(verify, range(0, q * len(starts) + 1, q), [start + q for start in starts])
        left = [start + kept + 1 for start, kept in zip(starts, accepted, strict=False)]
        passes = [[start + number for start in left] for number in range(1, self.drafts)]
        plans = [counted_at(further, range(len(left) + 1), lengths) for lengths in passes]
        return verify, DraftPasses([verify, *plans], sum(start + q for start in starts) + sum(map(sum, passes)))

    def _planned(self, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """What runs a part: verification, and drafts."""
        q = self.q_len
        if self._parts.deterministic:
            rows = [slice(first, first + ROW_TILE) for first in range(0, size * q, ROW_TILE)]
            each = [slice(first, first + ROW_TILE) for first in range(0, size, ROW_TILE)]
            requests, verify = self._requests, [self._pass(at, self._verified, at, self._each_row) for at in rows]
        else:
            rows, each, requests = [slice(0, size * q)], [slice(0, size)], size
            if self._by_row(size):
                verify = [self._pass(rows[0], self._verified, rows[0], self._each_row, of_each=q)]
            else:
                verify = [self._pass(rows[0], self._verified, each[0], self._many_queries, q)]
        further = [self._pass(at, self._further, at, self._one_query) for at in each]
        self._plans[size] = verify[0][1], further[0][1]
        verifying = [(at, batch) for at, (batch, _) in zip(rows, verify, strict=True)]
        drafting = [(at, batch) for at, (batch, _) in zip(each, further, strict=True)]

        @torch.inference_mode()
        def run_verify() -> None:
            self._begin(requests, by_row=self._by_row(size))
            for at, batch in verifying:
                logits, hidden = self._parts.decoder.forward_hidden(batch, every=True)
                largest, best = logits.max(-1)
                self.logits[at].copy_(logits)
                self.hidden[at].copy_(hidden)
                self._results[0, at].copy_(best)
                self._results[1, at].copy_(largest.isfinite())

        @torch.inference_mode()
        def run_draft() -> None:
            accepted, last = self._accept(requests)
            start = self._start[:requests] + accepted + 1
            drafts = [self._first_drafts(verifying, accepted)]
            for number in range(self.drafts - 1):
                drafts.append(self._next_drafts(drafting, start + number))
            self._end(accepted, torch.stack([last, *drafts, start], dim=1))

        return run_verify, run_draft

    def _pass(
        self, at: slice, rows: _Rows, taken: slice, requests: _Requests, q_len: int = 1, of_each: int = 1
    ) -> tuple[ForwardBatch, AttentionPlan]:
        """Rows `at`, which are the requests `taken` of `q_len` queries each for attention, as planned; of one query, `of_each`
        of them are one sequence's."""
        parts, lengths = self._parts, requests.lengths[taken]
        attention = MLAPagedAttention(parts.backend, cuda_graph=self._device.type == "cuda")
        starts = torch.arange(lengths.shape[0] + 1, dtype=torch.int32, device=self._device) * q_len
        alone = parts.alone_rows(lengths.shape[0], of_each) if q_len == 1 else 0
        plan = parts.planning.plan_static(
            attention, parts.pool, starts, requests.tables[taken], lengths, q_len, 0, alone
        )
        count = at.stop - at.start
        batch = ForwardBatch(
            rows.ids[at], rows.positions[at], rows.slots[at], attention, parts.pool.storage, parts.counters,
            self._every_row[:count],
        )  # fmt: skip
        return batch, plan

    def _begin(self, requests: int, *, by_row: bool) -> None:
        """Tokens, positions, places in the pool and lengths of a step, from the host or from the step before."""
        q, inputs, rows = self.q_len, self._inputs[:requests], self._verified
        sources = inputs[:, -1, None]
        state = torch.where(sources < 0, inputs[:, : q + 1], self._left[sources[:, 0].clamp_min(0)])
        start, alive = state[:, q], inputs[:, q + 1, None] > 0
        positions = start[:, None] + self._every_row[:q]
        rows.ids.view(-1, q)[:requests].copy_(state[:, :q])
        rows.positions.view(-1, q)[:requests].copy_(positions)
        rows.slots.view(-1, q)[:requests].copy_(self._slots_of(positions))
        self._start[:requests].copy_(start)
        if by_row:
            each = self._each_row
            each.lengths[: requests * q].view(-1, q).copy_(torch.where(alive, positions + 1, 0))
            each.tables[: requests * q].view(requests, q, -1).copy_(self._tables[:requests, None])
        else:
            self._many_queries.lengths[:requests].copy_(torch.where(alive[:, 0], start + q, 0))

    def _accept(self, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """How many drafts each request keeps, and the last token that was chosen for it."""
        q, inputs = self.q_len, self._inputs[:requests]
        chosen, ids = self._results[0].view(-1, q)[:requests], self._verified.ids.view(-1, q)[:requests]
        agree = (chosen[:, :-1] == ids[:, 1:]).to(torch.int64).cumprod(1).sum(1)
        room = inputs[:, q + 1] - self._start[:requests] - 1
        accepted = torch.minimum(torch.minimum(agree, inputs[:, q + 2]), room).clamp_min(0)
        return accepted, chosen.gather(1, accepted[:, None])[:, 0]

    def _first_drafts(self, passes: _Passes, accepted: torch.Tensor) -> torch.Tensor:
        """The MTP layer over the step's rows: its guess after the last one that each request keeps."""
        requests, decoder, rows = accepted.shape[0], self._parts.decoder, self._further
        kept = self._every_row[: requests * self.q_len : self.q_len] + accepted
        if self._parts.deterministic:  # the last projection, too, sees whole tiles
            for at, batch in passes:
                own = replace(batch, token_ids=self._results[0, at])
                logits, output = decoder.draft(own, self.hidden[at], every=True)
                self._guesses[at].copy_(logits.argmax(-1))
                self._outputs[at].copy_(output)
            guesses, outputs = self._guesses[kept], self._outputs[kept]
        else:
            ((at, batch),) = passes
            own = replace(batch, token_ids=self._results[0, at], logit_rows=kept)
            logits, output = decoder.draft(own, self.hidden[at], every=True)
            guesses, outputs = logits.argmax(-1), output[kept]
        rows.ids[:requests].copy_(guesses)
        self._further_hidden[:requests].copy_(outputs)
        return guesses

    def _next_drafts(self, passes: _Passes, positions: torch.Tensor) -> torch.Tensor:
        """A pass of one row per request at these positions: the guess after the one before."""
        requests, rows = positions.shape[0], self._further
        alive = self._inputs[:requests, self.q_len + 1] > 0
        rows.positions[:requests].copy_(positions)
        rows.slots[:requests].copy_(self._slots_of(positions[:, None])[:, 0])
        self._one_query.lengths[:requests].copy_(torch.where(alive, positions + 1, 0))
        for at, batch in passes:
            logits, output = self._parts.decoder.draft(batch, self._further_hidden[at], every=True)
            rows.ids[at].copy_(logits.argmax(-1))
            self._further_hidden[at].copy_(output)
        return rows.ids[:requests].clone()

    def _end(self, accepted: torch.Tensor, left: torch.Tensor) -> None:
        """Leaves the next step's tokens and start, and what the host is told."""
        requests, q = accepted.shape[0], self.q_len
        self._left[:requests].copy_(left)
        chosen, finite = self._results.view(2, -1, q)[:, :requests]
        self._report[:requests].copy_(torch.cat([chosen, finite, accepted[:, None], left[:, 1:q]], dim=1))

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Where rows at `positions` [requests, n] go; -1 where a request has no page for them."""
        requests, page = positions.shape[0], self._parts.pool.page_size
        pages = self._tables[:requests].gather(1, positions // page).to(torch.int64)
        none = positions >= self._inputs[:requests, self.q_len + 1, None]
        return torch.where(none, -1, pages * page + positions % page)
