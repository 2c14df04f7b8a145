"""Finds the steps of a trace, first by what servers write, last by what repeats.

The ladder: server labels (vLLM, SGLang), ProfilerStep (split where a model's forward frames show several), graph launches,
optimiser steps, Python frames of a server's loop, whole forwards, the period of the kernel sequence, else one step. A kernel
belongs to the step in which it was *launched*: it may run later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from uncast.doctor.intervals import covered, gaps, merged
from uncast.doctor.link import Links
from uncast.doctor.trace import KERNEL, Trace
from uncast.doctor.windows import Window, ladder

MIN_SHARE = 0.8
LONG_GAP_US = 1000.0
"""A gap of more than this and than the step's work is a wait for other reasons, not the step's own."""


@dataclass
class Step:
    """One step of the model. `kernels`: indices sorted by start."""

    label: str
    start: float
    end: float
    phase: str = "unknown"
    batch: int | None = None
    live_tokens: int | None = None
    new_tokens: int | None = None
    kernels: list[int] = field(default_factory=list)


@dataclass
class Steps:
    """`how`: the rung of the ladder that found them; `dropped`: steps cut at the trace's edges."""

    how: str
    steps: list[Step]
    dropped: int = 0
    unassigned: int = 0


@dataclass(frozen=True)
class StepTime:
    """Microseconds of a step: `wall` from the first kernel to the last (or to the next step's first, when it follows at
    once: after half of `wall`, its own work or a millisecond at most), `busy` as a union, `idle` gaps within, `outside` waits
    longer than all its work, taken off `wall`."""

    wall: float
    busy: float
    outside: float

    @property
    def idle(self) -> float:
        return max(0.0, self.wall - self.busy)


def find_steps(trace: Trace, links: Links) -> Steps:
    """The steps of a trace with their kernels; first and last are dropped where the trace cuts them."""
    for how, windows in ladder(trace, links):
        result = _assign(trace, links, how, windows)
        if result.steps:
            return _drop_cut(result)
    whole = Step("the whole trace", float("-inf"), float("inf"))
    whole.kernels = sorted(range(len(trace.kernels)), key=lambda i: trace.kernels.ts[i])
    return Steps("none found: the whole trace is one step", [whole] if whole.kernels else [])


def _assign(trace: Trace, links: Links, how: str, windows: list[Window]) -> Steps:
    """Kernels to windows by launch time, by their own time where no launch is known; a window reaches to the next one."""
    if not windows:
        return Steps(how, [])
    steps = [Step(m.name, m.ts, m.end, w.phase, w.batch, w.live_tokens, w.new_tokens) for m, w in windows]
    gap = max((b.start - a.end for a, b in pairwise(steps)), default=float("inf"))
    starts = [s.start for s in steps]
    by_gpu = how.startswith("the period")
    unassigned = 0
    for index in range(len(trace.kernels)):
        launch = links.launch[index]
        if launch < 0 and not by_gpu and len(trace.ops):
            unassigned += 1
            continue
        ts = trace.kernels.ts[index] if by_gpu or launch < 0 else trace.launches.ts[launch]
        number = bisect_right(starts, ts) - 1
        last = number == len(steps) - 1
        if number < 0 or (last and ts > steps[number].end + gap):
            unassigned += 1
            continue
        steps[number].kernels.append(index)
    for step in steps:
        step.kernels.sort(key=lambda i: trace.kernels.ts[i])
    return Steps(how, [s for s in steps if s.kernels], unassigned=unassigned)


def _drop_cut(found: Steps) -> Steps:
    """Drops a first or last step with clearly fewer kernels than the others of its phase."""
    steps = list(found.steps)
    for end in (0, -1):
        peers = [len(s.kernels) for s in steps if s.phase == steps[end].phase]
        if len(peers) >= 3 and len(steps[end].kernels) < MIN_SHARE * median(peers):
            steps.pop(end)
    return Steps(found.how, steps, len(found.steps) - len(steps), found.unassigned)


def step_times(trace: Trace, steps: Sequence[Step]) -> list[StepTime]:
    """Times of steps that are neighbours in the trace."""
    kernels = trace.kernels
    spans = [[(kernels.ts[i], kernels.end(i)) for i in s.kernels] for s in steps]
    out = []
    for number, intervals in enumerate(spans):
        busy = covered(intervals)
        first, last = merged(intervals)[0][0], merged(intervals)[-1][1]
        outside = sum(b - a for a, b in gaps(intervals) if b - a > max(busy, LONG_GAP_US))
        wall = last - first - outside
        if number + 1 < len(spans):
            period = spans[number + 1][0][0] - first - outside
            if wall <= period <= wall + max(wall / 2, busy, LONG_GAP_US):
                wall = period
        out.append(StepTime(wall, busy, outside))
    return out


def layers_per_step(trace: Trace, steps: Sequence[Step]) -> int | None:
    """Layers: the count per step that most kernel time agrees on; multiples count half, and two names must agree."""
    if not steps:
        return None
    scores: dict[int, float] = defaultdict(float)
    counts: Counter[int] = Counter()
    names: dict[int, float] = defaultdict(float)
    for index in (i for s in steps for i in s.kernels):
        if trace.kernels.kind[index] == KERNEL:
            counts[trace.kernels.name[index]] += 1
            names[trace.kernels.name[index]] += trace.kernels.dur[index]
    per_step = {n: round(c / len(steps)) for n, c in counts.items()}
    agree = Counter(per_step.values())
    for candidate, members in agree.items():
        if candidate < 4 or (members < 2 and len(agree) > 1 and max(agree.values()) > 1):
            continue
        for name, count in per_step.items():
            if count == candidate:
                scores[candidate] += names[name]
            elif count % candidate == 0 and count // candidate <= 8:
                scores[candidate] += names[name] / 2
    return max(scores, key=lambda n: scores[n]) if scores else None
