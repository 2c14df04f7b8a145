"""Cuts the bytes of a trace into its head and lists of whole events, without holding more than a few MiB.

Cuts fall where one event ends and the next begins. No line layout is assumed: Kineto and re-dumped files have at least three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

CHUNK = 4 << 20
MAX_HEAD = 64 << 20
MAX_EVENT = 32 << 20
_KEYS = rb"ph|cat|name|ts|pid|tid|dur|args|id|s|bp|sf|bind_id|cname"
BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*\"(?:" + _KEYS + rb")\"\s*:)")
_EVENTS_KEY = re.compile(rb"\"traceEvents\"\s*:\s*\[")
_OVERLAP = 4096


@dataclass
class Cutter:
    """Iterable over byte strings that hold whole events joined by commas; the last may end in what follows the array.

    Attributes:
        head: the JSON before the events (b"" for a bare list), known once the first chunk is out.
        found: whether an array of events was found at all.
        lost: bytes given up because no event ended in them.
    """

    blocks: Iterable[bytes]
    head: bytes = b""
    found: bool = False
    lost: int = 0
    start: bytes = field(default=b"", repr=False)

    def __iter__(self) -> Iterator[bytes]:
        buffer = bytearray()
        wanted = CHUNK
        for block in self.blocks:
            buffer += block
            if not self.found and not self._find_array(buffer):
                if len(buffer) > MAX_HEAD:
                    return
                continue
            if len(buffer) < wanted:
                continue
            cut = _last_boundary(buffer)
            if cut is None:
                wanted = 2 * len(buffer)
                if len(buffer) > MAX_EVENT:
                    self.lost += len(buffer)
                    buffer.clear()
                    wanted = CHUNK
                continue
            yield bytes(buffer[: cut[0]])
            del buffer[: cut[1]]
            wanted = CHUNK
        if self.found:
            yield bytes(buffer)

    def _find_array(self, buffer: bytearray) -> bool:
        if len(self.start) < 64:
            self.start = bytes(buffer[:64])
        opening = re.match(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?=[{\]])", buffer)
        match = opening or _EVENTS_KEY.search(buffer)
        if match is None:
            return False
        self.found = True
        if opening is None:
            self.head = bytes(buffer[: match.start()])
        del buffer[: match.end()]
        return True


def _last_boundary(buffer: bytearray) -> tuple[int, int] | None:
    """(end of an event, start of the next) of the last boundary in the buffer's second half, else in all of it."""
    step = _OVERLAP
    while True:
        start = max(0, len(buffer) - step)
        last = None
        for match in BOUNDARY.finditer(buffer, start):
            last = match
        if last is not None:
            return last.start() + 1, last.end()
        if start == 0:
            return None
        step *= 16
