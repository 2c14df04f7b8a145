"""What surrounds the events in a trace file: fields before and after them, and what the file is if it has none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def metadata(head: bytes) -> dict[str, Any]:
    """The top-level fields before the events; empty where they are no JSON."""
    for text in (head + b'"traceEvents":[]}', *_mended_heads(head)):
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            value.pop("traceEvents", None)
            return value
    return {}


def _mended_heads(head: bytes) -> Iterator[bytes]:
    start = head.find(b"{")
    if start > 0:
        yield head[start:] + b'"traceEvents":[]}'


def trailer(rest: bytes) -> dict[str, Any]:
    """Keys that follow the array of events."""
    text = rest.lstrip()
    if not text.startswith(b"]"):
        return {}
    text = text[1:].lstrip().removeprefix(b",").strip()
    if len(text) > 1 << 20:
        return {}
    try:
        value = json.loads(b"{" + text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def no_trace(path: Path, start: bytes, damage: str) -> str:
    """Why a file without a list of events is no trace, from its first bytes, in one sentence."""
    if damage:
        return f"{path} holds no events of a profiler trace: {damage}"
    text = start.lstrip()
    if text[:1] not in (b"{", b"["):
        return f"{path} is no PyTorch profiler trace: it starts with {text[:16]!r}, not with JSON"
    return f"{path} is JSON but no PyTorch profiler trace: it has no list `traceEvents`"
