"""Where steps may begin and end: what servers write, graph launches, Python frames, and what repeats."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from uncast.doctor.labels import Label, parse_label
from uncast.doctor.link import Links
from uncast.doctor.trace import KERNEL, Mark, Trace

Window = tuple[Mark, Label]

_LOOP = re.compile(r": (run_batch|execute_model|_execute_model|forward_batch_generation|step_fn)$")
_FORWARD = re.compile(r"^nn\.Module: \w*(For\w+|LMHead\w*|Model|Transformer)_0$")
_GRAPH_LAUNCH = re.compile(r"^(cuda|hip|cu)GraphLaunch")
MAX_SEQUENCE = 4096


def ladder(trace: Trace, links: Links) -> Iterator[tuple[str, list[Window]]]:
    """Candidates for a trace's steps, the most trustworthy first: how they were found, and windows of CPU time (of GPU time
    for the period), possibly none."""
    labelled = _labelled(trace)
    for family in ("vllm", "sglang"):
        yield f"labels of {'vLLM' if family == 'vllm' else 'SGLang'}", labelled.get(family, [])
    yield "ProfilerStep", _split(labelled.get("profiler", []), _frames(trace, _FORWARD))
    yield "graph launches", _graph_windows(trace, links)
    yield "Optimizer.step", _between([m for m, _ in labelled.get("optimizer", [])], phase="training")
    yield "Python frames of the server's loop", _frames(trace, _LOOP)
    yield "forwards of the model", _frames(trace, _FORWARD)
    yield "the period of the kernel sequence", _periodic(trace)


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
    busy: dict[int, float] = defaultdict(float)
    for index, lane in enumerate(kernels.lane):
        busy[lane] += kernels.dur[index]
    if not busy:
        return []
    lane = max(busy, key=lambda lane: busy[lane])
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
