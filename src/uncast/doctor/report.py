"""What the doctor reports, as data: `--json` prints exactly this (docs/doctor.md describes every field)."""

from __future__ import annotations

import msgspec
from msgspec import Struct

SCHEMA = 1


class Range(Struct, frozen=True):
    """Microseconds."""

    low: float
    high: float


class Finding(Struct, kw_only=True):
    """One waste. Bytes and times are per decode step unless the name says per call; None where it cannot be known."""

    kind: str
    title: str
    evidence: str
    calls_per_step: float
    layers_relation: str = ""
    dtype_from: str | None = None
    dtype_to: str | None = None
    shape: list[int] | None = None
    bytes_per_call: int | None = None
    bytes_per_call_range: list[int] | None = None
    bytes_per_step: int | None = None
    bytes_needed_per_step: int | None = None
    needed_source: str = ""
    us_per_step: float
    exposed_us_per_step: float
    share_of_step: float
    gb_per_s: float | None = None
    source: str | None = None
    confidence: str
    predicted_step_us: Range
    advice: str
    links: list[str] = msgspec.field(default_factory=list)
    kernel: str = ""


class Movement(Struct, kw_only=True):
    """A kernel that only moves numbers, wasteful or not."""

    kind: str
    calls_per_step: float
    dtype_from: str | None
    dtype_to: str | None
    shape: list[int] | None
    bytes_per_call: int | None
    us_per_step: float
    share_of_step: float
    gb_per_s: float | None
    source: str | None
    confidence: str
    kernel: str


class Attention(Struct, kw_only=True):
    """A roofline line: the time an attention kernel needs at the memory's peak for the bytes it must read."""

    kernel: str
    calls_per_step: float
    us_per_step: float
    share_of_step: float
    bytes_needed_per_step: int | None
    floor_us_per_step: float | None
    times_floor: float | None
    note: str


class PhaseTimes(Struct, kw_only=True):
    """Medians over the steps of a phase."""

    phase: str
    steps: int
    step_us: float
    gpu_busy_us: float
    gpu_idle_us: float
    kernels_per_step: float


class Budget(Struct, kw_only=True):
    """A part of the judged step."""

    part: str
    us_per_step: float
    share_of_step: float


class GraphJoin(Struct, kw_only=True):
    """Kernels inside graph replays, and how many of them met their launch in a capture trace."""

    replayed: int
    joined: int
    capture: str | None


class Report(Struct, kw_only=True):
    """One rank's diagnosis. `step_us`, `layers`, `findings` and what follows are about the phase `judged`."""

    schema: int = SCHEMA
    trace: str
    rank: int | None
    gpu: str
    peak_gb_per_s: float | None
    steps: int
    steps_found_by: str
    steps_dropped: int
    judged: str
    step_us: float
    gpu_busy_us: float
    layers: int | None
    live_tokens: int | None
    live_tokens_source: str
    phases: list[PhaseTimes]
    budget: list[Budget]
    findings: list[Finding]
    predicted_step_us: Range | None
    attention: list[Attention]
    movements: list[Movement]
    graphs: GraphJoin | None
    kernels: int
    kernels_linked_share: float
    skipped: dict[str, int]
    notes: list[str]


class Refused(Struct, kw_only=True):
    """A file of a folder that could not be diagnosed, in the list of reports; `error` is one sentence."""

    schema: int = SCHEMA
    trace: str
    rank: int | None = None
    error: str


def to_json(report: Report | Refused | list[Report | Refused]) -> bytes:
    """Indented JSON, floats to 3 decimals."""
    return msgspec.json.format(msgspec.json.encode(_rounded(msgspec.to_builtins(report))), indent=2)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3 if abs(value) >= 1 else 5)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return value
