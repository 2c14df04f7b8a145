"""Kernel -> launch -> operator -> Python function.

A kernel meets its launch by correlation and the launch its operator by time: the innermost `cpu_op` on the same thread. The
`External id` is never used: in files of 2022-24 it equals the correlation and collides with other operators' ids.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from uncast.doctor.trace import Launches, Ops, Spans, Trace

_FRAME = re.compile(r"^(?P<file>.*\.py)\((?P<line>\d+)\): (?P<function>.*)$", re.DOTALL)
_LIBRARIES = ("torch/", "triton/", "threading.py", "contextlib.py", "concurrent/", "importlib/")
_WRAPPERS = ("vllm/compilation/", "sglang/srt/utils/kernel_shape_profiler.py", "sglang/srt/compilation/")
"""Files that call every model's code; named only where nothing nearer is known."""
_ROOTS = ("/site-packages/", "/dist-packages/", "/python/")


@dataclass(frozen=True)
class Source:
    """Where a launch was made: a Python function. `line` is where the function begins, not the line of the call."""

    file: str
    line: int
    function: str
    module: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.file}({self.line}): {self.function}"


@dataclass
class Links:
    """`launch`: kernel -> launch or -1; `op`: launch -> innermost operator or -1."""

    launch: array[int]
    op: array[int]

    def op_of_kernel(self, kernel: int) -> int:
        launch = self.launch[kernel]
        return -1 if launch < 0 else self.op[launch]


def link(trace: Trace) -> Links:
    """Links of all kernels and launches of a trace."""
    return Links(_match_launches(trace), _innermost(trace.launches, trace.ops))


def _match_launches(trace: Trace) -> array[int]:
    """By correlation; where launches share one (merged ranks), the last that began before the kernel."""
    launches, kernels = trace.launches, trace.kernels
    first: dict[int, int] = {}
    more: dict[int, list[int]] = defaultdict(list)
    for index, corr in enumerate(launches.corr):
        if corr < 0:
            continue
        if corr in first:
            more[corr].append(index)
        else:
            first[corr] = index
    out = array("i", [-1]) * len(kernels)
    for index, corr in enumerate(kernels.corr):
        found = first.get(corr, -1)
        if found >= 0 and corr in more:
            before = [i for i in (found, *more[corr]) if launches.ts[i] <= kernels.ts[index]]
            found = max(before, key=lambda i: launches.ts[i], default=found)
        out[index] = found
    return out


def _by_lane(spans: Spans) -> dict[int, list[int]]:
    lanes: dict[int, list[int]] = defaultdict(list)
    for index, lane in enumerate(spans.lane):
        lanes[lane].append(index)
    return lanes


def _innermost(launches: Launches, ops: Ops) -> array[int]:
    """For each launch the operator on its thread that contains it and began last (on ties: the shorter)."""
    out = array("i", [-1]) * len(launches)
    ops_of = _by_lane(ops)
    for lane, members in _by_lane(launches).items():
        candidates = ops_of.get(lane)
        if not candidates:
            continue
        candidates.sort(key=lambda i: (ops.ts[i], -ops.dur[i]))
        members.sort(key=lambda i: launches.ts[i])
        stack: list[int] = []
        position = 0
        for launch in members:
            ts, end = launches.ts[launch], launches.end(launch)
            while position < len(candidates) and ops.ts[candidates[position]] <= ts:
                op = candidates[position]
                while stack and ops.end(stack[-1]) < ops.ts[op]:
                    stack.pop()
                stack.append(op)
                position += 1
            while stack and ops.end(stack[-1]) < ts:
                stack.pop()
            out[launch] = _containing(stack, ops, ts, end)
    return out


def _containing(stack: list[int], ops: Ops, ts: float, end: float) -> int:
    """The innermost open operator that holds all of the launch; with whole-microsecond times neighbours share an instant."""
    for op in reversed(stack):
        if ops.end(op) >= end:
            return op
    for op in reversed(stack):
        if ops.end(op) > ts:
            return op
    return -1


def enclosing(spans: Spans, points: Sequence[tuple[int, float]]) -> list[list[int]]:
    """For each point (lane, time) the spans that contain it, outermost first."""
    out: list[list[int]] = [[] for _ in points]
    queries: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for number, (lane, ts) in enumerate(points):
        queries[lane].append((ts, number))
    times: dict[int, list[float]] = {}
    for lane, members in queries.items():
        members.sort()
        times[lane] = [ts for ts, _ in members]
    for index, lane in enumerate(spans.lane):
        when = times.get(lane)
        if when is None:
            continue
        start = spans.ts[index]
        low = bisect_left(when, start)
        if low < len(when) and when[low] <= start + spans.dur[index]:
            for _, number in queries[lane][low : bisect_right(when, start + spans.dur[index])]:
                out[number].append(index)
    for chain in out:
        chain.sort(key=lambda i: (spans.ts[i], -spans.dur[i]))
    return out


def deepest(frames: Iterable[str]) -> Source | None:
    """The last of `frames` (outermost first) that is a file of its own program, with the last module around it."""
    found: Source | None = None
    wrapper: Source | None = None
    module = ""
    for name in frames:
        if name.startswith("nn.Module: "):
            module = name.removeprefix("nn.Module: ")
            continue
        match = _FRAME.match(name.strip())
        if match is None:
            continue
        file = _shorten(match["file"])
        if file.startswith(_LIBRARIES) or "torchinductor" in file or file.startswith("<"):
            continue
        source = Source(file, int(match["line"][:9]), match["function"], module)
        if file.startswith(_WRAPPERS):
            wrapper = source
        else:
            found = source
    return found or wrapper


def _shorten(file: str) -> str:
    for root in _ROOTS:
        _, mark, rest = file.rpartition(root)
        if mark:
            return rest
    return file
