"""How long a start took, phase by phase."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PHASES = {"imports": "imports", "weights": "weights", "probe": "pool and probe", "warm_up": "warm-up"}


class StartClock:
    """Seconds of the phases of a start, one after the other since the process began.

    Attributes:
        seconds: by phase, of those that are over; names of `PHASES`.
        kernels: tells how many kernels this process has "compiled", and "found" compiled; None where it uses none.
    """

    def __init__(self, age_s: float | None = None) -> None:
        """age_s: seconds since the start began; None: since the process did."""
        self.seconds: dict[str, float] = {}
        self.kernels: Callable[[], Mapping[str, int]] | None = None
        self._last = time.monotonic() - (process_age() if age_s is None else age_s)

    def mark(self, phase: str) -> None:
        """Ends a phase, which began where the one before ended."""
        now = time.monotonic()
        self.seconds[phase], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def describe(self) -> str:
        """One line."""
        parts = ", ".join(f"{PHASES[phase]} {seconds:.1f}" for phase, seconds in self.seconds.items())
        line = f"started in {self.total:.1f} s: {parts}"
        if self.kernels is not None:
            counts = self.kernels()
            line += f"; {counts['compiled']} kernels compiled, {counts['found']} found compiled"
        return line


def process_age() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (AttributeError, IndexError, OSError, ValueError):  # not Linux
        return 0.0
    return max(0.0, age)
