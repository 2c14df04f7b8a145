"""The slow path: events of a chunk that does not decode as a whole, one by one, mended where possible.

Known faults (kineto and pytorch issues): unescaped quotes and control characters in names, NaN, inf and N/A as numbers, log
lines between events, a cut end, other keys after the array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from uncast.doctor.chunks import BOUNDARY

MAX_EVENT_TEXT = 1 << 20
_LOG_LINE = re.compile(rb"^[ \t]*(?:INFO|WARNING|WARN|ERROR|DEBUG|STAGE|USDT)[:\- (\[][^\n{}]*$", re.MULTILINE)
_BAD_NUMBER = re.compile(rb"([:\[,]\s*)(?:[-+]?(?:nan|inf|infinity)|n/a)(?=\s*[,}\]])", re.IGNORECASE)
_MISSING_VALUE = re.compile(rb":\s*(?=[,}])")
_CONTROL = re.compile(rb"[\x00-\x1f]")


def split_events(chunk: bytes) -> Iterator[bytes]:
    """Candidate events of a chunk."""
    start = 0
    for match in BOUNDARY.finditer(chunk):
        yield chunk[start : match.start() + 1]
        start = match.end()
    yield chunk[start:]


def last_event(text: bytes) -> tuple[bytes, bytes]:
    """Splits the end of a file into its last event (b"" if it is cut off) and what follows it."""
    depth, inside, escaped = 0, False, False
    for position, byte in enumerate(text[:MAX_EVENT_TEXT]):
        if inside:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                inside = False
        elif byte == 0x22:
            inside = True
        elif byte in b"{[":
            depth += 1
        elif byte in b"}]":
            depth -= 1
            if depth == 0:
                return text[: position + 1], text[position + 1 :]
            if depth < 0:
                return b"", text[position:]
    return b"", text


def mend(text: bytes) -> list[dict[str, Any]]:
    """Events (one, rarely more) of a text that is no valid JSON, or an empty list."""
    if len(text) > MAX_EVENT_TEXT:
        return []
    text = _MISSING_VALUE.sub(b":null", _BAD_NUMBER.sub(rb"\1null", _LOG_LINE.sub(b"", text))).strip().strip(b",")
    for attempt in (text, _escape_quotes(_CONTROL.sub(b" ", text))):
        try:
            value = json.loads(b"[" + attempt + b"]" if attempt else b"[]", strict=False, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            try:
                value = json.loads(
                    "[" + attempt.decode("utf-8", errors="replace") + "]", strict=False, parse_constant=lambda _: None
                )
            except (ValueError, RecursionError):
                continue
        return [event for event in value if isinstance(event, dict)]
    return []


def _escape_quotes(text: bytes) -> bytes:
    """Escapes quotes that neither open nor close a string: those with no JSON punctuation beside them."""
    out = bytearray()
    inside = False
    for position, byte in enumerate(text):
        if byte == 0x22 and (position == 0 or text[position - 1] != 0x5C):
            if not inside:
                inside = True
            elif _closes(text, position):
                inside = False
            else:
                out += b"\\"
        out.append(byte)
    return bytes(out)


_AFTER_STRING = re.compile(rb"\"\s*(?:\}|\]|$|:\s*[\"\[{\d\-tfnTFN]|,\s*[\"\[{\]}\d\-])")


def _closes(text: bytes, position: int) -> bool:
    return _AFTER_STRING.match(text, position) is not None
