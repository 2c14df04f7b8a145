"""Drafts by the MTP layer: its rows are kept up with the model's, and one pass of it guesses one token.

    tokens          t0 t1 t2 t3 t4          the model has rows 0..3; t4 was chosen last
    MTP layer       row i: hidden i and token i + 1: rows 0..3, written after the step that chose t4
    first draft     row 3's output guesses t5
    further ones    row 4 (row 3's output, the guess of t5) guesses t6, row 5 guesses t7, ...
    next step       the model runs t4 and the guesses; those that it would have chosen stay (see `uncast.engine.core`)

Rows of guesses are provisional: whatever was accepted, they are written again with the model's own hidden states before anyone
attends to them. A row that depends on the token after its own belongs to a page only together with that token: see
`uncast.engine.prefix_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch.nn import functional as F

from uncast.engine.batch import Batch
from uncast.engine.runner import ModelRunner
from uncast.engine.sequence import MTPState, Rows, Sequence, fill_tile
from uncast.kernels.row_tile import ROW_TILE


class Drafter:
    """Runs a runner's MTP layer. A step is: `draft`, the runner's `step`, the choice of tokens, `keep_up`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> None:
        """Sets each sequence's `drafts` to as many guesses as wanted, or to those that the last step left (see `drafted_step`)
        if these are fewer; pages for their rows must be there.

        Every sequence decodes and was kept up to its last token but one.
        """
        for sequence, count in wanted:
            assert sequence.mtp is not None and sequence.mtp.drafts
            sequence.drafts = sequence.mtp.drafts[:count]
        chained = [
            (sequence, count)
            for sequence, count in wanted
            if len(sequence.drafts) < count and sequence.mtp is not None and sequence.mtp.hidden is not None
        ]
        size = ROW_TILE if self.runner.deterministic else max(1, len(chained))
        for first in range(0, len(chained), size):
            self._chain(chained[first : first + size])

    def _chain(self, wanted: Seq[tuple[Sequence, int]]) -> None:
        """All drafts after the first, with one attention plan."""
        runner, batch, outputs = self.runner, Batch(), list[torch.Tensor]()
        slots: list[list[int]] = [[] for _ in range(max(count for _, count in wanted) - 1)]
        for sequence, count in wanted:
            assert sequence.mtp is not None and sequence.mtp.hidden is not None
            start = sequence.mtp.cached
            batch.wanted.append(len(batch.ids))
            batch.add(sequence.drafts[0], start, -1)
            batch.close(sequence.pages, start + 1)
            outputs.append(sequence.mtp.hidden)
            for number, places in enumerate(slots):
                goes_on = number < count - 1
                places.append(sequence.slot(start + number, runner.page_size) if goes_on else -1)
                runner.count_draft_rows(start + number + 1 if goes_on else 0)
        hidden = torch.stack(outputs)
        if runner.deterministic:
            fill_tile(batch)
            hidden = F.pad(hidden, (0, 0, 0, ROW_TILE - hidden.shape[0]))
            slots = [[*places, *[-1] * (ROW_TILE - len(places))] for places in slots]
        guesses = runner.draft_chain(batch, hidden, slots).T.tolist()
        for (sequence, count), tokens in zip(wanted, guesses, strict=False):
            sequence.drafts += tokens[: count - 1]

    def keep_up(self, sequences: Seq[Sequence]) -> None:
        """Writes the rows that the MTP layer is behind and, of sequences that decode, takes their first draft.

        Args:
            sequences: those that are behind; the token after each of these rows is known.
        """
        if not sequences:
            return
        rows, decoding, states = list[Rows](), list[MTPState](), list[torch.Tensor]()
        for sequence in sequences:
            state = sequence.mtp
            assert state is not None
            start, end = state.cached, state.cached + sum(hidden.shape[0] for hidden in state.behind)
            decodes = end == len(sequence.tokens) - 1
            rows.append(Rows(sequence, start, end, end - 1 if decodes else end))
            states += state.behind
            state.cached, state.drafts, state.hidden, state.behind = end, [], None, []
            if decodes:
                decoding.append(state)
            self.runner.count_draft_rows(end)
        hidden_states = torch.cat(states)
        logits, outputs, first = [], [], 0
        for batch in self.runner.batches(rows, shift=1):
            part = hidden_states[first : first + len(batch.ids)]
            first += part.shape[0]
            found, output = self.runner.draft_forward(batch, F.pad(part, (0, 0, 0, len(batch.ids) - part.shape[0])))
            logits.append(found)
            outputs.append(output[torch.tensor(batch.wanted, dtype=torch.int64, device=output.device)])
        if decoding:
            guesses = torch.cat(logits).argmax(-1).tolist()
            for state, token, output in zip(decoding, guesses, torch.cat(outputs), strict=True):
                state.drafts, state.hidden = [token], output
