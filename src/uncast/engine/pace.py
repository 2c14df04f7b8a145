"""A watch over steps on a device that may never end, because another process does not do its part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

INTERVAL_S = 0.25


class Done(Protocol):
    """What the device reaches after a step, such as a CUDA event."""

    def query(self) -> bool: ...


class Pace:
    """Calls `give_up` if the last step that was noted is not done in time. Steps end in the order in which they were noted."""

    def __init__(self, limit_s: float, give_up: Callable[[str], object], who: str) -> None:
        """Args:
        give_up: gets a sentence about `who`.
        """
        self._limit_s, self._give_up, self._who = limit_s, give_up, who
        self._last: tuple[Done, float] | None = None
        self._noted, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, event: Done) -> None:
        self._last = (event, time.monotonic())
        self._noted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="uncast-pace", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._noted.set()

    def _watch(self) -> None:
        while self._noted.wait() and not self._over.is_set():
            self._noted.clear()
            while (last := self._last) is not None and not self._over.is_set():
                try:
                    if last[0].query():
                        break
                except RuntimeError as error:
                    self._give_up(f"{self._who}: a step failed ({str(error).strip().splitlines()[0]})")
                    return
                if time.monotonic() - last[1] > self._limit_s:
                    late = f"a step has not ended in {self._limit_s:g} s: another rank does not do its part"
                    self._give_up(f"{self._who}: {late}")
                    return
                self._over.wait(INTERVAL_S)
