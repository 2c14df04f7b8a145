"""From a file to a report: reads, links, finds steps, joins graphs, judges one phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from uncast.doctor.attention import attention_lines
from uncast.doctor.costs import MIN_KERNEL_US
from uncast.doctor.errors import TraceError
from uncast.doctor.graphs import Join, capture_files, find_captures, graph_replays, join
from uncast.doctor.hosts import HOST_KINDS, cpu_issue_us, find_syncs, has_stacks, judge_host
from uncast.doctor.link import Links, link
from uncast.doctor.names import parse_name
from uncast.doctor.notes import finding_notes, scene_notes
from uncast.doctor.phases import choose_phase, infer_phases
from uncast.doctor.reader import read_trace
from uncast.doctor.report import Budget, Finding, GraphJoin, Movement, PhaseTimes, Range, Report
from uncast.doctor.rules import calls_per_step, judge_moves
from uncast.doctor.scene import Group, Scene, build_groups
from uncast.doctor.source import Progress
from uncast.doctor.steps import Step, Steps, StepTime, find_steps, layers_per_step, step_times
from uncast.doctor.trace import Trace
from uncast.doctor.words import time

MAX_MOVEMENTS = 40
PARTS = {
    "gemm": "matmuls", "attention": "attention", "attention_tail": "attention", "collective": "collectives",
    "copy": "copies and casts", "triton_move": "copies and casts", "triton_pad": "copies and casts", "cat": "copies and casts",
    "index": "copies and casts", "memcpy_DtoD": "copies and casts", "memcpy_PtoP": "copies and casts",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """`live_tokens`: cache rows in use, with where the number comes from; `capture`: a file or folder, None to look beside the
    trace; `phase`: what to judge, None for decode where there is one; `peak_gb_per_s`: of the GPU's memory, None to look up."""

    live_tokens: int | None = None
    live_source: str = "--live-tokens"
    capture: Path | None = None
    phase: str | None = None
    peak_gb_per_s: float | None = None


@dataclass
class Diagnosis:
    """A report, and what only the HTML page needs."""

    report: Report
    scene: Scene


def diagnose(path: Path, options: Options | None = None, progress: Progress | None = None) -> Diagnosis:
    """Diagnoses one rank's trace.

    Raises:
        TraceError: nothing can be told; one sentence.
    """
    options = options or Options()
    trace = read_trace(path, progress)
    if not len(trace.kernels):
        what = f"{len(trace.ops):,} CPU operators" if len(trace.ops) else f"{trace.events:,} events"
        advice = "record with ProfilerActivity.CUDA, or the server's GPU activity"
        broken = trace.damage
        advice = f"it is not whole ({broken}); copy it again, or {advice}" if broken else advice
        raise TraceError(f"{path} holds no GPU kernels ({what}): {advice}")
    links = link(trace)
    found = find_steps(trace, links)
    if not found.steps:
        broken = trace.damage
        lost = f": it is not whole ({broken})" if broken else ""
        raise TraceError(f"{path} holds GPU kernels but no step could be found in it{lost}")
    times = step_times(trace, found.steps)
    infer_phases(trace, links, found.steps)
    judged = choose_phase(found.steps, times, options.phase, path)
    members = [n for n, s in enumerate(found.steps) if s.phase == judged]
    steps = [found.steps[n] for n in members]
    batch = next((s.batch for s in steps if s.batch is not None), None)
    joined = _join(path, trace, links, options, batch, progress)
    live, live_source = _live(steps, options)
    scene = Scene(
        trace, links, joined, judged, steps, [times[n] for n in members], layers_per_step(trace, steps),
        live, live_source, _median([s.new_tokens for s in steps]), sync_calls=find_syncs(trace),
    )  # fmt: skip
    build_groups(scene)
    return _report(scene, found, times, options)


def _median(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return round(median(known)) if known else None


def _live(steps: Sequence[Step], options: Options) -> tuple[int | None, str]:
    if options.live_tokens is not None:
        return options.live_tokens, options.live_source
    labelled = _median([s.live_tokens for s in steps])
    return labelled, "from the step labels" if labelled is not None else "unknown"


def _join(
    path: Path, trace: Trace, links: Links, options: Options, batch: int | None, progress: Progress | None
) -> Join:
    if options.capture is None:
        try:
            return join(trace, links, find_captures(path, batch), progress)
        except TraceError as error:
            trace.notes.append(str(error))
            return join(trace, links, [])
    if not graph_replays(trace, links):
        raise TraceError(f"{path} holds no graph replays: there is nothing to join with {options.capture}")
    if options.capture.is_dir():
        files = capture_files(options.capture, batch)
        if not files:
            raise TraceError(f"{options.capture} holds no traces: a capture folder has .json or .json.gz files")
        return join(trace, links, files, progress)
    return join(trace, links, [options.capture], progress)


def _report(scene: Scene, found: Steps, times: Sequence[StepTime], options: Options) -> Diagnosis:
    trace = scene.trace
    peak = options.peak_gb_per_s or scene.peak
    findings = sorted([*judge_moves(scene), *judge_host(scene)], key=lambda f: -f.us_per_step)
    bound = _bound_by_launches(scene, findings)
    linked = sum(launch >= 0 for launch in scene.links.launch)
    report = Report(
        trace=trace.path, rank=trace.rank, gpu=trace.gpu_name, peak_gb_per_s=peak,
        steps=len(scene.steps), steps_found_by=found.how, steps_dropped=found.dropped, judged=scene.phase,
        step_us=scene.step_us, gpu_busy_us=scene.busy_us, layers=scene.layers,
        live_tokens=scene.live_tokens, live_tokens_source=scene.live_source,
        phases=_phases(found.steps, times), budget=_budget(scene), findings=findings,
        predicted_step_us=_together(scene, findings), attention=attention_lines(scene, peak),
        movements=[_movement(scene, g) for g in scene.groups[:MAX_MOVEMENTS]],
        graphs=_graph_join(scene.join), kernels=len(trace.kernels), kernels_linked_share=linked / len(trace.kernels),
        skipped=dict(trace.skipped), notes=[*trace.notes, *scene_notes(scene, found), *finding_notes(scene, findings), *bound],
    )  # fmt: skip
    return Diagnosis(report, scene)


def _bound_by_launches(scene: Scene, findings: list[Finding]) -> list[str]:
    """Without a finding's work the CPU's launches may be what remains: the range's upper end. Not with stacks: they slow it.
    Returns the note that says so."""
    if has_stacks(scene):
        return []
    issue = min(scene.step_us, cpu_issue_us(scene))
    bound = [f for f in findings if f.kind not in HOST_KINDS and issue > f.predicted_step_us.high]
    for finding in bound:
        finding.predicted_step_us = Range(finding.predicted_step_us.low, issue)
    what = f"an upper end of {time(issue)} is the host's time to launch a step in this trace"
    return [f"{what}: under a profiler it is slower than without one"] if bound else []


def _together(scene: Scene, findings: Sequence[Finding]) -> Range | None:
    """All findings about movements mended at once."""
    moves = [f for f in findings if f.kind not in HOST_KINDS]
    if not moves:
        return None
    low = max(MIN_KERNEL_US, scene.step_us - sum(f.exposed_us_per_step for f in moves))
    return Range(low, max(low, scene.step_us - sum(scene.step_us - f.predicted_step_us.high for f in moves)))


def _phases(steps: Sequence[Step], times: Sequence[StepTime]) -> list[PhaseTimes]:
    by_phase: dict[str, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        by_phase[step.phase].append(number)
    return [
        PhaseTimes(
            phase=phase, steps=len(members), step_us=median(times[n].wall for n in members),
            gpu_busy_us=median(times[n].busy for n in members), gpu_idle_us=median(times[n].idle for n in members),
            kernels_per_step=median(len(steps[n].kernels) for n in members),
        )
        for phase, members in by_phase.items()
    ]  # fmt: skip


def _budget(scene: Scene) -> list[Budget]:
    """Kernel time by kind, and idle time. Kernels that overlap count in full, so the parts may exceed the step."""
    totals: dict[str, float] = defaultdict(float)
    for step in scene.analysed:
        for kernel in step.kernels:
            totals[PARTS.get(parse_name(scene.name(kernel)).kind, "other kernels")] += scene.trace.kernels.dur[kernel]
    parts = {part: us / len(scene.analysed) for part, us in totals.items()}
    parts["GPU idle"] = median(t.idle for t in scene.times)
    order = sorted(parts.items(), key=lambda item: -item[1])
    return [
        Budget(part=p, us_per_step=us, share_of_step=us / scene.step_us if scene.step_us else 0.0) for p, us in order
    ]


def _movement(scene: Scene, group: Group) -> Movement:
    us, calls = scene.us_per_step(group.kernels), calls_per_step(scene, [group])
    m = group.move
    return Movement(
        kind=m.kind, calls_per_step=calls, dtype_from=m.dtype_from, dtype_to=m.dtype_to, shape=list(m.shape) or None,
        bytes_per_call=m.bytes_moved, us_per_step=us, share_of_step=us / scene.step_us if scene.step_us else 0.0,
        gb_per_s=m.bytes_moved * calls / us / 1e3 if m.bytes_moved and us else None,
        source=str(group.source) if group.source else None, confidence=group.confidence, kernel=group.kernel_name[:200],
    )  # fmt: skip


def _graph_join(found: Join) -> GraphJoin | None:
    if not found.replayed:
        return None
    capture = found.capture.trace.path if found.capture else None
    return GraphJoin(replayed=found.replayed, joined=found.matched, capture=capture)
