"""Phases of steps that no label names, and the phase that is judged."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from uncast.doctor.errors import TraceError
from uncast.doctor.link import Links
from uncast.doctor.names import parse_name
from uncast.doctor.steps import Step, StepTime
from uncast.doctor.trace import Trace

PHASES = ("decode", "verify", "draft", "mixed", "prefill", "training", "unknown")
DECODE_ROWS, PREFILL_ROWS = 256, 512
_TRAINS = re.compile(r"^(Optimizer\.step#|autograd::engine::evaluate_function|torch::autograd::AccumulateGrad)")
"""What only a training step leaves behind: the optimiser's annotation and the backward pass's operators."""


def infer_phases(trace: Trace, links: Links, steps: Sequence[Step]) -> None:
    """Sets the phase of steps whose label does not tell, in the order of time.

    A step with a backward pass or an optimiser's step trains. Of the others those with few rows in the GEMMs are decode
    steps, those with many prefills; graph replays are decode steps.
    """
    times = _training_times(trace)
    ends = [b.start for _, b in pairwise(steps)] + [float("inf")]
    for step, end in zip(steps, ends, strict=True):
        if step.phase != "unknown":
            continue
        place = bisect_left(times, step.start)
        if place < len(times) and times[place] < end:
            step.phase = "training"
        else:
            _infer_phase(trace, links, step)


def _training_times(trace: Trace) -> list[float]:
    names = {n for n, name in enumerate(trace.names.values) if _TRAINS.match(name)}
    ops = [trace.ops.ts[i] for i, name in enumerate(trace.ops.name) if name in names] if names else []
    return sorted([*ops, *(m.ts for m in trace.marks if _TRAINS.match(m.name))])


def _infer_phase(trace: Trace, links: Links, step: Step) -> None:
    rows = []
    in_graph = 0
    for kernel in step.kernels:
        launch = links.launch[kernel]
        if launch < 0:
            continue
        in_graph += "GraphLaunch" in trace.names[trace.launches.name[launch]]
        op = links.op[launch]
        if op < 0 or parse_name(trace.names[trace.kernels.name[kernel]]).kind != "gemm":
            continue
        name = trace.names[trace.ops.name[op]]
        shapes = [d for d in trace.signature(trace.ops.sig[op]).dims if isinstance(d, list) and len(d) == 2]
        if (
            name in ("aten::mm", "aten::addmm", "aten::linear")
            and shapes
            and all(isinstance(x, int) for x in shapes[0])
        ):
            rows.append(int(shapes[0][0]))
    if in_graph > len(step.kernels) / 2:
        step.phase = "decode"
    elif rows:
        middle = median(rows)
        step.phase = "decode" if middle <= DECODE_ROWS else "prefill" if middle > PREFILL_ROWS else "unknown"
        if step.phase == "decode" and step.new_tokens is None:
            step.new_tokens = round(middle)


def choose_phase(steps: Sequence[Step], times: Sequence[StepTime], asked: str | None, path: Path) -> str:
    """The phase to judge: `asked`, else decode, else the one that takes most time.

    Raises:
        TraceError: no step is of the phase asked for.
    """
    total: dict[str, float] = defaultdict(float)
    for step, time in zip(steps, times, strict=True):
        total[step.phase] += time.wall
    if asked is not None:
        if asked not in total:
            raise TraceError(f"{path} holds no {asked} steps; it has {', '.join(sorted(total))}")
        return asked
    if "decode" in total:
        return "decode"
    return max((p for p in total if p != "idle"), key=lambda p: total[p], default=next(iter(total)))
