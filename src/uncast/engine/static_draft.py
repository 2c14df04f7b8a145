"""The MTP layer's passes of one row per request in buffers that stay where they are: on a GPU one graph's replay a draft.

    before a chain    ids, positions, lengths, slots of every pass and block tables: one copy each to the device
    a pass            a row that goes on (slot >= 0) is one position further; the layer writes it and attends
                      ids = its likeliest token, hidden = its output: what the next pass runs
    after a chain     the tokens of all passes to the host

Rows beyond the batch have slot -1 and length 0, as in `static_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from uncast.attention import AttentionPlan, MLAPagedAttention
from uncast.engine.batch import Batch
from uncast.engine.graphs import captured, release
from uncast.engine.static_step import StepParts, to_device
from uncast.engine.step_bytes import counted_at
from uncast.kernels.row_tile import ROW_TILE
from uncast.models.decoder import ForwardBatch


class StaticDraft:
    """Draft chains of up to `max_requests` requests; in deterministic mode of tiles."""

    def __init__(self, parts: StepParts, max_requests: int, buckets: Seq[int]) -> None:
        config, device = parts.decoder.config, parts.decoder.device
        sizes = sorted({size for size in buckets if 0 < size < max_requests} | {max_requests})
        self._sizes = [ROW_TILE] if parts.deterministic else sizes
        self._parts, self._device, rows = parts, device, self._sizes[-1]
        self._state = torch.zeros((3, rows), dtype=torch.int64, device=device)  # ids, positions, lengths
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((rows, parts.width), dtype=torch.int32, device=device)
        self._hidden = torch.zeros((rows, config.hidden_size), dtype=parts.decoder.dtype, device=device)
        self._every_row = torch.arange(rows, device=device)
        self._run: dict[int, Callable[[], None]] = {}
        self._plans: dict[int, AttentionPlan] = {}

    def prepare(self, graphs: bool) -> None:
        """Plans every size and, with `graphs`, captures it."""
        pool = torch.cuda.graph_pool_handle() if graphs else None
        for size in reversed(self._sizes):
            call = self._planned(size)
            self._run[size] = captured(call, pool) if graphs else call
            self._run[size]()

    def release(self) -> None:
        """Gives the graphs up; no chain may follow."""
        for run in self._run.values():
            release(run)
        self._run = {}

    def size_for(self, rows: int) -> int | None:
        """The smallest size that holds so many rows; None if none does."""
        return next((size for size in self._sizes if size >= rows), None)

    def run(self, size: int, batch: Batch, hidden: torch.Tensor, slots: Seq[Seq[int]]) -> torch.Tensor:
        """Tokens int64 [passes, rows] on the device, of arguments as `ModelRunner.draft_chain` has them."""
        rows, passes = len(batch.ids), len(slots)
        none = [0] * (size - rows)
        goes_on = [int(slot >= 0) for slot in slots[0]]
        before = [position - more for position, more in zip(batch.positions, goes_on, strict=True)]
        lengths = [kv_len - more for kv_len, more in zip(batch.kv_lens, goes_on, strict=True)]
        places = [[*of_pass, *[-1] * (size - rows)] for of_pass in slots]
        sent = to_device([[*batch.ids, *none], [*before, *none], [*lengths, *none], *places], self._device)
        self._state[:, :size].copy_(sent[:3])
        width = min(self._parts.width, max(len(pages) for pages in batch.tables))
        padded = [[*pages[:width], *[0] * (width - len(pages))] for pages in batch.tables]
        tables = to_device(padded, self._device, torch.int32)
        self._tables[:rows, :width].copy_(tables)
        self._hidden[:rows].copy_(hidden)
        found = torch.empty((passes, size), dtype=torch.int64, device=self._device)
        for number in range(passes):
            self._slots[:size].copy_(sent[3 + number])
            self._run[size]()
            found[number].copy_(self._state[0, :size])
        return found[:, :rows]

    def counted(self, size: int, kv_lens: Seq[int]) -> AttentionPlan:
        """The plan with the lengths of one pass for its byte counts, on the host."""
        return counted_at(self._plans[size], range(size + 1), [*kv_lens, *[0] * (size - len(kv_lens))])

    def _planned(self, size: int) -> Callable[[], None]:
        parts = self._parts
        attention = MLAPagedAttention(parts.backend, cuda_graph=self._device.type == "cuda")
        starts = torch.arange(size + 1, dtype=torch.int32, device=self._device)
        self._plans[size] = parts.planning.plan_static(
            attention, parts.pool, starts, self._tables[:size], self._lengths[:size], 1, 0, parts.alone_rows(size)
        )
        ids, positions, lengths = (row[:size] for row in self._state)
        slots, hidden = self._slots[:size], self._hidden[:size]
        batch = ForwardBatch(
            ids, positions, slots, attention, parts.pool.storage, parts.counters, self._every_row[:size]
        )

        @torch.inference_mode()
        def call() -> None:
            goes_on = (slots >= 0).to(torch.int64)
            positions.add_(goes_on)
            lengths.add_(goes_on)
            self._lengths[:size].copy_(lengths)
            logits, output = parts.decoder.draft(batch, hidden, every=True)
            ids.copy_(logits.argmax(-1))
            hidden.copy_(output)

        return call
