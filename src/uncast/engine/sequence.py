"""Sequences, and their rows as the batches of a pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from uncast.engine.batch import Batch
from uncast.kernels.row_tile import ROW_TILE


@dataclass
class MTPState:
    """A sequence in the MTP layer, whose row i needs token i + 1, too.

    Attributes:
        cached: rows [0, cached) are those of the sequence's tokens; later ones are of drafts and will be written again.
        drafts: guesses of the tokens after the sequence's, at least one once it decodes.
        hidden: the MTP layer's output for the first of them [hidden_size], for further ones; None if there are to be none.
        behind: hidden states [rows, hidden_size] of rows from `cached` on that the model has and the MTP layer has not yet.
    """

    cached: int = 0
    drafts: list[int] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    behind: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """Rows [start, end) of a sequence in one pass; logits are wanted from `wanted` on."""

    sequence: Sequence
    start: int
    end: int
    wanted: int


@dataclass
class Sequence:
    """One request's tokens and where their rows are.

    Token ownership: `tokens[:cached]` have rows in `pages`; `tokens[cached:]` are still to be run.

    Attributes:
        drafts: guesses of the tokens after `tokens`, which the next step verifies; empty outside of it.
        mtp: of a sequence whose rows in the MTP layer are kept up; None if they are not.
    """

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    drafts: list[int] = field(default_factory=list)
    mtp: MTPState | None = None

    def token(self, position: int) -> int:
        """The token at `position`, a draft's beyond `tokens`."""
        known = len(self.tokens)
        return self.tokens[position] if position < known else self.drafts[position - known]

    def span(self, start: int, end: int) -> list[int]:
        """The tokens at positions [start, end)."""
        known = len(self.tokens)
        return self.tokens[start:end] + self.drafts[max(start - known, 0) : max(end - known, 0)]

    def slots(self, start: int, end: int, page_size: int) -> list[int]:
        """Where the rows at positions [start, end) are in the pool."""
        found: list[int] = []
        for index in range(start // page_size, -(-end // page_size)):
            first = self.pages[index] * page_size
            found += range(first, first + page_size)
        offset = start % page_size
        return found[offset : offset + end - start]

    def slot(self, position: int, page_size: int) -> int:
        """Where the row at `position` is in the pool."""
        return self.pages[position // page_size] * page_size + position % page_size


def whole(rows: Seq[Rows], shift: int, page_size: int) -> Batch:
    """One batch in which each sequence is one request; the row at position i holds token i + shift."""
    batch = Batch()
    for row in rows:
        batch.wanted += [len(batch.ids) + position - row.start for position in range(row.wanted, row.end)]
        batch.ids += row.sequence.span(row.start + shift, row.end + shift)
        batch.positions += range(row.start, row.end)
        batch.slots += row.sequence.slots(row.start, row.end, page_size)
        batch.close(row.sequence.pages, row.end)
    return batch


def tiles(rows: Seq[Rows], shift: int, page_size: int) -> list[Batch]:
    """Batches of `ROW_TILE` rows, each row a request of its own; the last one is filled up."""
    found = row_by_row(rows, shift, page_size)
    fill_tile(found[-1])
    return found


def few_rows(rows: Seq[Rows], shift: int, page_size: int) -> Batch:
    """At most `ROW_TILE` rows, each a request of its own that is to have the bits that it has alone."""
    (batch,) = row_by_row(rows, shift, page_size)
    batch.alone_rows = max(row.end - row.start for row in rows)
    return batch


def row_by_row(rows: Seq[Rows], shift: int, page_size: int) -> list[Batch]:
    """Batches of up to `ROW_TILE` rows, each row a request of its own."""
    found: list[Batch] = []
    for row in rows:
        for position in range(row.start, row.end):
            if not found or len(found[-1].ids) == ROW_TILE:
                found.append(Batch())
            tile = found[-1]
            if position >= row.wanted:
                tile.wanted.append(len(tile.ids))
            tile.add(row.sequence.token(position + shift), position, row.sequence.slot(position, page_size))
            tile.close(row.sequence.pages, position + 1)
    return found


def fill_tile(batch: Batch) -> None:
    """Adds rows of no one until there are `ROW_TILE`: they are written nowhere and attend to nothing."""
    while len(batch.ids) < ROW_TILE:
        batch.add(0, 0, -1)
        batch.close([], 0)
