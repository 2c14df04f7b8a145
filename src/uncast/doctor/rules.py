"""Which movements are waste. Each rule claims groups of a scene and turns them into a finding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from uncast.doctor.advice import TITLES, advice_for, links_for
from uncast.doctor.costs import bandwidth, predict
from uncast.doctor.dtypes import is_fp8, size_of
from uncast.doctor.moves import Move
from uncast.doctor.report import Finding, Range
from uncast.doctor.scene import Group, Scene
from uncast.doctor.words import count, in_words

MANY_TIMES = 8
"""A cast of more than this many times the rows in use is of the whole pool or table."""
MIN_ROWS = 1024
MIN_ROWS_UNKNOWN = 8192
MIN_POOL_NUMEL = 4 << 20
MAX_ROW = 8192
"""Numbers a token and layer of a cache (64 heads of 128); rows of weights are often longer."""
MIN_SHARE = 0.005
ROUND_TRIP_REACH = 8


def per_token(shape: tuple[int, ...]) -> tuple[int, int]:
    """(tokens, numbers a token) of a cache: [tokens, row], [tokens, 1, row], [pages, page, row >= 512], [tokens, heads, dim],
    [pages, page, heads, dim]; (0, 0) for one dimension."""
    if len(shape) < 2:
        return 0, 0
    if len(shape) == 2:
        return shape[0], shape[1]
    if len(shape) == 3 and shape[1] != 1 and shape[2] < 512:
        return shape[0], shape[1] * shape[2]
    if len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    if len(shape) == 4:
        return shape[0] * shape[1], shape[2] * shape[3]
    return shape[0], 0


def judge_moves(scene: Scene) -> list[Finding]:
    """Findings about movements, dearest first; those below half a percent of the step are left out."""
    remaining = list(scene.groups)
    findings: list[Finding] = []
    for kind, claims in (("pool_cast", is_pool_cast), ("pool_copy", is_pool_copy), ("weight_cast", is_weight_cast),
                         ("table_cast", is_table_cast)):  # fmt: skip
        mine = [g for g in remaining if claims(scene, g)]
        remaining = [g for g in remaining if g not in mine]
        for members in _bundles(mine, lambda g: (g.source, g.move.shape, g.move.dtype_from, g.move.dtype_to)):
            findings.append(_finding(scene, kind, members))
    trips, remaining = _round_trips(scene, remaining)
    findings += trips
    for kind, chosen in (("collective_copy", _around("collective")), ("padding_copy", _around("pad")),
                         ("strided_copy", _of_kind("strided")), ("device_copy", _of_kind("copy", "memcpy"))):  # fmt: skip
        mine = [g for g in remaining if chosen(g)]
        for members in _bundles(mine, lambda g: g.source if g.source is not None else (g.kernel_name, g.move.shape)):
            if _per_layer(scene, members):
                findings.append(_finding(scene, kind, members))
                remaining = [g for g in remaining if g not in members]
    return sorted((f for f in findings if f.share_of_step >= MIN_SHARE), key=lambda f: -f.us_per_step)


def _bundles(groups: Iterable[Group], key: Callable[[Group], object]) -> list[list[Group]]:
    out: dict[object, list[Group]] = defaultdict(list)
    for group in groups:
        out[key(group)].append(group)
    return list(out.values())


def _around(context: str) -> Callable[[Group], bool]:
    return lambda g: g.context == context and g.move.kind in ("copy", "memcpy", "strided", "pad")


def _of_kind(*kinds: str) -> Callable[[Group], bool]:
    return lambda g: g.move.kind in kinds


def calls_per_step(scene: Scene, groups: Iterable[Group]) -> float:
    return sum(len(g.kernels) for g in groups) / len(scene.analysed)


def _per_layer(scene: Scene, groups: Iterable[Group]) -> bool:
    return calls_per_step(scene, groups) >= (max(2, scene.layers / 2) if scene.layers else 4)


def is_pool_cast(scene: Scene, group: Group) -> bool:
    """A cast from FP8 to a wider float of a tensor that is, by its size, the cache: of many times the live tokens, of a pool's
    size where those are unknown, or of a pool that holds them. How full the pool is does not matter: a kernel that reads the
    cache as it is stored needs no cast at all."""
    m = group.move
    if m.kind != "cast" or not is_fp8(m.dtype_from) or m.dtype_to not in ("bf16", "fp16", "fp32"):
        return False
    return m.shape not in scene.weights and (_pool_sized(scene, m) or _filled_pool(scene, m))


def _filled_pool(scene: Scene, move: Move) -> bool:
    """A pool's size and shape, and not the step's own tokens. Fewer rows than live tokens are still a pool where the shape has
    heads or pages: the number is given wrongly, or counts shared prefixes once a sequence."""
    tokens, row = per_token(move.shape)
    if scene.live_tokens is None or move.numel < MIN_POOL_NUMEL or tokens < MIN_ROWS_UNKNOWN or row > MAX_ROW:
        return False
    if tokens in scene.rows or tokens <= (scene.new_tokens or 0):
        return False
    return tokens >= scene.live_tokens or len(move.shape) >= 3


def is_pool_copy(scene: Scene, group: Group) -> bool:
    m = group.move
    if m.kind not in ("copy", "strided") or not group.move.certain or len(m.shape) < 3:
        return False
    big = scene.live_tokens is not None and per_token(m.shape)[0] >= MIN_ROWS_UNKNOWN
    return big and _pool_sized(scene, m) and per_token(m.shape)[0] not in scene.rows


def _pool_sized(scene: Scene, move: Move) -> bool:
    if move.numel < MIN_POOL_NUMEL:
        return False
    tokens, _ = per_token(move.shape)
    if tokens and scene.live_tokens is not None:
        return tokens >= MANY_TIMES * scene.live_tokens
    return not tokens or tokens >= MIN_ROWS_UNKNOWN


def is_weight_cast(scene: Scene, group: Group) -> bool:
    return group.move.kind == "cast" and group.move.shape in scene.weights and group.move.numel >= MIN_ROWS * 64


def is_table_cast(scene: Scene, group: Group) -> bool:
    """A cast of a two-dimensional tensor with many times more rows than the step has tokens."""
    m = group.move
    if m.kind != "cast" or len(m.shape) != 2 or m.shape[0] in scene.rows or m.shape[0] < MIN_ROWS:
        return False
    if scene.new_tokens is not None:
        return m.shape[0] >= MANY_TIMES * scene.new_tokens
    return m.shape[0] >= MIN_ROWS_UNKNOWN and scene.phase in ("decode", "verify", "draft")


def _round_trips(scene: Scene, groups: list[Group]) -> tuple[list[Finding], list[Group]]:
    """Casts X -> Y followed on the same stream within a few kernels by Y -> X of as many numbers."""
    of_kernel = {k: g for g in groups if g.move.kind == "cast" and g.move.certain for _, k in g.kernels}
    pairs: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    lanes = scene.trace.kernels.lane
    for number, step in enumerate(scene.analysed):
        recent: dict[int, list[tuple[int, int]]] = defaultdict(list)
        position: dict[int, int] = defaultdict(int)
        for kernel in step.kernels:
            lane = lanes[kernel]
            position[lane] += 1
            group = of_kernel.get(kernel)
            if group is None:
                continue
            open_casts = [(p, k) for p, k in recent[lane] if position[lane] - p <= ROUND_TRIP_REACH]
            match = next((e for e in reversed(open_casts) if _returns(of_kernel[e[1]].move, group.move)), None)
            if match is not None:
                open_casts.remove(match)
                pairs[(id(of_kernel[match[1]]), id(group))].append((number, match[1], kernel))
            else:
                open_casts.append((position[lane], kernel))
            recent[lane] = open_casts
    findings = []
    used: set[int] = set()
    for (a, b), members in pairs.items():
        if len(members) / len(scene.analysed) < (max(2, scene.layers / 2) if scene.layers else 4):
            continue
        first = next(g for g in groups if id(g) == a)
        second = next(g for g in groups if id(g) == b)
        kernels = [(n, k) for n, x, y in members for k in (x, y)]
        pair = Group(first.move, first.kernel_name, first.op, second.source, "", first.confidence, kernels)
        findings.append(_finding(scene, "cast_round_trip", [pair]))
        used |= {a, b}
    return findings, [g for g in groups if id(g) not in used]


def _returns(there: Move, back: Move) -> bool:
    return (
        there.dtype_from == back.dtype_to
        and there.dtype_to == back.dtype_from
        and there.numel == back.numel
        and there.dtype_from is not None
    )


def _needed(scene: Scene, kind: str, move: Move, calls: float) -> tuple[int | None, str]:
    """Bytes a step that the casts would move for the rows in use, and where that number comes from."""
    width = (size_of(move.dtype_from) if move.dtype_from else 0) + (size_of(move.dtype_to) if move.dtype_to else 0)
    tokens, row = per_token(move.shape)
    if kind in ("pool_cast", "pool_copy"):
        if scene.live_tokens is None:
            each = f"{row * width:,} bytes a call for every live token" if row else "unknown"
            return None, f"live tokens unknown ({each}); give --live-tokens or --metrics-url"
        if not row:
            return None, "only the number of elements is known: it may be a weight too; the capture pass tells"
        return round(min(scene.live_tokens, tokens) * row * width * calls), _live_source(scene, kind, tokens)
    if kind == "table_cast":
        if scene.new_tokens is None:
            return None, "the batch's tokens are unknown"
        return round(
            min(scene.new_tokens, tokens) * row * width * calls
        ), f"{count(scene.new_tokens)} tokens in the step"
    return 0, "none: the consumer can read the tensor where and as it is"


def _live_source(scene: Scene, kind: str, tokens: int) -> str:
    live = f"{count(scene.live_tokens or 0)} live tokens, {scene.live_source}"
    if scene.live_tokens is not None and scene.live_tokens > tokens:
        live = f"all {count(tokens)} rows: {live}, are more than it has"
    if kind == "pool_cast" and scene.live_tokens is not None and tokens < MANY_TIMES * scene.live_tokens:
        live += "; none with a kernel that reads the cache as it is stored"
    return live


def _finding(scene: Scene, kind: str, groups: list[Group]) -> Finding:
    kernels = [pair for g in groups for pair in g.kernels]
    biggest = max(groups, key=lambda g: g.move.bytes_moved or 0)
    move, calls = biggest.move, len(kernels) / len(scene.analysed)
    us, exposed_us = scene.us_per_step(kernels), scene.exposed_per_step(kernels)
    known = [g for g in groups if g.move.bytes_moved is not None]
    total = sum((g.move.bytes_moved or 0) * len(g.kernels) for g in known) / len(scene.analysed)
    moved = round(total) if len(known) == len(groups) else None
    needed, needed_source = _needed(scene, kind, move, calls)
    speed = bandwidth(moved, us) if moved else None
    kept = (
        needed / calls if needed else (moved or 0) / calls / 2 if needed == 0 and kind not in ("weight_cast",) else 0.0
    )
    low, high = predict(scene.step_us, exposed_us, calls, kept, speed or 0.0, least=0.0 if needed == 0 else None)
    finding = Finding(
        kind=kind, title=TITLES[kind], evidence="", calls_per_step=calls,
        layers_relation=relation(calls, scene.layers),
        dtype_from=move.dtype_from, dtype_to=move.dtype_to, shape=list(move.shape) or None,
        bytes_per_call=move.bytes_moved,
        bytes_per_call_range=[move.bytes_low, move.bytes_high] if move.bytes_low and move.bytes_high else None,
        bytes_per_step=moved, bytes_needed_per_step=needed, needed_source=needed_source,
        us_per_step=us, exposed_us_per_step=exposed_us, share_of_step=us / scene.step_us if scene.step_us else 0.0,
        gb_per_s=speed, source=str(biggest.source) if biggest.source else None, confidence=_weakest(groups),
        predicted_step_us=Range(low, high), advice=advice_for(kind), links=links_for(kind), kernel=biggest.kernel_name[:300],
    )  # fmt: skip
    scene.claimed |= dict.fromkeys((k for _, k in kernels), (kind, finding.source))
    finding.evidence = in_words(finding, scene.step_us, [g.move for g in groups])
    return finding


def _weakest(groups: Iterable[Group]) -> str:
    order = ("measured", "joined", "inferred", "unknown")
    weakest = max((g.confidence for g in groups), key=order.index)
    nothing_known = all(g.move.bytes_moved is None and not g.move.shape for g in groups)
    return "unknown" if weakest == "inferred" and nothing_known else weakest


def relation(calls: float, layers: int | None) -> str:
    """`78 = 1 x 78 layers`, `23 = 24 layers - 1`, or "" where calls and layers do not meet."""
    if not layers or abs(calls - round(calls)) > 0.01:
        return ""
    n = round(calls)
    times, rest = divmod(n, layers)
    if times and not rest:
        return f"{times} x {layers} layers" if times > 1 else f"once in each of {layers} layers"
    for k in (times, times + 1):
        off = n - k * layers
        if k and abs(off) <= 3:
            base = f"{k} x {layers} layers" if k > 1 else f"{layers} layers"
            return f"{base} {'+' if off > 0 else '-'} {abs(off)}"
    return ""
