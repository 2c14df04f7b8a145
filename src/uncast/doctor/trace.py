"""A trace in columns: what the doctor keeps of a file's events. All times are microseconds.

A million events must fit in a few tens of MB, so events are rows of `array`s and every string or shape is stored once.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

KERNEL, MEMCPY, MEMSET = 0, 1, 2


class Interner(Generic[T]):
    """Values to small integers and back."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._ids: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> T:
        return self.values[index]

    def id(self, value: T) -> int:
        number = self._ids.get(value)
        if number is None:
            number = self._ids[value] = len(self.values)
            self.values.append(value)
        return number

    def find(self, value: T) -> int | None:
        return self._ids.get(value)


class Spans:
    """Columns that every kind of event has: start, duration, name, lane (thread or stream)."""

    def __init__(self) -> None:
        self.ts, self.dur = array("d"), array("d")
        self.name, self.lane = array("i"), array("i")

    def __len__(self) -> int:
        return len(self.ts)

    def add(self, ts: float, dur: float, name: int, lane: int) -> None:
        self.ts.append(ts)
        self.dur.append(dur)
        self.name.append(name)
        self.lane.append(lane)

    def end(self, index: int) -> float:
        return self.ts[index] + self.dur[index]

    def columns(self) -> list[Any]:
        """All columns, also those of a subclass."""
        return list(vars(self).values())

    def keep(self, indices: Sequence[int]) -> None:
        """Leaves only these events, in this order."""
        for name, column in vars(self).items():
            setattr(self, name, array(column.typecode, [column[i] for i in indices]))


class Kernels(Spans):
    """What ran on the GPU. `grid`: id in `Trace.grids`; `size`: bytes of a memcpy or memset; `kind`: KERNEL, MEMCPY, MEMSET."""

    def __init__(self) -> None:
        super().__init__()
        self.corr, self.size = array("q"), array("q")
        self.grid, self.kind = array("i"), array("b")


class Launches(Spans):
    """Calls of the CUDA or HIP runtime or driver. `kernel`: id of the kernel's name where the call has it (ROCm), else -1."""

    def __init__(self) -> None:
        super().__init__()
        self.corr = array("q")
        self.grid, self.kernel = array("i"), array("i")


class Ops(Spans):
    """CPU operators. `sig`: id in `Trace.signatures`."""

    def __init__(self) -> None:
        super().__init__()
        self.sig = array("i")


@dataclass(frozen=True)
class Mark:
    """An annotation on a CPU thread."""

    name: str
    ts: float
    dur: float
    lane: int

    @property
    def end(self) -> float:
        return self.ts + self.dur


@dataclass(frozen=True)
class Signature:
    """Shapes and dtypes of an operator's arguments as the profiler wrote them; empty where it did not."""

    dims: list[Any] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)
    strides: list[Any] = field(default_factory=list)
    concrete: list[Any] = field(default_factory=list)
    kernel_file: str = ""
    call_stack: str = ""


SignatureKey = tuple[bytes, bytes, bytes, bytes, str, str]
Grid = tuple[int, int, int, int, int, int]
"""grid x, y, z and block x, y, z; zeros where unknown."""


@dataclass
class Trace:
    """One rank's trace.

    Attributes:
        meta: the file's top-level fields that precede the events.
        skipped: reason -> events or bytes not used.
        notes: sentences about damage, for the report.
    """

    path: str
    kernels: Kernels = field(default_factory=Kernels)
    launches: Launches = field(default_factory=Launches)
    ops: Ops = field(default_factory=Ops)
    frames: Spans = field(default_factory=Spans)
    marks: list[Mark] = field(default_factory=list)
    names: Interner[str] = field(default_factory=Interner)
    lanes: Interner[tuple[int | str, int | str]] = field(default_factory=Interner)
    grids: Interner[Grid] = field(default_factory=Interner)
    signatures: Interner[SignatureKey] = field(default_factory=Interner)
    meta: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    bytes_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    _decoded: dict[int, Signature] = field(default_factory=dict, repr=False)

    def signature(self, number: int) -> Signature:
        """The decoded signature `number`; lists that are no JSON decode to empty ones."""
        known = self._decoded.get(number)
        if known is None:
            *lists, kernel_file, stack = self.signatures[number]
            dims, types, strides, concrete = (_as_list(raw) for raw in lists)
            known = Signature(dims, types, strides, concrete, str(kernel_file), str(stack))
            self._decoded[number] = known
        return known

    @property
    def damage(self) -> str:
        """What the reader knows to be missing from the file, "" if nothing is."""
        return "; ".join([*self.notes, *(f"{n:,} {reason}" for reason, n in self.skipped.items())])

    @property
    def gpu_name(self) -> str:
        """The first named device, "" if none is."""
        devices = self.meta.get("deviceProperties")
        for device in devices if isinstance(devices, list) else []:
            if isinstance(device, dict) and isinstance(device.get("name"), str) and device["name"]:
                return str(device["name"])
        return ""

    @property
    def rank(self) -> int | None:
        info = self.meta.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) else None


def _as_list(raw: object) -> list[Any]:
    if not isinstance(raw, bytes) or not raw:
        return []
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []
