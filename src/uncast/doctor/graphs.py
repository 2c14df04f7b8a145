"""Graph replays: joins them with a trace of the capture pass, which has the operators, shapes and stacks they lack.

All kernels of a replay share the correlation of one graph launch. ROCm's capture launches carry kernel names: the n-th kernel
of a name is the n-th launch of that name. CUDA's carry none: launches and kernels meet in order, and the join counts only if
each kernel name keeps meeting the same operator.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uncast.doctor.errors import TraceError
from uncast.doctor.link import Links, link
from uncast.doctor.names import parse_name
from uncast.doctor.reader import read_trace
from uncast.doctor.source import Progress
from uncast.doctor.trace import Trace

_LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|LaunchKernelEx|ModuleLaunchKernel|Memcpy|Memset")
_GRAPH = re.compile(r"GraphLaunch")
REACH, RUN = 48, 4
FOLDERS = ("capture_traces", "graph_capture_profile")
"""Where vLLM and SGLang write their capture passes, beside their traces."""
CONSISTENT = 0.8
"""Share of kernels that meet the operator which their name meets most."""
GOOD = 0.5


@dataclass
class Capture:
    """A capture pass: per captured graph the launches in order."""

    trace: Trace
    links: Links
    graphs: list[list[int]]


@dataclass
class Join:
    """`launch_of`: kernel of the replay -> launch in `capture`; `matched` of `replayed` kernels; `tried`: captures read."""

    capture: Capture | None
    launch_of: dict[int, int]
    matched: int = 0
    replayed: int = 0
    tried: tuple[str, ...] = ()


def graph_replays(trace: Trace, links: Links) -> list[list[int]]:
    """Kernels of each graph launch, by start."""
    names = {n for n, name in enumerate(trace.names.values) if _GRAPH.search(name)}
    replays: dict[int, list[int]] = defaultdict(list)
    for kernel, launch in enumerate(links.launch):
        if launch >= 0 and trace.launches.name[launch] in names:
            replays[launch].append(kernel)
    return [sorted(members, key=lambda i: trace.kernels.ts[i]) for members in replays.values()]


def find_captures(path: Path, batch: int | None) -> list[Path]:
    """Capture traces beside a trace: `<stem>.capture.json[.gz]`, or files of one of `FOLDERS`, the batch's own first."""
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    beside = [p for end in (".json.gz", ".json") if (p := path.with_name(f"{stem}.capture{end}")).is_file()]
    if beside:
        return beside
    return capture_files(path.parent, batch) if _inner(path.parent) else []


def capture_files(folder: Path, batch: int | None) -> list[Path]:
    """Traces of a folder, or of the one of `FOLDERS` in it; those named after the batch size first."""
    if not folder.is_dir():
        return []
    folder = _inner(folder) or folder
    files = sorted(p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")))
    mine = re.compile(rf"(?<!\d){batch}(?!\d)") if batch is not None else None
    return sorted(files, key=lambda p: mine is None or mine.search(p.name) is None)[:64]


def _inner(folder: Path) -> Path | None:
    return next((inner for name in FOLDERS if (inner := folder / name).is_dir()), None)


def load_capture(path: Path, progress: Progress | None = None) -> Capture:
    """Reads a capture pass.

    Raises:
        TraceError: not a trace, or one without launches.
    """
    trace = read_trace(path, progress)
    links = link(trace)
    graphs = [g for g in _captured(trace, set(links.launch)) if g]
    if not graphs:
        broken = f", and it is not whole ({trace.damage})" if trace.damage else ""
        raise TraceError(f"{path} is no trace of a graph's capture pass: no launch in it lacks its kernel{broken}")
    return Capture(trace, links, graphs)


def _captured(trace: Trace, launched: set[int]) -> list[list[int]]:
    """Launches between a begin and an end of capture; without such calls, all launches that ran no kernel."""
    launches = trace.launches
    kinds = {
        n: kind
        for n, name in enumerate(trace.names.values)
        for kind, pattern in (("begin", "StreamBeginCapture"), ("end", "StreamEndCapture"))
        if pattern in name
    }
    wanted = {n for n, name in enumerate(trace.names.values) if _LAUNCH.search(name) and not _GRAPH.search(name)}
    order = sorted(range(len(launches)), key=lambda i: launches.ts[i])
    graphs: list[list[int]] = []
    loose: list[int] = []
    inside = False
    for index in order:
        name = launches.name[index]
        if name in kinds:
            inside = kinds[name] == "begin"
            if inside:
                graphs.append([])
        elif name in wanted and index not in launched:
            (graphs[-1] if inside else loose).append(index)
    return graphs if any(graphs) else [loose]


def join(trace: Trace, links: Links, captures: Sequence[Path], progress: Progress | None = None) -> Join:
    """The best join of a trace's replays with one of the captures.

    Raises:
        TraceError: a capture given is not one.
    """
    replays = graph_replays(trace, links)
    total = sum(map(len, replays))
    best = Join(None, {}, 0, total)
    if not replays:
        return best
    tried = []
    for path in captures:
        capture = load_capture(path, progress)
        tried.append(str(path))
        found = _join_one(trace, replays, capture)
        if len(found) > best.matched:
            best = Join(capture, found, len(found), total)
        if best.matched == total:
            break
    best.tried = tuple(tried)
    return best


def _join_one(trace: Trace, replays: list[list[int]], capture: Capture) -> dict[int, int]:
    out: dict[int, int] = {}
    known: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for replay in replays:
        key = tuple(trace.kernels.name[k] for k in replay)
        if key not in known:
            options = [_align(trace, replay, capture, graph) for graph in capture.graphs]
            known[key] = max(options, key=len)
        out.update((replay[position], launch) for position, launch in known[key])
    return out


def _align(trace: Trace, replay: list[int], capture: Capture, graph: list[int]) -> list[tuple[int, int]]:
    """Pairs (position in the replay, launch of the capture)."""
    named = sum(capture.trace.launches.kernel[i] >= 0 for i in graph)
    names = [trace.names[trace.kernels.name[k]] for k in replay]
    if named >= 0.9 * len(graph):
        known = [capture.trace.names[capture.trace.launches.kernel[i]] for i in graph]
        pairs = _by_name(names, known)
        return [(a, graph[b]) for a, b in pairs] if len(pairs) >= GOOD * len(replay) else []
    kernels, launches = [_kernel_class(n) for n in names], [_launch_class(capture, i) for i in graph]
    uneven = {c for c in ("memset", "memcpy") if kernels.count(c) != launches.count(c)}
    left = [n for n, c in enumerate(kernels) if c not in uneven]
    right = [n for n, c in enumerate(launches) if c not in uneven]
    if len(left) == len(right):
        pairs = list(zip(left, right, strict=True))
        if _consistent(names, capture, graph, pairs):
            return [(a, graph[b]) for a, b in pairs]
    pairs = _matching(kernels, launches)
    good = len(pairs) >= 0.9 * len(replay) and _consistent(names, capture, graph, pairs)
    return [(a, graph[b]) for a, b in pairs] if good else []


def _by_name(replay: list[str], capture: list[str]) -> list[tuple[int, int]]:
    """The n-th of a name with the n-th of that name; names whose numbers differ are aligned in order."""
    counts, others = Counter(replay), Counter(capture)
    places: dict[str, list[int]] = defaultdict(list)
    for position, name in enumerate(capture):
        places[name].append(position)
    used: Counter[str] = Counter()
    out = []
    for position, name in enumerate(replay):
        if counts[name] == others[name]:
            out.append((position, places[name][used[name]]))
            used[name] += 1
    if len(out) < len(replay):
        taken = {a for a, _ in out}
        out += [
            (a, b) for a, b in _matching(replay, capture) if a not in taken and counts[replay[a]] != others[replay[a]]
        ]
    return sorted(out)


def _matching(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of equal tokens in order. At a mismatch the smallest skip in either list after which `RUN` tokens agree."""
    out = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            out.append((i, j))
            i, j = i + 1, j + 1
            continue
        skip = next(
            (
                (x, total - x)
                for total in range(1, REACH)
                for x in range(total + 1)
                if _agree(a, i + x, b, j + total - x)
            ),
            None,
        )
        if skip is None:
            break
        i, j = i + skip[0], j + skip[1]
    return out


def _agree(a: Sequence[str], i: int, b: Sequence[str], j: int) -> bool:
    length = min(RUN, len(a) - i, len(b) - j)
    return length > 0 and all(a[i + n] == b[j + n] for n in range(length))


def _consistent(names: list[str], capture: Capture, graph: list[int], pairs: list[tuple[int, int]]) -> bool:
    """Whether each kernel name meets one operator, and copies meet copies and GEMMs GEMMs."""
    if not pairs:
        return False
    meets: dict[str, Counter[str]] = defaultdict(Counter)
    wrong = 0
    for a, b in pairs:
        meets[names[a]][_op_name(capture, graph[b])] += 1
        kernel, launch = _kernel_class(names[a]), _launch_class(capture, graph[b])
        wrong += "other" not in (kernel, launch) and kernel != launch
    agree = sum(max(c.values()) for c in meets.values())
    repeated = sum(sum(c.values()) for c in meets.values())
    return wrong <= 0.02 * len(pairs) and agree >= CONSISTENT * repeated


def _kernel_class(name: str) -> str:
    kind = parse_name(name).kind
    return {"copy": "copy", "gemm": "gemm", "memset": "memset"}.get(
        kind, "memcpy" if kind.startswith("memcpy") else "other"
    )


def _launch_class(capture: Capture, launch: int) -> str:
    call = capture.trace.names[capture.trace.launches.name[launch]]
    if "Memset" in call:
        return "memset"
    if "Memcpy" in call:
        return "memcpy"
    op = _op_name(capture, launch)
    if op == "aten::copy_":
        return "copy"
    return "gemm" if op in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") else "other"


def _op_name(capture: Capture, launch: int) -> str:
    op = capture.links.op[launch]
    return capture.trace.names[capture.trace.ops.name[op]] if op >= 0 else ""
