"""Idle time of the GPU that ends with work which the host had not launched in time, and what the host did meanwhile."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from uncast.doctor.intervals import Interval, overlap
from uncast.doctor.scene import Scene
from uncast.doctor.steps import LONG_GAP_US, Step, StepTime
from uncast.doctor.trace import Mark

SYNC = re.compile(r"^(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize$|^(cuda|hip)Memcpy(WithStream|DtoH|2D)?$")
MARK_SHARE, MAX_MARKS = 0.1, 3


@dataclass(frozen=True)
class Late:
    """`gaps` of one step, sorted and disjoint; `lanes`: the threads that launched what ended them."""

    gaps: list[Interval]
    lanes: set[int]

    @property
    def us(self) -> float:
        return sum(b - a for a, b in self.gaps)


def late_gaps(scene: Scene, explained: Collection[float]) -> list[Late]:
    """For each analysed step its gaps whose first kernel was launched by a call that had not returned when the GPU ran dry.

    Gaps are those of the whole GPU, up to the step's end as `StepTime` has it, without waits that it leaves out.

    Args:
        explained: times (microseconds); a gap that holds one has another finding.
    """
    kernels = scene.trace.kernels
    order = sorted(range(len(kernels)), key=kernels.ts.__getitem__)
    starts = [kernels.ts[k] for k in order]
    known = sorted(explained)
    return [
        _of_step(scene, step, time, order, starts, known)
        for step, time in zip(scene.analysed, scene.analysed_times, strict=True)
    ]


def _of_step(
    scene: Scene, step: Step, time: StepTime, order: Sequence[int], starts: Sequence[float], explained: Sequence[float]
) -> Late:
    kernels, launches = scene.trace.kernels, scene.trace.launches
    reach = kernels.ts[step.kernels[0]]
    end = reach + time.wall + time.outside
    late = Late([], set())
    for kernel in order[bisect_left(starts, reach) : bisect_right(starts, end) + 1]:
        gap, launch = (reach, min(kernels.ts[kernel], end)), scene.links.launch[kernel]
        reach = max(reach, kernels.end(kernel))
        if gap[1] <= gap[0] or gap[1] - gap[0] > max(LONG_GAP_US, time.busy):
            continue
        if launch < 0 or launches.end(launch) <= gap[0]:
            continue
        if bisect_left(explained, gap[0]) == bisect_right(explained, gap[1]):
            late.gaps.append(gap)
            late.lanes.add(launches.lane[launch])
    return late


def host_parts(scene: Scene, late: Late) -> list[tuple[str, float]]:
    """(where, microseconds) of what the threads did in the gaps; the parts add up to them."""
    launches, names, ops = scene.trace.launches, scene.trace.names, scene.trace.ops
    low, high = late.gaps[0][0], late.gaps[-1][1]
    calls: dict[str, list[Interval]] = defaultdict(list)
    for index, lane in enumerate(launches.lane):
        if lane in late.lanes and launches.ts[index] < high and launches.end(index) > low:
            name = names[launches.name[index]]
            where = f"in {name}" if "GraphLaunch" in name or SYNC.match(name) else "in other calls"
            calls[where].append((launches.ts[index], launches.end(index)))
    named = sorted(where for where in calls if where != "in other calls")
    parts = [(where, calls[where]) for where in (*named, "in other calls")]
    parts.append(("in operators", [(ops.ts[i], ops.end(i)) for i, lane in enumerate(ops.lane) if lane in late.lanes]))
    seen: list[Interval] = []
    out, counted = [], 0.0
    for where, spans in parts:
        seen += [s for s in spans if s[0] < high and s[1] > low]
        total = overlap(late.gaps, seen)
        out.append((where, total - counted))
        counted = total
    return [*out, ("between them (Python)", late.us - counted)]


def marked_parts(scene: Scene, late: Late) -> list[tuple[str, float]]:
    """(annotation, microseconds) of the gaps by the innermost annotation of the threads, the largest that matter."""
    low, high = late.gaps[0][0], late.gaps[-1][1]
    marks = [m for m in scene.trace.marks if m.ts < high and m.end > low]
    spans: dict[str, list[Interval]] = defaultdict(list)
    for lane in late.lanes:
        for name, span in _innermost(sorted((m for m in marks if m.lane == lane), key=lambda m: (m.ts, -m.dur))):
            spans[name].append(span)
    parts = [(name, overlap(late.gaps, own)) for name, own in spans.items()]
    return sorted((p for p in parts if p[1] >= MARK_SHARE * late.us), key=lambda p: -p[1])[:MAX_MARKS]


def _innermost(marks: Sequence[Mark]) -> list[tuple[str, Interval]]:
    """The stretches of each mark that no mark within it covers. `marks` are sorted by start, the longer first."""
    out: list[tuple[str, Interval]] = []
    stack: list[Mark] = []
    at = float("-inf")
    for mark in [*marks, None]:
        until = mark.ts if mark is not None else float("inf")
        while stack and stack[-1].end <= until:
            top = stack.pop()
            out.append((top.name, (at, max(at, top.end))))
            at = max(at, top.end)
        if stack:
            out.append((stack[-1].name, (at, max(at, until))))
        at = max(at, until)
        if mark is not None:
            stack.append(mark)
    return out
