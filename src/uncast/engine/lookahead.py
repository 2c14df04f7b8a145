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

Steps with prompts, drafts, or a request whose choice needs the host (log-probabilities, penalties, biases, grammars) are not
flights.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from uncast.engine.active import ActiveRequest
from uncast.engine.runner import ModelRunner, StepBytes
from uncast.engine.sampler import Draw
from uncast.engine.scheduler import Scheduler
from uncast.engine.static_step import KNOWN, Chosen


@dataclass
class Flight:
    """A step under way.

    Attributes:
        actives: by row.
        bytes: cache bytes of the step.
        parting: requests of it that are over by now; their pages are given up with it.
    """

    actives: list[ActiveRequest]
    chosen: Chosen
    bytes: StepBytes
    parting: list[ActiveRequest] = field(default_factory=list)


class Lookahead:
    """The flights of an engine, at most one while no step is being taken.

    Attributes:
        current: the step under way.
        launched_early: how many steps were started before the tokens of the one before were known.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.current: Flight | None = None
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

    def launch_after(self, flight: Flight, alive: Callable[[ActiveRequest], bool]) -> None:
        """Starts the step after `flight`, if it is known which one that is; then it is `current`."""
        rows = [
            (row, active)
            for row, active in enumerate(flight.actives)
            if alive(active) and active.generated + 1 < active.request.max_tokens
        ]
        actives = [active for _, active in rows]
        if actives and self.scheduler.reserve_next(actives):
            self.current = self._launch(actives, [row for row, _ in rows])
            self.launched_early += 1

    def part(self, active: ActiveRequest, *, at_once: bool = False) -> None:
        """Takes a request that is over out of the scheduler; its pages follow when no step under way writes there, for which
        this waits if they have to be free `at_once`."""
        if self.current is None or active not in self.current.actives:
            self.scheduler.remove(active)
        elif at_once:
            self.current.chosen.wait()
            self.scheduler.remove(active)
        else:
            self.scheduler.withdraw(active)
            self.current.parting.append(active)

    def land(self, flight: Flight) -> None:
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
        return Flight(actives, chosen, self.runner.last_step_bytes())
