"""What the CPU does to a step: synchronisations within it, and launches that the GPU waits for."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from statistics import median

from uncast.doctor.advice import TITLES, advice_for, links_for
from uncast.doctor.intervals import gaps
from uncast.doctor.link import deepest, enclosing
from uncast.doctor.report import Finding, Range
from uncast.doctor.rules import relation
from uncast.doctor.scene import Scene
from uncast.doctor.trace import Trace
from uncast.doctor.words import count, percent, time

_SYNC = re.compile(r"^(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize$|^(cuda|hip)Memcpy(WithStream|DtoH|2D)?$")
_SYNC_IDLE_SHARE = 0.02
_IDLE_SHARE = 0.2
_GRAPH_US_A_KERNEL = 1.0
LONG_GAP_US = 1000.0


def judge_host(scene: Scene) -> list[Finding]:
    """Findings `host_sync` and `launch_bound`, at most one of each."""
    sync = _host_sync(scene)
    bound = _launch_bound(scene, sync.us_per_step if sync else 0.0) if not has_stacks(scene) else None
    return [f for f in (sync, bound) if f is not None]


def has_stacks(scene: Scene) -> bool:
    """Whether Python frames were recorded, which slows the CPU side so much that its times say nothing."""
    return len(scene.trace.frames) > 0


def host_notes(scene: Scene) -> list[str]:
    """What cannot be judged because stacks were recorded."""
    bound = _launch_bound(scene, 0.0) if has_stacks(scene) else None
    if bound is None:
        return []
    return [f"{bound.evidence}; stacks slow the CPU: profile once without them to see whether launches bind the step"]


def cpu_issue_us(scene: Scene) -> float:
    """Microseconds of CPU time to issue a step: from its first launch to its last, without waits; 0 where most is one graph."""
    totals = []
    launches, links = scene.trace.launches, scene.links
    for step in scene.analysed:
        mine = sorted({links.launch[k] for k in step.kernels if links.launch[k] >= 0}, key=lambda i: launches.ts[i])
        if not mine or sum(scene.in_graph(k) for k in step.kernels) > len(step.kernels) / 2:
            totals.append(0.0)
            continue
        typical = median(launches.dur[i] for i in mine)
        blocked = sum(max(0.0, launches.dur[i] - 20 * typical) for i in mine)
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
    wanted = {n for n, name in enumerate(names.values) if _SYNC.match(name)}
    return sorted((i for i, name in enumerate(launches.name) if name in wanted), key=lambda i: launches.ts[i])


def _host_sync(scene: Scene) -> Finding | None:
    """Waits after which the GPU had nothing to do. The one at a step's end, for its token, is left out."""
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
    steps = len(scene.analysed)
    share = idle / steps / scene.step_us if scene.step_us else 0.0
    if not calls or share < _SYNC_IDLE_SHARE:
        return None
    return _sync_finding(scene, calls, idle / steps, share)


def _sync_finding(scene: Scene, calls: list[int], idle: float, share: float) -> Finding:
    launches, names = scene.trace.launches, scene.trace.names
    chains = enclosing(scene.trace.frames, [(launches.lane[i], launches.ts[i]) for i in calls])
    places = [deepest(names[scene.trace.frames.name[f]] for f in chain) for chain in chains]
    source = next((p for p in places if p is not None), None)
    each = len(calls) / len(scene.analysed)
    kinds = sorted({names[launches.name[i]] for i in calls})
    return Finding(
        kind="host_sync", title=TITLES["host_sync"], calls_per_step=each, layers_relation=relation(each, scene.layers),
        evidence=f"{count(each)} waits a step ({', '.join(kinds)}); the GPU idles {time(idle)} of {time(scene.step_us)} after "
        f"them ({percent(share)})",
        us_per_step=idle, exposed_us_per_step=idle, share_of_step=share, source=str(source) if source else None,
        confidence="measured", predicted_step_us=Range(scene.step_us - idle, scene.step_us),
        advice=advice_for("host_sync"), links=links_for("host_sync"),
    )  # fmt: skip


def _launch_bound(scene: Scene, explained: float) -> Finding | None:
    """A GPU that idles a fifth of the step, beyond waits `explained` otherwise, while the CPU issues kernels one by one."""
    idle = max(0.0, median(t.idle for t in scene.times) - explained)
    share = idle / scene.step_us if scene.step_us else 0.0
    each = median(len(s.kernels) for s in scene.steps)
    in_graph = sum(scene.in_graph(k) for s in scene.analysed for k in s.kernels)
    eager = each - in_graph / len(scene.analysed)
    if share < _IDLE_SHARE or eager < 32 or eager < each / 2:
        return None
    low = min(scene.step_us, scene.busy_us + _GRAPH_US_A_KERNEL * each)
    return Finding(
        kind="launch_bound", title=TITLES["launch_bound"], calls_per_step=eager, layers_relation="",
        evidence=f"{count(eager)} kernels a step launched one by one; the GPU idles {time(idle)} of {time(scene.step_us)} "
        f"({percent(share)})",
        us_per_step=idle, exposed_us_per_step=idle, share_of_step=share, source=None,
        confidence="measured", predicted_step_us=Range(low, scene.step_us),
        advice=advice_for("launch_bound"), links=links_for("launch_bound"),
    )  # fmt: skip
