"""Stop strings over streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may be the beginning of a stop string; the stop string itself is never emitted.

    The stop string that is complete first wins (of two that end together, the longer), so the result does not depend on how
    the text is cut into pieces.

    Attributes:
        matched: the stop string that was met, None before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `ValueError` on an empty stop string."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = list(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was met."""
        self._held += text
        hits = [(self._held.find(stop) + len(stop), stop) for stop in self._stops if stop in self._held]
        if hits:
            end, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            shown, self._held, self.matched = self._held[: end - len(stop)], "", stop
            return shown, True
        keep = self._longest_prefix()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What is still held back when generation ends without a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _longest_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
