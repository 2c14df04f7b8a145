"""Reads a trace file as a stream into columns (`Trace`): the fast path decodes chunks of events, the slow one single events.

Times arrive as microseconds, with decimals since 2024 and as integers before; `displayTimeUnit` only tells viewers what to
show. Category names are those of Kineto today, of 2021 (`Operator`, `Kernel`, ...) and of ROCm, which shares CUDA's.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from uncast.doctor.chunks import Cutter
from uncast.doctor.clean import MAX_AWAY_US, clean
from uncast.doctor.envelope import metadata, no_trace, trailer
from uncast.doctor.errors import TraceError
from uncast.doctor.repair import last_event, mend, split_events
from uncast.doctor.source import ByteSource, Progress
from uncast.doctor.trace import KERNEL, MEMCPY, MEMSET, Mark, Trace

_GPU = {
    "kernel": KERNEL, "Kernel": KERNEL, "gpu_memcpy": MEMCPY, "Memcpy": MEMCPY, "gpu_memset": MEMSET, "Memset": MEMSET,
    "mtia_ccp_events": KERNEL, "concurrent_kernel": KERNEL,
}  # fmt: skip
_LAUNCH = {"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver", "xpu_runtime", "mtia_runtime"}
_OP = {"cpu_op", "Operator"}
_FRAME = {"python_function", "Python"}
_MARK = {"user_annotation", "cpu_user_annotation"}
_NONE: Raw = Raw(b"")
_LARGEST = 2**63 - 1
MAX_TIME_US = 1e17
"""Beyond every clock: microseconds since 1970 are 2e15."""


class Args(Struct, gc=False):
    """The fields of an event's `args` that are used; any JSON value is accepted and checked on use."""

    correlation: Any = None
    stream: Any = None
    bytes: Any = None
    kernel: Any = None
    kernel_file: Any = None
    grid: Raw = _NONE
    block: Raw = _NONE
    dims: Raw = msgspec.field(name="Input Dims", default=_NONE)
    old_dims: Raw = msgspec.field(name="Input dims", default=_NONE)
    types: Raw = msgspec.field(name="Input type", default=_NONE)
    strides: Raw = msgspec.field(name="Input Strides", default=_NONE)
    concrete: Raw = msgspec.field(name="Concrete Inputs", default=_NONE)
    call_stack: Any = msgspec.field(name="Call stack", default=None)


class Event(Struct, gc=False):
    """One entry of `traceEvents`."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


_EMPTY = Args()
_events = msgspec.json.Decoder(list[Event])
_event = msgspec.json.Decoder(Event)


def read_trace(path: Path, progress: Progress | None = None) -> Trace:
    """The trace at `path`.

    Args:
        progress: called with (bytes read, bytes in all) of the file.

    Raises:
        TraceError: not a trace; one sentence that says what it is instead.
    """
    source = ByteSource(path, progress)
    cutter = Cutter(source)
    trace = Trace(str(path))
    enabled = gc.isenabled()
    gc.disable()
    try:
        _read(cutter, trace)
    finally:
        if enabled:
            gc.enable()
    if not cutter.found:
        raise TraceError(no_trace(path, cutter.start, source.damage))
    if cutter.lost:
        trace.skipped["bytes in which no event ended"] += cutter.lost
    if source.damage:
        trace.notes.append(f"{source.damage}: what came before it was read")
    trace.meta.update(metadata(cutter.head))
    clean(trace)
    return trace


def _read(cutter: Cutter, trace: Trace) -> None:
    store = _Store(trace)
    previous: bytes | None = None
    for chunk in cutter:
        if previous is not None:
            _feed(previous, store)
        previous = chunk
        trace.bytes_read += len(chunk)
    if previous is not None:
        _feed_last(previous, store)


def _feed(chunk: bytes, store: _Store) -> None:
    try:
        events = _events.decode(b"[" + chunk + b"]")
    except (msgspec.DecodeError, RecursionError):
        for text in split_events(chunk):
            _feed_one(text, store)
        return
    for event in events:
        store.add(event)


def _feed_last(chunk: bytes, store: _Store) -> None:
    """The file's end: whole events, one that may be cut off, and what follows the array."""
    candidates = list(split_events(chunk))
    tail = candidates.pop()
    ended = False
    if candidates:
        whole = b",".join(candidates)
        try:
            for event in _events.decode(b"[" + whole + b"]"):
                store.add(event)
        except (msgspec.DecodeError, RecursionError):
            for text in candidates:
                if ended:
                    store.trace.skipped["entries after the events"] += 1
                    continue
                event_text, rest = last_event(text)
                ended = event_text != b"" and rest.lstrip()[:1] == b"]"
                _feed_one(event_text if ended else text, store)
    if ended or not tail.strip():
        return
    text, rest = last_event(tail.lstrip())
    if text:
        _feed_one(text, store)
        store.trace.meta.update(trailer(rest))
    elif tail.strip()[:1] not in (b"]", b"}") and not _feed_one(tail, store, quiet=True):
        store.trace.skipped["events cut off at the end"] += 1


def _feed_one(text: bytes, store: _Store, quiet: bool = False) -> bool:
    try:
        store.add(_event.decode(text))
        return True
    except (msgspec.DecodeError, RecursionError):
        pass
    mended = 0
    for value in mend(text):
        if not isinstance(value.get("args"), dict):
            value.pop("args", None)
        try:
            store.add(_event.decode(msgspec.json.encode(value)))
            mended += 1
        except (msgspec.MsgspecError, RecursionError, OverflowError, ValueError):
            continue
    if mended:
        store.trace.skipped["events mended"] += mended
    elif not quiet:
        store.trace.skipped["events that are no JSON"] += 1
    return mended > 0


class _Store:
    """Sorts events into the trace's columns."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._grids: dict[tuple[bytes, bytes], int] = {}

    def add(self, event: Event) -> None:
        trace = self.trace
        trace.events += 1
        if event.ph != "X":
            return
        category = event.cat
        if category == "ac2g" or not isinstance(category, str):
            return
        try:
            ts, dur = float(event.ts), float(event.dur)
        except (TypeError, ValueError, OverflowError):
            trace.skipped["events without time"] += 1
            return
        if not (abs(ts) < MAX_TIME_US and 0 <= dur < MAX_AWAY_US):  # false for NaN too
            trace.skipped["events with an impossible time"] += 1
            return
        name = event.name if isinstance(event.name, str) else _text(event.name)
        lane = trace.lanes.id((_thread(event.pid), _thread(event.tid)))
        args = event.args or _EMPTY
        if category in _OP:
            trace.ops.add(ts, dur, trace.names.id(name), lane)
            trace.ops.sig.append(self._signature(args))
        elif category in _FRAME:
            trace.frames.add(ts, dur, trace.names.id(name), lane)
        elif category in _LAUNCH:
            self._launch(ts, dur, name, lane, args)
        elif category in _GPU:
            self._kernel(ts, dur, name, args, event, _GPU[category])
        elif category in _MARK:
            trace.marks.append(Mark(name, ts, dur, lane))

    def _kernel(self, ts: float, dur: float, name: str, args: Args, event: Event, kind: int) -> None:
        trace, kernels = self.trace, self.trace.kernels
        stream = args.stream if args.stream is not None else event.tid
        kernels.add(ts, dur, trace.names.id(name), trace.lanes.id((_thread(event.pid), _thread(stream))))
        kernels.corr.append(_whole(args.correlation, -1))
        kernels.size.append(max(0, _whole(args.bytes, 0)))
        kernels.grid.append(self._grid(args))
        kernels.kind.append(kind)

    def _launch(self, ts: float, dur: float, name: str, lane: int, args: Args) -> None:
        trace, launches = self.trace, self.trace.launches
        launches.add(ts, dur, trace.names.id(name), lane)
        launches.corr.append(_whole(args.correlation, -1))
        launches.grid.append(self._grid(args))
        launches.kernel.append(trace.names.id(args.kernel) if isinstance(args.kernel, str) else -1)

    def _signature(self, args: Args) -> int:
        return self.trace.signatures.id(
            (
                bytes(args.dims) or bytes(args.old_dims),
                bytes(args.types),
                bytes(args.strides),
                bytes(args.concrete) if args.dims or args.old_dims else b"",
                args.kernel_file if isinstance(args.kernel_file, str) else "",
                args.call_stack if isinstance(args.call_stack, str) else "",
            )
        )

    def _grid(self, args: Args) -> int:
        key = (bytes(args.grid), bytes(args.block))
        number = self._grids.get(key)
        if number is None:
            number = self._grids[key] = self.trace.grids.id((*_triple(key[0]), *_triple(key[1])))
        return number


def _thread(value: Any) -> int | str:
    return value if isinstance(value, int | str) else str(value)[:80]


def _text(value: Any) -> str:
    return "(no name)" if value is None else str(value)[:200]


def _whole(value: Any, default: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -_LARGEST <= value <= _LARGEST else default
    if isinstance(value, str | float):
        try:
            return _whole(int(value), default)
        except (ValueError, OverflowError):
            return default
    return default


def _triple(raw: bytes) -> tuple[int, int, int]:
    try:
        value = msgspec.json.decode(raw) if raw else None
    except (msgspec.DecodeError, RecursionError):
        return (0, 0, 0)
    if not isinstance(value, list) or not 1 <= len(value) <= 3:
        return (0, 0, 0)
    numbers = [v if isinstance(v, int) and 0 <= v < 2**32 else 0 for v in value]
    x, y, z = [*numbers, 1, 1][:3]
    return (x, y, z)
