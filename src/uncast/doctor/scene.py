"""One phase of a trace, ready to be judged: its steps, their times, and every movement grouped by what and from where."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from uncast.doctor.costs import peak_bandwidth
from uncast.doctor.graphs import Join
from uncast.doctor.intervals import Interval, exposed
from uncast.doctor.link import Links, Source, deepest, enclosing
from uncast.doctor.moves import Move, move_of
from uncast.doctor.names import COLLECTIVE, parse_name
from uncast.doctor.steps import Step, StepTime
from uncast.doctor.trace import Signature, Trace

ANALYSED_STEPS = 8
_GEMM_OPS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "aten::_scaled_mm")
_PADS = ("aten::pad", "aten::constant_pad_nd", "aten::_pad_enum")


@dataclass(frozen=True)
class Origin:
    """Where a kernel comes from: a launch of this trace ("measured") or of the capture pass ("joined")."""

    trace: Trace
    links: Links
    launch: int
    confidence: str

    @property
    def op(self) -> str:
        index = self.links.op[self.launch]
        return self.trace.names[self.trace.ops.name[index]] if index >= 0 else ""

    @property
    def signature(self) -> Signature | None:
        index = self.links.op[self.launch]
        return self.trace.signature(self.trace.ops.sig[index]) if index >= 0 else None


@dataclass
class Group:
    """Movements of one kind, shape and source. `kernels`: (number of the analysed step, kernel).

    `context`: "collective" or "pad" where the surroundings say so, else "".
    """

    move: Move
    kernel_name: str
    op: str
    source: Source | None
    context: str
    confidence: str
    kernels: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Scene:
    """A phase under judgement. Times are microseconds a step, medians over all of the phase's steps."""

    trace: Trace
    links: Links
    join: Join
    phase: str
    steps: list[Step]
    times: list[StepTime]
    layers: int | None
    live_tokens: int | None
    live_source: str
    new_tokens: int | None
    groups: list[Group] = field(default_factory=list)
    weights: set[tuple[int, ...]] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    sync_calls: list[int] = field(default_factory=list)
    claimed: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """kernel -> kind and source of the finding about it."""

    @property
    def analysed(self) -> list[Step]:
        """Steps in the middle, at most `ANALYSED_STEPS`."""
        return self.steps[self._middle]

    @property
    def analysed_times(self) -> list[StepTime]:
        """Their times."""
        return self.times[self._middle]

    @property
    def _middle(self) -> slice:
        first = max(0, len(self.steps) - ANALYSED_STEPS) // 2
        return slice(first, first + ANALYSED_STEPS)

    @property
    def step_us(self) -> float:
        return median(t.wall for t in self.times)

    @property
    def busy_us(self) -> float:
        return median(t.busy for t in self.times)

    @property
    def amd(self) -> bool:
        return any(k.startswith("hip") or k == "roctracer_version" for k in self.trace.meta)

    @property
    def peak(self) -> float | None:
        name = self.trace.gpu_name or (self.join.capture.trace.gpu_name if self.join.capture else "")
        return peak_bandwidth(name)

    def origin(self, kernel: int) -> Origin | None:
        """Where `kernel` comes from, None inside a graph that was not joined."""
        joined = self.join.launch_of.get(kernel)
        if joined is not None and self.join.capture is not None:
            return Origin(self.join.capture.trace, self.join.capture.links, joined, "joined")
        launch = self.links.launch[kernel]
        if launch < 0 or "GraphLaunch" in self.trace.names[self.trace.launches.name[launch]]:
            return None
        return Origin(self.trace, self.links, launch, "measured")

    def in_graph(self, kernel: int) -> bool:
        launch = self.links.launch[kernel]
        return launch >= 0 and "GraphLaunch" in self.trace.names[self.trace.launches.name[launch]]

    def name(self, kernel: int) -> str:
        return self.trace.names[self.trace.kernels.name[kernel]]

    def us_per_step(self, kernels: Iterable[tuple[int, int]]) -> float:
        return sum(self.trace.kernels.dur[k] for _, k in kernels) / len(self.analysed)

    def exposed_per_step(self, kernels: Iterable[tuple[int, int]]) -> float:
        """Microseconds a step that only these kernels keep the GPU busy."""
        chosen: dict[int, set[int]] = defaultdict(set)
        for number, kernel in kernels:
            chosen[number].add(kernel)
        total = 0.0
        for number, members in chosen.items():
            order = self.analysed[number].kernels
            spans: list[Interval] = [(self.trace.kernels.ts[k], self.trace.kernels.end(k)) for k in order]
            total += exposed(spans, {n for n, k in enumerate(order) if k in members})
        return total / len(self.analysed)


def build_groups(scene: Scene) -> None:
    """Fills `groups`, `weights` (shapes that GEMMs take as their second operand) and `rows` (their first operand's)."""
    origins: dict[int, Origin | None] = {}
    per_block = _calibrate(scene)
    found: list[tuple[int, int, Move]] = []
    for number, step in enumerate(scene.analysed):
        for kernel in step.kernels:
            kind = parse_name(scene.name(kernel)).kind
            if kind == "gemm":
                _gemm_shapes(scene, scene.origin(kernel))
            if kind in ("gemm", "attention", "collective", "memset", "other"):
                continue
            origin = origins[kernel] = scene.origin(kernel)
            kernels = scene.trace.kernels
            move = move_of(
                scene.name(kernel), scene.trace.grids[_grid(scene, kernel)], kernels.size[kernel],
                origin.op if origin else "", origin.signature if origin else None,
                amd=scene.amd, per_block=per_block.get(kernels.name[kernel]),
            )  # fmt: skip
            if move is not None:
                found.append((number, kernel, move))
    places = _places([origins[kernel] for _, kernel, _ in found])
    beside = _beside_collectives(scene)
    groups: dict[object, Group] = {}
    for (number, kernel, move), (source, context) in zip(found, places, strict=True):
        origin = origins[kernel]
        if move.kind == "pad":
            context = "pad"
        elif kernel in beside and move.kind in ("memcpy", "copy"):
            context = "collective"
        confidence = "inferred" if origin is None or not move.certain else origin.confidence
        if move.kind == "memcpy" and origin is None:
            confidence = "measured"
        op = origin.op if origin else ""
        key = (move, scene.trace.kernels.name[kernel], op, source, context, confidence)
        group = groups.setdefault(key, Group(move, scene.name(kernel), op, source, context, confidence))
        group.kernels.append((number, kernel))
    scene.groups = sorted(groups.values(), key=lambda g: -scene.us_per_step(g.kernels))


def _grid(scene: Scene, kernel: int) -> int:
    """The kernel's grid, or its launch's (ROCm)."""
    kernels = scene.trace.kernels
    own = kernels.grid[kernel]
    if scene.trace.grids[own][0]:
        return own
    launch = scene.links.launch[kernel]
    return scene.trace.launches.grid[launch] if launch >= 0 else own


def _calibrate(scene: Scene) -> dict[int, int]:
    """Elements a block of copy kernels, from calls whose shape and grid are both known."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for step in scene.analysed:
        for kernel in step.kernels:
            if parse_name(scene.name(kernel)).kind != "copy":
                continue
            origin = scene.origin(kernel)
            blocks = scene.trace.grids[_grid(scene, kernel)][0]
            if origin is None or origin.signature is None or blocks < 8:
                continue
            move = move_of(
                scene.name(kernel), scene.trace.grids[0], 0, origin.op, origin.signature, amd=False, per_block=None
            )
            if move is not None and move.certain and move.numel:
                width = -(-move.numel // blocks)
                votes[scene.trace.kernels.name[kernel]][1 << (width - 1).bit_length()] += 1
    return {name: counter.most_common(1)[0][0] for name, counter in votes.items()}


def _gemm_shapes(scene: Scene, origin: Origin | None) -> None:
    signature = origin.signature if origin else None
    if signature is None or origin is None or origin.op not in _GEMM_OPS:
        return
    shapes = [
        tuple(d)
        for d in signature.dims
        if isinstance(d, list) and len(d) in (2, 3) and all(isinstance(x, int) for x in d)
    ]
    operands = shapes[1:] if "addmm" in origin.op and len(shapes) == 3 else shapes
    for shape in operands[1:2]:
        scene.weights |= {shape, shape[::-1]}
    for shape in operands[:1]:
        scene.rows.add(shape[-2])


def _places(origins: Sequence[Origin | None]) -> list[tuple[Source | None, str]]:
    """Source and context of each origin."""
    out: list[tuple[Source | None, str]] = [(None, "")] * len(origins)
    by_trace: dict[int, list[int]] = defaultdict(list)
    for number, origin in enumerate(origins):
        if origin is not None:
            by_trace[id(origin.trace)].append(number)
    for members in by_trace.values():
        first = origins[members[0]]
        assert first is not None
        trace, spans = first.trace, first.trace.launches
        points = [(spans.lane[o.launch], spans.ts[o.launch]) for n in members if (o := origins[n]) is not None]
        frames, ops = enclosing(trace.frames, points), enclosing(trace.ops, points)
        for n, frame_chain, op_chain in zip(members, frames, ops, strict=True):
            names = [trace.names[trace.frames.name[i]] for i in frame_chain]
            op_names = [trace.names[trace.ops.name[i]] for i in op_chain]
            origin = origins[n]
            signature = origin.signature if origin else None
            if not names and signature is not None and signature.call_stack:
                names = list(reversed(signature.call_stack.replace("\n", ";").split(";")))
            source = deepest(names)
            collective = (source is not None and COLLECTIVE.search(source.function)) or any(
                map(COLLECTIVE.search, op_names)
            )
            context = "collective" if collective else "pad" if any(o in _PADS for o in op_names) else ""
            out[n] = (source, context)
    return out


def _beside_collectives(scene: Scene) -> set[int]:
    """Kernels that run just before or after a collective on its stream."""
    out: set[int] = set()
    lanes = scene.trace.kernels.lane
    for step in scene.analysed:
        by_lane: dict[int, list[int]] = defaultdict(list)
        for kernel in step.kernels:
            by_lane[lanes[kernel]].append(kernel)
        for order in by_lane.values():
            for position, kernel in enumerate(order):
                if parse_name(scene.name(kernel)).kind == "collective":
                    out.update(order[max(0, position - 1) : position] + order[position + 1 : position + 2])
    return out
