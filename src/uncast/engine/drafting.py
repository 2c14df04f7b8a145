"""An engine's drafts: how many a step has, and the rows of the MTP layer that they need."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from uncast.engine.active import ActiveRequest
from uncast.engine.drafter import Drafter
from uncast.engine.lookahead import DraftedFlight, Flight, Lookahead
from uncast.engine.runner import ModelRunner
from uncast.engine.scheduler import Scheduler
from uncast.engine.sequence import Sequence
from uncast.engine.speculation import Speculation


class Drafting:
    """Drafts for the requests of one scheduler; on a runner without `drafts` there are none.

    Attributes:
        speculation: draft counts and what came of them; None if the runner does not draft.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, fixed: int | None) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.speculation = Speculation(fixed) if runner.drafts else None
        self._drafter = Drafter(runner)

    @property
    def keeps_up(self) -> bool:
        """Whether rows of the MTP layer are written."""
        return self.speculation is not None and self.speculation.keeps_up

    def begin(self) -> None:
        """Begins a step that is about to be scheduled."""
        self.runner.begin_drafts()
        self.scheduler.keeps_up = self.keeps_up

    def wanted(self, decoding: Seq[ActiveRequest]) -> int:
        """Drafts of each of these requests in one step; 0 as well where none of them can draft."""
        if self.speculation is None or all(active.sequence.mtp is None for active in decoding):
            return 0
        return self.speculation.count(len(decoding))

    def launch(
        self, ahead: Lookahead, chunks: list[tuple[ActiveRequest, int]], wanted: int
    ) -> Flight | DraftedFlight | None:
        """Starts a scheduled step; None if it is not one that can be a flight."""
        if not wanted:
            return ahead.launch(chunks)
        self._drafter.keep_up([active.sequence for active, _ in chunks if active.is_behind])
        return ahead.launch_drafted(chunks, wanted, self._drafter)

    def draft(self, chunks: list[tuple[ActiveRequest, int]], count: int) -> int:
        """Drafts up to `count` tokens for each decoding request that can; how many requests did."""
        wanted = self.scheduler.reserve_drafts(chunks, count)
        self._drafter.draft([(active.sequence, drafts) for active, drafts in wanted])
        return len(wanted)

    def verified(self, drafted: int, accepted: int) -> None:
        """Counts what became of one request's drafts in a step."""
        if self.speculation is not None and drafted:
            self.speculation.verified(drafted, accepted)

    def fall_behind(self, active: ActiveRequest, hidden: torch.Tensor | None, row: int) -> None:
        """Notes a row of a step without drafts, with its hidden states [rows, hidden_size]: the MTP layer gets it when drafts
        are wanted again."""
        if active.sequence.mtp is None:
            return
        if not self.keeps_up:
            active.sequence.mtp = None
        else:
            assert hidden is not None
            active.sequence.mtp.behind.append(hidden[row : row + 1])

    def keep_drafts(self, active: ActiveRequest, drafts: list[int]) -> None:
        """Takes the next drafts of a request whose rows of the MTP layer were written along with them."""
        sequence, state = active.sequence, active.sequence.mtp
        if not self.keeps_up:
            sequence.mtp = None
        elif state is not None:
            state.cached, state.drafts, state.hidden = _known(active), drafts, None

    def keep_up(self, chunks: list[tuple[ActiveRequest, int]]) -> None:
        """Rows of the MTP layer for what an eager step ran and the choice kept; then pages that are full by now can be
        shared."""
        if self.speculation is None:
            return
        if self.runner.verified and self.keeps_up:
            self._draft_next([active for active, _ in chunks])
        else:
            self._drafter.keep_up(self._new_rows([active for active, _ in chunks]))
        for active, _ in chunks:
            self.scheduler.keep_full_pages(active)

    def observe(self, requests: int, drafting: int, count: int, seconds: float, *, only_decodes: bool = True) -> None:
        """A step in which so many requests decoded, and so many of them drafted `count` tokens each. Its time says something
        where all drafted or none was to, and nobody's prompt was read."""
        if self.speculation is None or not requests:
            return
        self.speculation.rest()
        if only_decodes and drafting == (requests if count else 0):
            self.speculation.observe(requests, count, seconds)

    def _new_rows(self, actives: list[ActiveRequest]) -> list[Sequence]:
        new = list[Sequence]()
        for active, hidden in zip(actives, self.runner.hidden, strict=True):
            state = active.sequence.mtp
            if state is None:
                continue
            if not self.keeps_up:
                active.sequence.mtp = None
                continue
            missing = _known(active) - state.cached - sum(part.shape[0] for part in state.behind)
            if missing > 0:
                state.behind.append(hidden[:missing])
                new.append(active.sequence)
        return new

    def _draft_next(self, actives: list[ActiveRequest]) -> None:
        """After a step in static buffers that verified drafts, from whose logits the host chose: the step's other half."""
        rows, chosen = self.runner.hidden[0].shape[0], []
        for active in actives:
            sequence = active.sequence
            assert sequence.mtp is not None
            kept = sequence.tokens[sequence.mtp.cached + 1 : sequence.cached + 1]
            chosen.append([*kept, *[0] * (rows - len(kept))])
        for active, verified in zip(actives, self.runner.draft_verified(chosen), strict=True):
            self.keep_drafts(active, verified.drafts)


def _known(active: ActiveRequest) -> int:
    """Rows of which the token after is known, too; an end token is not among a sequence's tokens."""
    return min(active.sequence.cached, len(active.sequence.tokens) - 1)
