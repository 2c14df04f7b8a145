"""Time on the GPU as a union of intervals: kernels overlap, so their durations do not add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted disjoint intervals that cover the same instants."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(end - start for start, end in merged(intervals))


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The idle intervals between the first start and the last end."""
    busy = merged(intervals)
    return [(a[1], b[0]) for a, b in pairwise(busy)]


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Length that two unions have in common."""
    return covered(a) + covered(b) - covered([*a, *b])


def exposed(all_of: Sequence[Interval], some: frozenset[int] | set[int]) -> float:
    """Busy time that only the intervals numbered `some` account for: what removing them saves."""
    rest = [interval for number, interval in enumerate(all_of) if number not in some]
    return covered(all_of) - covered(rest)
