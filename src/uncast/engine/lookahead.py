"""Decode steps that the device runs while the host prepares the next one.

    host     | launch n | launch n+1 |    take n    | launch n+2 |   take n+1   |
    device              |        step n             |       step n+1            |       step n+2

A flight is a step under way. Its tokens are chosen on the device, so the step after it can start before the host knows them:
each of its rows names the row of this step whose choice it runs (`StepRequest.source`). What the host learns a step late:

- A request that ended with step n has a row in step n+1. Nobody looks at what it chooses, its cached row lies behind the
  request's tokens in a page of its own, and the page stays the request's until step n+1 is over.
- An aborted request ends at once, after the step under way.

The step after a flight is launched early only where `Scheduler.reserve_next` says that the scheduler would run just these
requests: whenever somebody could come in, be swapped or preempted, everything is taken back to the host first. So scheduling
decisions are those of an engine without lookahead, and so is every request's text.

With drafts the device also knows first how many of them were accepted, so that a step after names the request of this one that
left it its tokens (see `drafted_step`), and pages are there for all that may be accepted. Where a request samples, the host has
to know how many random numbers were used: such a step is a flight, and none starts before it was taken.

Steps with prompts, or a request whose choice needs the host (log-probabilities, penalties, biases, grammars), are not flights.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from uncast.engine.active import ActiveRequest
from uncast.engine.drafted import DraftedRequest, Report
from uncast.engine.drafter import Drafter
from uncast.engine.runner import ModelRunner, StepBytes
from uncast.engine.sampler import Draw
from uncast.engine.scheduler import Scheduler
from uncast.engine.static_step import KNOWN, Chosen
from uncast.engine.step_bytes import DraftPasses


@dataclass
class Flight:
    """A step under way.

    Attributes:
        actives: by row.
        bytes: cache bytes of the step.
        hidden: with an MTP layer that is to be kept up, hidden states [rows, hidden_size]; else None.
        parting: requests of it that are over by now; their pages are given up with it.
    """

    drafts: ClassVar[int] = 0
    actives: list[ActiveRequest]
    chosen: Chosen
    bytes: StepBytes
    hidden: torch.Tensor | None = None
    parting: list[ActiveRequest] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when the step is over on the device."""
        self.chosen.wait()


@dataclass
class DraftedFlight:
    """A step under way that verifies drafts.

    Attributes:
        drafts: of each request; most: by request, how many of these are drafts and may be accepted.
        room: by request, rows that it had pages for.
        samples: whether any of the requests does.
        before: passes of the MTP layer that the step began with, for its byte counts.
        actives, parting: as of a `Flight`.
    """

    actives: list[ActiveRequest]
    report: Report
    drafts: int
    most: list[int]
    room: list[int]
    samples: bool
    before: DraftPasses
    parting: list[ActiveRequest] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when the step is over on the device."""
        self.report.wait()


class Lookahead:
    """The flights of an engine, at most one while no step is being taken.

    Attributes:
        current: the step under way.
        launched_early: how many steps were started before the tokens of the one before were known.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.current: Flight | DraftedFlight | None = None
        self.launched_early = 0

    def launch(self, chunks: Seq[tuple[ActiveRequest, int]]) -> Flight | None:
        """Starts a scheduled step; None, and nothing happens, if it is not one that can be a flight."""
        steps = self.runner.decode_steps
        if steps is None or not 0 < len(chunks) <= steps.decode.max_requests:
            return None
        if any(count != 1 or active.remaining != 1 or not active.chosen_on_device for active, count in chunks):
            return None
        actives = [active for active, _ in chunks]
        return self._launch(actives, [KNOWN] * len(actives))

    def launch_drafted(
        self, chunks: Seq[tuple[ActiveRequest, int]], drafts: int, drafter: Drafter
    ) -> DraftedFlight | None:
        """The same with so many drafts a request; those that have none, or fewer, run along."""
        steps, scheduler = self.runner.decode_steps, self.scheduler
        step = None if steps is None else steps.verify.get(drafts)
        if step is None or not 0 < len(chunks) <= step.max_requests:
            return None
        if any(count != 1 or active.remaining != 1 or not active.chosen_on_device for active, count in chunks):
            return None
        if len(chunks) * step.q_len > scheduler.max_step_tokens or not any(active.can_draft for active, _ in chunks):
            return None
        wanted = scheduler.reserve_drafts(list(chunks), drafts)
        drafter.draft([(active.sequence, count) for active, count in wanted])
        actives, tokens = [active for active, _ in chunks], list[list[int]]()
        for active in actives:
            sequence = active.sequence
            tokens.append([sequence.tokens[sequence.cached], *sequence.drafts])
            sequence.drafts = []
        return self._launch_drafted(actives, drafts, tokens, [KNOWN] * len(actives))

    def launch_after(self, flight: Flight | DraftedFlight, alive: Callable[[ActiveRequest], bool]) -> None:
        """Starts the step after `flight`, if it is known which one that is; then it is `current`."""
        rows = [
            (row, active)
            for row, active in enumerate(flight.actives)
            if alive(active) and active.generated + 1 < active.request.max_tokens
        ]
        actives = [active for _, active in rows]
        if isinstance(flight, DraftedFlight):
            self._launch_drafted_after(flight, rows)
        elif actives and self.scheduler.reserve_next(actives):
            self.current = self._launch(actives, [row for row, _ in rows])
            self.launched_early += 1

    def part(self, active: ActiveRequest, *, at_once: bool = False) -> None:
        """Takes a request that is over out of the scheduler; its pages follow when no step under way writes there, for which
        this waits if they have to be free `at_once`."""
        if self.current is None or active not in self.current.actives:
            self.scheduler.remove(active)
        elif at_once:
            self.current.wait()
            self.scheduler.remove(active)
        else:
            self.scheduler.withdraw(active)
            self.current.parting.append(active)

    def land(self, flight: Flight | DraftedFlight) -> None:
        """Gives up what was kept until `flight` was over; it has to be."""
        for active in flight.parting:
            self.scheduler.give_up_pages(active)
        flight.parting = []

    def owners(self) -> list[list[int]]:
        """Pages of requests that are over and that the step under way still writes to."""
        return [] if self.current is None else [active.sequence.pages for active in self.current.parting]

    def _launch(self, actives: list[ActiveRequest], sources: list[int]) -> Flight:
        draws = [
            (row, Draw.of(active.request.params, active.generator))
            for row, active in enumerate(actives)
            if active.request.params.temperature > 0.0
        ]
        chosen = self.runner.launch([active.sequence for active in actives], sources, draws)
        assert self.runner.decode_steps is not None
        hidden = self.runner.decode_steps.decode.hidden
        if hidden is not None:
            kept_up = any(active.sequence.mtp is not None for active in actives)
            hidden = hidden[: len(actives)].clone() if kept_up else None
        return Flight(actives, chosen, self.runner.last_step_bytes(), hidden)

    def _launch_drafted_after(self, flight: DraftedFlight, rows: list[tuple[int, ActiveRequest]]) -> None:
        """Only where somebody goes on whatever is accepted, and has room for it."""
        if flight.samples or not any(
            active.generated + 1 + flight.most[row] < active.request.max_tokens for row, active in rows
        ):
            return
        drafts, actives = flight.drafts, [active for _, active in rows]
        assert self.runner.decode_steps is not None
        longest = self.runner.decode_steps.verify[drafts].longest
        if any(active.sequence.cached + 2 * (1 + drafts) > longest for active in actives):
            return
        if self.scheduler.reserve_next(actives, 1 + drafts):
            none = [[0] * (1 + drafts)] * len(actives)
            self.current = self._launch_drafted(actives, drafts, none, [row for row, _ in rows])
            self.launched_early += 1

    def _launch_drafted(
        self, actives: list[ActiveRequest], drafts: int, tokens: list[list[int]], sources: list[int]
    ) -> DraftedFlight:
        """Starts a step of the first of these tokens of each request and the drafts after it, or of what its source left."""
        most = [
            len(of) - 1 if active.sequence.mtp is not None else 0 for active, of in zip(actives, tokens, strict=True)
        ]
        requests = [
            DraftedRequest(
                active.sequence.pages, [*of, *[0] * (1 + drafts - len(of))], active.sequence.cached, kept, source
            )
            for active, of, kept, source in zip(actives, tokens, most, sources, strict=True)
        ]
        draws = [
            (row * (1 + drafts) + place, draw)
            for row, active in enumerate(actives)
            if active.request.params.temperature > 0.0
            for place, draw in enumerate(active.peek(1 + drafts))
        ]
        report = self.runner.launch_drafted(drafts, requests, draws)
        size = self.runner.page_size
        room = [len(active.sequence.pages) * size for active in actives]
        return DraftedFlight(actives, report, drafts, most, room, bool(draws), self.runner.take_draft_passes())
