"""Numbers in words: sizes, times, and the evidence line of a finding."""

from __future__ import annotations

from collections.abc import Sequence

from uncast.doctor.moves import Move
from uncast.doctor.report import Finding


def count(number: float) -> str:
    return f"{number:,.0f}" if abs(number - round(number)) < 0.05 else f"{number:,.1f}"


def size(number: float) -> str:
    """Decimal bytes, 4 digits: 856.3 MB, 66.8 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number:,.0f} B"


def time(us: float) -> str:
    return f"{us / 1e3:,.2f} ms" if us >= 1000 else f"{us:,.1f} us"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def shape_text(shape: Sequence[int] | None) -> str:
    if not shape:
        return ""
    return f"about {shape[0]:,} numbers" if len(shape) == 1 else "[" + ", ".join(map(str, shape)) + "]"


def what(finding: Finding) -> str:
    """`[495552, 1, 576] fp8_e4m3 -> bf16`."""
    types = ""
    if finding.dtype_from and finding.dtype_from == finding.dtype_to:
        types = finding.dtype_to
    elif finding.dtype_to:
        types = f"{finding.dtype_from or '?'} -> {finding.dtype_to}"
    return " ".join(part for part in (shape_text(finding.shape), types or "") if part)


def in_words(finding: Finding, step_us: float, moves: Sequence[Move]) -> str:
    """One line of evidence: how often, what, bytes, time, share."""
    parts = [f"{count(finding.calls_per_step)} calls a step"]
    if finding.layers_relation:
        parts[0] += f" ({finding.layers_relation})"
    if described := what(finding):
        shapes = {m.shape for m in moves}
        parts.append(
            described + (f" and {len(shapes) - 1} other shape{'s' * (len(shapes) > 2)}" if len(shapes) > 1 else "")
        )
    if finding.bytes_per_call:
        each = size(finding.bytes_per_call)
        if finding.bytes_per_call_range:
            low, high = finding.bytes_per_call_range
            if high > 1.01 * low:
                each += f" ({size(low)} to {size(high)})"
        parts.append(f"{each} a call")
    if finding.bytes_per_step:
        parts.append(f"{size(finding.bytes_per_step)} a step")
    if finding.gb_per_s:
        parts.append(f"at {finding.gb_per_s / 1e3:.2f} TB/s")
    parts.append(f"{time(finding.us_per_step)} of {time(step_us)} ({percent(finding.share_of_step)})")
    return ", ".join(parts)
