"""Sentences about what limits a diagnosis or speaks against its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from uncast.doctor.hosts import host_notes
from uncast.doctor.report import Finding
from uncast.doctor.rules import per_token
from uncast.doctor.scene import Scene
from uncast.doctor.steps import Steps


def finding_notes(scene: Scene, findings: Sequence[Finding]) -> list[str]:
    """Where a finding's numbers and what is known of the step do not agree."""
    notes = []
    for f in findings:
        if scene.step_us and f.us_per_step > 1.001 * scene.step_us:
            notes.append(
                f"the kernels of '{f.title}' add up to more than the step, {f.us_per_step / scene.step_us:.1f} times: they "
                "overlap on several streams, or the trace holds some of them twice"
            )
        tokens = per_token(tuple(f.shape or ()))[0] if f.kind in ("pool_cast", "pool_copy") else 0
        if tokens and scene.live_tokens is not None and scene.live_tokens > tokens:
            notes.append(
                f"{scene.live_tokens:,} live tokens ({scene.live_source}) do not fit into the pool's {tokens:,} rows: is the "
                "number right, or are prefixes shared? All rows were taken as needed"
            )
    return list(dict.fromkeys(notes))


def _not_joined(scene: Scene) -> str:
    tried, replayed = scene.join.tried, f"{scene.join.replayed:,} kernels ran inside graph replays"
    if tried:
        what = tried[0] if len(tried) == 1 else f"any of {len(tried)} captures"
        return f"{replayed} and do not fit {what}: is it the same server's, for this batch size?"
    lost = "neither shapes nor grids" if scene.amd else "no shapes or operators, only names and grids"
    return (
        f"{replayed}, of which a trace keeps {lost}: give the capture pass with --capture (vLLM: capture_torch_profiler; "
        "SGLang: SGLANG_GRAPH_BATCH_CAPTURE=1 and --enable-profile-cuda-graph), or profile without graphs"
    )


def scene_notes(scene: Scene, found: Steps) -> list[str]:
    """What the trace lacks."""
    notes = []
    join_ = scene.join
    if join_.replayed and not join_.matched:
        notes.append(_not_joined(scene))
    elif join_.matched < join_.replayed:
        notes.append(
            f"{join_.replayed - join_.matched:,} of {join_.replayed:,} replayed kernels met no launch of the capture: what is "
            "said by it is right only if it is the same server's, for this batch size"
        )
    if any("StreamBeginCapture" in name for name in scene.trace.names.values):
        notes.append("this is the capture pass of a graph: give it with --capture beside the trace of its replay")
    launched = sum(launch >= 0 for launch in scene.links.launch)
    if len(scene.trace.ops) and launched < 0.8 * len(scene.trace.kernels):
        missing = 1 - launched / len(scene.trace.kernels)
        notes.append(f"{missing:.0%} of the kernels have no launch in this trace: the findings may miss some")
    if found.steps and found.how.startswith(("none", "the period")):
        notes.append("no step is marked in this trace: boundaries are a guess")
    if any(t.outside for t in scene.times):
        notes.append("waits longer than a step's work were taken off the step's time")
    return notes + host_notes(scene)
