"""The roofline of decode attention: bytes it must read over the memory's peak, against the time it takes."""

from __future__ import annotations

from collections import defaultdict

from uncast.doctor.dtypes import short_name, size_of
from uncast.doctor.link import enclosing
from uncast.doctor.names import ATTENTION, parse_name
from uncast.doctor.report import Attention
from uncast.doctor.rules import is_pool_cast, per_token
from uncast.doctor.scene import Scene
from uncast.doctor.trace import Signature


def attention_lines(scene: Scene, peak: float | None) -> list[Attention]:
    """One line per attention kernel name, dearest first. Peak in GB/s."""
    by_name: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, step in enumerate(scene.analysed):
        for kernel in step.kernels:
            if parse_name(scene.name(kernel)).kind in ("attention", "attention_tail"):
                by_name[scene.name(kernel)].append((number, kernel))
    lines = [_line(scene, name, kernels, peak) for name, kernels in by_name.items()]
    return sorted(lines, key=lambda line: -line.us_per_step)


def _line(scene: Scene, name: str, kernels: list[tuple[int, int]], peak: float | None) -> Attention:
    us = scene.us_per_step(kernels)
    calls = len(kernels) / len(scene.analysed)
    needed: int | None = None
    floor: float | None = None
    note = ""
    row = None if parse_name(name).kind == "attention_tail" else _row_bytes(scene, kernels)
    if parse_name(name).kind == "attention_tail":
        note = "combines partial results"
    elif scene.phase not in ("decode", "verify", "draft"):
        note = "not a decode step: bound by arithmetic, not by the cache"
    elif scene.live_tokens is None:
        note = "live tokens unknown; give --live-tokens or --metrics-url"
    elif row is None:
        note = "no operator with the shapes of K and V encloses it"
    else:
        needed = round(scene.live_tokens * row * calls)
        note = f"{row:,} bytes a token and layer"
        if peak is None:
            note += "; the GPU's bandwidth is unknown: give --peak-gbps"
        else:
            floor = needed / peak / 1e3
            if us < floor:
                note += "; faster than the floor: it reads fewer tokens (a sliding window?)"
    return Attention(
        kernel=name[:200], calls_per_step=calls, us_per_step=us,
        share_of_step=us / scene.step_us if scene.step_us else 0.0,
        bytes_needed_per_step=needed, floor_us_per_step=floor,
        times_floor=us / floor if floor else None, note=note,
    )  # fmt: skip


def _row_bytes(scene: Scene, kernels: list[tuple[int, int]]) -> int | None:
    """Bytes a token and layer: from K and V of an enclosing attention operator, else from the row of a pool that is cast."""
    origin = scene.origin(kernels[0][1])
    if origin is not None:
        spans = origin.trace.launches
        chain = enclosing(origin.trace.ops, [(spans.lane[origin.launch], spans.ts[origin.launch])])[0]
        for op in reversed(chain):
            name = origin.trace.names[origin.trace.ops.name[op]]
            if ATTENTION.search(name) or "attention" in name.lower():
                row = _kv_row(origin.trace.signature(origin.trace.ops.sig[op]))
                if row is not None:
                    return row
    cast = next((g for g in scene.groups if is_pool_cast(scene, g)), None)
    if cast is not None and cast.move.dtype_to is not None and per_token(cast.move.shape)[1]:
        return per_token(cast.move.shape)[1] * size_of(cast.move.dtype_to)
    return None


def _kv_row(signature: Signature) -> int | None:
    """Bytes of K and V a token where the first three tensors are q [T, H, D], k [T, Hk, D] and v [T, Hk, Dv]."""
    tensors = []
    for dims, kind in zip(signature.dims, signature.types, strict=False):
        dtype = short_name(kind) if isinstance(kind, str) else None
        if dtype is not None and isinstance(dims, list) and dims and all(isinstance(d, int) for d in dims):
            tensors.append((dims, dtype))
    if len(tensors) < 3:
        return None
    (q, _), (k, dtype), (v, _) = tensors[:3]
    if not (len(q) == len(k) == len(v) == 3 and q[0] == k[0] == v[0] and q[2] == k[2] and q[1] % max(1, k[1]) == 0):
        return None
    return int(k[1] * k[2] + v[1] * v[2]) * size_of(dtype)
