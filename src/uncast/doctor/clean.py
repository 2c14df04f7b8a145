"""Events that cannot be true are dropped from a trace before it is judged: times far from all others, and exact repeats.

A single wild time stretches a step beyond all sense, and a file that holds every event twice (two gzip members of the same run,
a merge with itself) doubles every number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from uncast.doctor.trace import Mark, Spans, Trace

MAX_AWAY_US = 1e11
"""28 hours: no profile is longer."""
FAR, REPEATED = "events with a time far from all others", "events that repeat another exactly"
_SAMPLE = 50_000


def clean(trace: Trace) -> None:
    """Drops both kinds from all columns; counts them in `skipped` and says in `notes` that events were repeated."""
    _drop_far(trace)
    _drop_repeats(trace)


def _drop_far(trace: Trace) -> None:
    columns = (trace.kernels, trace.launches, trace.ops, trace.frames)
    times = next((c.ts for c in columns if len(c)), None)
    if times is None:
        return
    sample = sorted(times[:: len(times) // _SAMPLE + 1])
    low, high = sample[len(sample) // 2] - MAX_AWAY_US, sample[len(sample) // 2] + MAX_AWAY_US
    for column in columns:
        if len(column) and not (low <= min(column.ts) and max(column.ts) <= high):
            _keep(trace, column, [i for i, ts in enumerate(column.ts) if low <= ts <= high], FAR)
    near = [m for m in trace.marks if low <= m.ts <= high]
    _count(trace, FAR, len(trace.marks) - len(near))
    trace.marks = near


def _drop_repeats(trace: Trace) -> None:
    """GPU events that are equal in start, length, name, stream and correlation cannot be two; nor can launches. The CPU's
    other events are searched only where such are found. Whole microseconds (old profilers) may make two short ones equal."""
    repeated = set(_repeats(trace.kernels))
    launches = set(_repeats(trace.launches))
    sure = any(_exact(trace.kernels, i) for i in repeated) or any(_exact(trace.launches, i) for i in launches)
    if not sure:
        return
    kernels = len(trace.kernels)
    for column in (trace.kernels, trace.launches, trace.ops, trace.frames):
        gone = set(_repeats(column))
        if gone:
            _keep(trace, column, [i for i in range(len(column)) if i not in gone], REPEATED)
    seen: dict[Mark, None] = dict.fromkeys(trace.marks)
    _count(trace, REPEATED, len(trace.marks) - len(seen))
    trace.marks = list(seen)
    trace.notes.append(
        f"{trace.skipped[REPEATED]:,} events repeat another exactly ({len(repeated):,} of {kernels:,} GPU events) and were "
        "left out: does the file hold the same run twice?"
    )


def _repeats(column: Spans) -> Iterator[int]:
    """Events equal in every column to one before them in the file."""
    values = column.columns()
    order = sorted(range(len(column)), key=column.ts.__getitem__)
    seen: set[tuple[float, ...]] = set()
    for before, index in pairwise(order):
        if column.ts[before] != column.ts[index]:
            seen.clear()
            continue
        if not seen:
            seen.add(tuple(c[before] for c in values))
        key = tuple(c[index] for c in values)
        if key in seen:
            yield index
        seen.add(key)


def _exact(column: Spans, index: int) -> bool:
    """Whether rounding to whole microseconds cannot have made it equal to another."""
    return column.dur[index] >= 2 or not (column.ts[index].is_integer() and column.dur[index].is_integer())


def _keep(trace: Trace, column: Spans, indices: list[int], reason: str) -> None:
    _count(trace, reason, len(column) - len(indices))
    column.keep(indices)


def _count(trace: Trace, reason: str, number: int) -> None:
    if number:
        trace.skipped[reason] += number
