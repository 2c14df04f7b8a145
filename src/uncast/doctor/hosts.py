"""What the CPU does to a step: synchronisations within it, launches one by one, and work launched too late."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median

from uncast.doctor.advice import TITLES, advice_for, links_for
from uncast.doctor.intervals import gaps
from uncast.doctor.late import SYNC, Late, host_parts, late_gaps, marked_parts
from uncast.doctor.link import deepest, enclosing
from uncast.doctor.report import Finding, Range
from uncast.doctor.rules import relation
from uncast.doctor.scene import Scene
from uncast.doctor.steps import LONG_GAP_US
from uncast.doctor.trace import Trace
from uncast.doctor.words import count, percent, time

HOST_KINDS = ("host_sync", "launch_bound", "host_bound")
"""Findings about waits; the others are about movements."""
_SYNC_IDLE_SHARE = 0.02
_IDLE_SHARE = 0.2
_GRAPH_US_A_KERNEL = 1.0


def judge_host(scene: Scene) -> list[Finding]:
    """Findings `host_sync`, and `launch_bound` or `host_bound`, at most one of each."""
    calls, idle = _waits(scene)
    sync = _host_sync(scene, calls, idle) if calls else None
    bound = None if has_stacks(scene) else _bound(scene, calls, idle)
    return [f for f in (sync, bound) if f is not None]


def has_stacks(scene: Scene) -> bool:
    """Whether Python frames were recorded, which slows the CPU side so much that its times say nothing."""
    return len(scene.trace.frames) > 0


def host_notes(scene: Scene) -> list[str]:
    """What cannot be judged because stacks were recorded."""
    bound = _bound(scene, (), 0.0) if has_stacks(scene) else None
    if bound is None:
        return []
    return [f"{bound.evidence}; stacks slow the CPU: profile once without them to see whether launches bind the step"]


def cpu_issue_us(scene: Scene) -> float:
    """Microseconds of CPU time to issue a step: from its first launch to its last, without waits. A graph's launch counts in
    full, another call of more than 20 times the usual is a wait."""
    totals = []
    launches, links, names = scene.trace.launches, scene.links, scene.trace.names
    for step in scene.analysed:
        mine = sorted({links.launch[k] for k in step.kernels if links.launch[k] >= 0}, key=lambda i: launches.ts[i])
        if not mine:
            totals.append(0.0)
            continue
        typical = median(launches.dur[i] for i in mine)
        single = [i for i in mine if "GraphLaunch" not in names[launches.name[i]]]
        blocked = sum(max(0.0, launches.dur[i] - 20 * typical) for i in single)
        start, end = launches.ts[mine[0]], launches.end(mine[-1])
        waits = sum(launches.dur[i] for i in _syncs(scene, start, end))
        totals.append(max(0.0, end - start - blocked - waits))
    return median(totals) if totals else 0.0


def _syncs(scene: Scene, start: float, end: float) -> list[int]:
    """Synchronising calls that begin in an interval."""
    order = scene.sync_calls
    times = [scene.trace.launches.ts[i] for i in order]
    return order[bisect_left(times, start) : bisect_right(times, end)]


def find_syncs(trace: Trace) -> list[int]:
    """All synchronising calls of a trace, by start."""
    launches, names = trace.launches, trace.names
    wanted = {n for n, name in enumerate(names.values) if SYNC.match(name)}
    return sorted((i for i, name in enumerate(launches.name) if name in wanted), key=lambda i: launches.ts[i])


def _waits(scene: Scene) -> tuple[list[int], float]:
    """Waits after which the GPU had nothing to do, and for how many microseconds a step; none where that is too short to
    matter. The one at a step's end, for its token, is left out."""
    launches, kernels = scene.trace.launches, scene.trace.kernels
    calls: list[int] = []
    idle = 0.0
    for step in scene.analysed:
        issued = [launches.ts[scene.links.launch[k]] for k in step.kernels if scene.links.launch[k] >= 0]
        if not issued:
            continue
        holes = gaps((kernels.ts[k], kernels.end(k)) for k in step.kernels)
        for call in _syncs(scene, min(issued), max(issued)):
            end = launches.end(call)
            hole = next((b - max(a, launches.ts[call]) for a, b in holes if a <= end <= b), 0.0)
            if 0 < hole <= max(LONG_GAP_US, scene.busy_us):
                idle += hole
                calls.append(call)
    idle /= len(scene.analysed)
    matter = scene.step_us > 0 and idle / scene.step_us >= _SYNC_IDLE_SHARE
    return (calls, idle) if matter else ([], 0.0)


def _host_sync(scene: Scene, calls: list[int], idle: float) -> Finding:
    launches, names = scene.trace.launches, scene.trace.names
    chains = enclosing(scene.trace.frames, [(launches.lane[i], launches.ts[i]) for i in calls])
    places = [deepest(names[scene.trace.frames.name[f]] for f in chain) for chain in chains]
    source = next((p for p in places if p is not None), None)
    each = len(calls) / len(scene.analysed)
    kinds = sorted({names[launches.name[i]] for i in calls})
    return Finding(
        kind="host_sync", title=TITLES["host_sync"], calls_per_step=each, layers_relation=relation(each, scene.layers),
        evidence=f"{count(each)} waits a step ({', '.join(kinds)}); the GPU idles {time(idle)} of {time(scene.step_us)} after "
        f"them ({percent(idle / scene.step_us)})",
        us_per_step=idle, exposed_us_per_step=idle, share_of_step=idle / scene.step_us, source=str(source) if source else None,
        confidence="measured", predicted_step_us=Range(scene.step_us - idle, scene.step_us),
        advice=advice_for("host_sync"), links=links_for("host_sync"),
    )  # fmt: skip


def _bound(scene: Scene, waits: Sequence[int], idle: float) -> Finding | None:
    """`launch_bound` or `host_bound`: a GPU that idles a fifth of the step, without the `idle` microseconds after `waits`."""
    rest = max(0.0, median(t.idle for t in scene.times) - idle)
    if scene.step_us <= 0 or rest < _IDLE_SHARE * scene.step_us:
        return None
    each = median(len(s.kernels) for s in scene.steps)
    in_graph = sum(scene.in_graph(k) for s in scene.analysed for k in s.kernels) / len(scene.analysed)
    if in_graph > each / 2:
        return _host_bound(scene, each, in_graph, waits)
    return _launch_bound(scene, rest, each, each - in_graph)


def _launch_bound(scene: Scene, idle: float, each: float, eager: float) -> Finding | None:
    """The CPU issues kernels one by one."""
    if eager < 32:
        return None
    share = idle / scene.step_us
    low = min(scene.step_us, scene.busy_us + _GRAPH_US_A_KERNEL * each)
    return Finding(
        kind="launch_bound", title=TITLES["launch_bound"], calls_per_step=eager, layers_relation="",
        evidence=f"{count(eager)} kernels a step launched one by one; the GPU idles {time(idle)} of {time(scene.step_us)} "
        f"({percent(share)})",
        us_per_step=idle, exposed_us_per_step=idle, share_of_step=share, source=None,
        confidence="measured", predicted_step_us=Range(low, scene.step_us),
        advice=advice_for("launch_bound"), links=links_for("launch_bound"),
    )  # fmt: skip


def _host_bound(scene: Scene, each: float, in_graph: float, waits: Sequence[int]) -> Finding | None:
    """Graph replays, and a GPU that idles a fifth of the step for work that the host had not launched when it ran dry. The
    numbers are of one analysed step, the median by that time."""
    launches = scene.trace.launches
    steps = late_gaps(scene, [launches.end(i) for i in waits])
    late = sorted(steps, key=lambda one: one.us)[(len(steps) - 1) // 2]
    share = late.us / scene.step_us
    if share < _IDLE_SHARE:
        return None
    return Finding(
        kind="host_bound", title=TITLES["host_bound"], calls_per_step=len(late.gaps), layers_relation="",
        evidence=f"{count(in_graph)} of {count(each)} kernels a step are graph replays; the GPU idles {time(late.us)} of "
        f"{time(scene.step_us)} ({percent(share)}) for work that was not launched yet. {_meanwhile(scene, late)}",
        us_per_step=late.us, exposed_us_per_step=late.us, share_of_step=share, source=None, confidence="measured",
        predicted_step_us=Range(max(min(scene.busy_us, scene.step_us), scene.step_us - late.us), scene.step_us),
        advice=advice_for("host_bound"), links=links_for("host_bound"),
    )  # fmt: skip


def _meanwhile(scene: Scene, late: Late) -> str:
    parts = ", ".join(f"{time(us)} {where}" for where, us in host_parts(scene, late) if us >= 0.05)
    marked = ", ".join(f"{name} {time(us)}" for name, us in marked_parts(scene, late))
    return f"The host meanwhile: {parts}" + (f"; by its annotations: {marked}" if marked else "")
