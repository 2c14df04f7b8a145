"""The report as one HTML page without any other file: numbers, the step's timeline, bytes moved against needed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from uncast.doctor.diagnose import PARTS, Diagnosis
from uncast.doctor.errors import TraceError
from uncast.doctor.names import parse_name
from uncast.doctor.report import to_json
from uncast.doctor.scene import Scene
from uncast.doctor.trace import Interner

MAX_KERNELS = 20_000
_ORDER = ("matmuls", "attention", "copies and casts", "collectives", "other kernels")


def write_page(diagnosis: Diagnosis, path: Path) -> None:
    """Writes the page.

    Raises:
        TraceError: `path` cannot be written.
    """
    try:
        path.write_text(render(diagnosis), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from None


def render(diagnosis: Diagnosis) -> str:
    """The page's text."""
    template = resources.files("uncast.doctor").joinpath("page.html").read_text(encoding="utf-8")
    data = {"report": msgspec.json.decode(to_json(diagnosis.report)), "timeline": timeline(diagnosis)}
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":  # inside JSON these occur in strings only
        text = text.replace(character, f"\\u{ord(character):04x}")
    return template.replace("__DATA__", text)


def timeline(diagnosis: Diagnosis) -> dict[str, Any]:
    """The middle step's kernels: rows of [start, duration, lane, part, name, 1 if a finding is about it], microseconds."""
    scene = diagnosis.scene
    step = scene.analysed[len(scene.analysed) // 2]
    kernels = scene.trace.kernels
    kinds = {(f.kind, f.source) for f in diagnosis.report.findings}
    chosen = step.kernels
    if len(chosen) > MAX_KERNELS:
        chosen = sorted(sorted(chosen, key=lambda k: -kernels.dur[k])[:MAX_KERNELS], key=lambda k: kernels.ts[k])
    origin = kernels.ts[step.kernels[0]]
    lanes: Interner[int] = Interner()
    names: Interner[str] = Interner()
    events = [
        [
            round(kernels.ts[k] - origin, 3), round(kernels.dur[k], 3), lanes.id(kernels.lane[k]), _part(scene, k),
            names.id(scene.name(k)[:160]), int(scene.claimed.get(k) in kinds),
        ]
        for k in chosen
    ]  # fmt: skip
    end = max(kernels.end(k) for k in step.kernels) - origin
    streams = [str(scene.trace.lanes[lane][1]) for lane in lanes.values]
    return {
        "label": step.label, "end": end, "lanes": streams, "names": names.values, "events": events,
        "left_out": len(step.kernels) - len(chosen),
    }  # fmt: skip


def _part(scene: Scene, kernel: int) -> int:
    return _ORDER.index(PARTS.get(parse_name(scene.name(kernel)).kind, "other kernels"))
