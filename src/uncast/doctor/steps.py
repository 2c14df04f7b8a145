"""Finds the steps of a trace, first by what servers write, last by what repeats.

The ladder: server labels (vLLM, SGLang), ProfilerStep (split where a model's forward frames show several), graph launches,
optimiser steps, Python frames of a server's loop, whole forwards, the period of the kernel sequence, else one step. A kernel
belongs to the step in which it was *launched*: it may run later.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from uncast.doctor.intervals import covered, gaps, merged
from uncast.doctor.labels import Label, parse_label
from uncast.doctor.link import Links
from uncast.doctor.trace import KERNEL, Mark, Trace

_LOOP = re.compile(r": (run_batch|execute_model|_execute_model|forward_batch_generation|step_fn)$")
_FORWARD = re.compile(r"^nn\.Module: \w*(For\w+|LMHead\w*|Model|Transformer)_0$")
_GRAPH_LAUNCH = re.compile(r"^(cuda|hip|cu)GraphLaunch")
MIN_SHARE = 0.8
MAX_SEQUENCE = 4096


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
    once), `busy` as a union, `idle` gaps within, `outside` waits longer than all its work, taken off `wall`."""

    wall: float
    busy: float
    outside: float

    @property
    def idle(self) -> float:
        return max(0.0, self.wall - self.busy)


def find_steps(trace: Trace, links: Links) -> Steps:
    """The steps of a trace with their kernels; first and last are dropped where the trace cuts them."""
    for how, windows in _ladder(trace, links):
        result = _assign(trace, links, how, windows)
        if result.steps:
            return _drop_cut(result)
    whole = Step("the whole trace", float("-inf"), float("inf"))
    whole.kernels = sorted(range(len(trace.kernels)), key=lambda i: trace.kernels.ts[i])
    return Steps("none found: the whole trace is one step", [whole] if whole.kernels else [])


def _ladder(trace: Trace, links: Links) -> Iterator[tuple[str, list[Window]]]:
    labelled = _labelled(trace)
    for family in ("vllm", "sglang"):
        yield f"labels of {'vLLM' if family == 'vllm' else 'SGLang'}", labelled.get(family, [])
    yield "ProfilerStep", _split(labelled.get("profiler", []), _frames(trace, _FORWARD))
    yield "graph launches", _graph_windows(trace, links)
    yield "Optimizer.step", _between([m for m, _ in labelled.get("optimizer", [])], phase="training")
    yield "Python frames of the server's loop", _frames(trace, _LOOP)
    yield "forwards of the model", _frames(trace, _FORWARD)
    yield "the period of the kernel sequence", _periodic(trace)


Window = tuple[Mark, Label]


def _labelled(trace: Trace) -> dict[str, list[Window]]:
    """Step marks by family, of the thread that has most of them, without nested repeats."""
    lanes: dict[str, dict[int, list[Window]]] = defaultdict(lambda: defaultdict(list))
    for mark in trace.marks:
        label = parse_label(mark.name)
        if label is not None:
            lanes[label.family][mark.lane].append((mark, label))
    out = {}
    for family, by_lane in lanes.items():
        most = max(by_lane, key=lambda lane: len(by_lane[lane]))
        windows = sorted(by_lane[most], key=lambda w: (w[0].ts, -w[0].dur))
        out[family] = [w for n, w in enumerate(windows) if n == 0 or w[0].ts >= windows[n - 1][0].end]
    _borrow(out)
    return out


def _borrow(families: dict[str, list[Window]]) -> None:
    """Where labels of two families overlap, one may know tokens that the other does not."""
    for family, others in (("vllm", ("sglang",)), ("profiler", ("vllm", "sglang"))):
        windows = families.get(family, [])
        inner = next((families[o] for o in others if families.get(o)), [])
        starts = [mark.ts for mark, _ in inner]
        for number, (mark, label) in enumerate(windows):
            place = bisect_left(starts, mark.ts)
            if place < len(inner) and inner[place][0].ts < mark.end:
                windows[number] = (mark, _filled(label, inner[place][1]))


def _filled(label: Label, other: Label) -> Label:
    return Label(
        label.family,
        other.phase if label.phase == "unknown" else label.phase,
        label.batch if label.batch is not None else other.batch,
        label.live_tokens if label.live_tokens is not None else other.live_tokens,
        label.new_tokens if label.new_tokens is not None else other.new_tokens,
    )


def _frames(trace: Trace, pattern: re.Pattern[str]) -> list[Window]:
    """Outermost Python frames whose name matches, on the thread that has most."""
    wanted = {n for n, name in enumerate(trace.names.values) if pattern.search(name)}
    if not wanted:
        return []
    by_lane: dict[int, list[Mark]] = defaultdict(list)
    frames = trace.frames
    for index, name in enumerate(frames.name):
        if name in wanted:
            mark = Mark(trace.names[name], frames.ts[index], frames.dur[index], frames.lane[index])
            by_lane[mark.lane].append(mark)
    most = max(by_lane, key=lambda lane: len(by_lane[lane]))
    marks = sorted(by_lane[most], key=lambda m: (m.ts, -m.dur))
    out: list[Mark] = []
    for mark in marks:
        if not out or mark.ts >= out[-1].end:
            out.append(mark)
    return [(m, Label("frames")) for m in out]


def _split(steps: list[Window], forwards: list[Window]) -> list[Window]:
    """Profiler steps, or the forwards inside them where any holds several."""
    starts = [mark.ts for mark, _ in steps]
    place = [bisect_right(starts, f.ts) - 1 for f, _ in forwards]
    inside = [w for w, p in zip(forwards, place, strict=True) if p >= 0 and w[0].ts < steps[p][0].end]
    several = Counter(p for w, p in zip(forwards, place, strict=True) if p >= 0 and w[0].ts < steps[p][0].end)
    return inside if several and max(several.values()) > 1 else steps


def _between(marks: Sequence[Mark], phase: str) -> list[Window]:
    """Windows that end where a mark ends."""
    return [(Mark(b.name, a.end, b.end - a.end, b.lane), Label("optimizer", phase)) for a, b in pairwise(marks)]


def _graph_windows(trace: Trace, links: Links) -> list[Window]:
    """One window a step, from its first graph launch to the next step's: a full graph is one launch, a piecewise one many."""
    names = {n for n, name in enumerate(trace.names.values) if _GRAPH_LAUNCH.match(name)}
    launches = [i for i, name in enumerate(trace.launches.name) if name in names]
    if not launches:
        return []
    sizes = Counter(launch for launch in links.launch if launch >= 0)
    launches = sorted((i for i in launches if sizes[i]), key=lambda i: trace.launches.ts[i])
    counts = [sizes[i] for i in launches]
    period = sequence_period(counts)
    if not launches or (period is None and len(launches) > 1):
        return []
    starts = [trace.launches.ts[i] for i in launches[:: period or 1]]
    whole = len(launches) // (period or 1)
    starts, ends = starts[:whole], [*starts[1:], float("inf")][:whole]
    lane = trace.launches.lane[launches[0]]
    return [
        (Mark(f"graph launch {n}", a, b - a, lane), Label("graph"))
        for n, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]


def sequence_period(values: Sequence[int]) -> int | None:
    """The smallest p >= 1 with values[i] == values[i + p] for 95 % of all i, seen at least twice; None without one."""
    values = values[:MAX_SEQUENCE]
    n = len(values)
    for p in range(1, n // 2 + 1):
        allowed = 0.05 * (n - p)
        for a, b in zip(values, values[p:], strict=False):
            allowed -= a != b
            if allowed < 0:
                break
        else:
            return p
    return None


def _periodic(trace: Trace) -> list[Window]:
    """Steps between kernels that occur once a step: the rarest evenly spaced name on the busiest stream."""
    kernels = trace.kernels
    busy: Counter[int] = Counter()
    for index, lane in enumerate(kernels.lane):
        busy[lane] += kernels.dur[index]  # type: ignore[assignment]
    if not busy:
        return []
    lane = busy.most_common(1)[0][0]
    order = sorted(
        (i for i, w in enumerate(kernels.lane) if w == lane and kernels.kind[i] == KERNEL), key=kernels.ts.__getitem__
    )
    places: dict[int, list[int]] = defaultdict(list)
    for position, index in enumerate(order):
        places[kernels.name[index]].append(position)
    for name, at in sorted(places.items(), key=lambda item: (len(item[1]), item[1][0])):
        steps = [b - a for a, b in pairwise(at)]
        if len(at) < 3 or min(steps) < 8 or max(steps) > 1.1 * min(steps):
            continue
        if at[-1] - at[0] < len(order) / 2:
            continue
        starts = [kernels.ts[order[p]] for p in at]
        return [
            (Mark(f"period {n} from {trace.names[name][:40]}", a, b - a, -1), Label("period"))
            for n, (a, b) in enumerate(pairwise(starts))
        ]
    return []


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
        outside = sum(b - a for a, b in gaps(intervals) if b - a > max(busy, 1000.0))
        wall = last - first - outside
        if number + 1 < len(spans):
            period = spans[number + 1][0][0] - first - outside
            if wall <= period <= 1.5 * wall:
                wall = period
        out.append(StepTime(wall, busy, outside))
    return out


def layers_per_step(trace: Trace, steps: Sequence[Step]) -> int | None:
    """Layers: the count per step that most kernel time agrees on; multiples count half, and two names must agree."""
    if not steps:
        return None
    scores: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    names: Counter[int] = Counter()
    for index in (i for s in steps for i in s.kernels):
        if trace.kernels.kind[index] == KERNEL:
            counts[trace.kernels.name[index]] += 1
            names[trace.kernels.name[index]] += trace.kernels.dur[index]  # type: ignore[assignment]
    per_step = {n: round(c / len(steps)) for n, c in counts.items()}
    agree = Counter(per_step.values())
    for candidate, members in agree.items():
        if candidate < 4 or (members < 2 and len(agree) > 1 and max(agree.values()) > 1):
            continue
        for name, count in per_step.items():
            if count == candidate:
                scores[candidate] += names[name]
            elif count % candidate == 0 and count // candidate <= 8:
                scores[candidate] += names[name] / 2  # type: ignore[assignment]
    return scores.most_common(1)[0][0] if scores else None
