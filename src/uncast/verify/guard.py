"""`guard`: raises as soon as an operation has put more than a few pages' worth of a watched pool into another buffer.

    with uncast.guard(watch=[pool]):
        runner.step(chunks)          # CastError: ... at backends/_recast.py:36: aten.copy_ ... 857 MB ... torch.bfloat16

Bytes are followed by storage through torch's dispatch mode: views share their storage; a copy, cast or gather of derived bytes
is derived again, also when it was small; products and sums of the cache (scores, attention outputs) are not. The rule of each
kind of operation is in `uncast.verify.taint`.

What it cannot see:
- inside one operation that is not torch's own: Triton, C++ and CUDA kernels called by pointer. It sees the buffers that they
  are given, not what they write there.
- the replay of a CUDA graph. Guard the capture instead: the operations are those.
- other threads: the dispatch mode belongs to the thread that entered it. Enter the guard in the engine's thread.
- copies made outside torch's operations: numpy's of a `.numpy()` array, `.tolist()`, `torch.save` and pickle, what reads
  `data_ptr()`; and code compiled by `torch.compile` before the guard was entered. A tensor that only shares the pool's memory
  (`from_dlpack`, `from_numpy` of `.numpy()`) is known by its address.
- copies spread over many buffers that stay below the limit each and are never joined, and a product that copies (the cache
  times the identity).

What it catches although nothing keeps the copy: `isfinite`, `quantile` and the like build a temporary as large as their input.
Ask `isnan`, or page by page.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from uncast.latent.pool import PagedPool
from uncast.verify.buffers import addresses, anchor, byte_range, key_of, key_of_anchor, tensors_of
from uncast.verify.taint import (
    CONCATENATIONS,
    COPIES,
    OVERWRITES,
    PARTIAL_WRITES,
    Spans,
    derived_bytes,
    schema_arguments,
)

DEFAULT_LIMIT_BYTES = 2 * 2**20
"""910 rows of 576 float32 numbers (14 pages of 64): above the scratch of a backend that reads block by block."""

_TORCH = str(Path(torch.__file__).parent)
_HERE = (__file__,)
_local = threading.local()


class CastError(RuntimeError):
    """An operation's output holds more bytes of a watched pool than allowed; one sentence.

    Attributes:
        filename, lineno: the line of user code that ran the operation.
        operation: torch's name of it.
        derived_bytes: derived bytes in the output's buffer.
        dtype: of the output.
    """

    def __init__(
        self, frames: list[tuple[str, int]], operation: str, derived: int, limit: int, dtype: torch.dtype
    ) -> None:
        self.filename, self.lineno = frames[0] if frames else ("<unknown>", 0)
        self.operation, self.derived_bytes, self.dtype = operation, derived, dtype
        callers = ", ".join(f"{name}:{line}" for name, line in frames[1:4])
        super().__init__(
            f"{self.filename}:{self.lineno}: {operation} left {derived} bytes of the KV pool in another buffer as {dtype}, and "
            f"{limit} are allowed: read the pool as it is stored" + (f" (called from {callers})" if callers else "")
        )


@contextmanager
def allow_swap() -> Iterator[None]:
    """Inside, copies of pool bytes as they are stored (same dtype: copy_, clone, a gather of pages) are allowed, as preemption
    needs them to move pages to the host. The copy is then watched like the pool: casting it raises. Casts raise here too.

    Belongs to the calling thread; does nothing without a guard.
    """
    _local.swaps = getattr(_local, "swaps", 0) + 1
    try:
        yield
    finally:
        _local.swaps -= 1


class guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that watches pools.

    Args:
        watch: pools or tensors, or a single one; each stands for its whole storage.
        limit_bytes: derived bytes that one buffer may hold, a whole number.

    Raises:
        TypeError: `watch` holds something else.
        ValueError: `limit_bytes` is no whole number, or negative.

    Raises (inside the block):
        CastError: at the first operation that exceeds the limit; the operation has run by then.
    """

    def __init__(
        self,
        watch: PagedPool | torch.Tensor | Iterable[PagedPool | torch.Tensor],
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool) or limit_bytes < 0:
            raise ValueError(f"limit_bytes is {limit_bytes!r}: a whole number, 0 or more, is needed")
        self.limit_bytes = limit_bytes
        self._pools: list[torch.UntypedStorage | torch.Tensor] = []
        self._watched: set[int] = set()
        self._spans: dict[int, Spans] = {}
        self._places: dict[int, tuple[int, int]] = {}
        for tensor in _watchable(watch):
            self._pools.append(anchor(tensor))
            self._watched.add(key_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or not self._concerns(args, kwargs):
            return func(*args, **kwargs)
        with self:  # under inference_mode compound operations arrive whole; their parts say what is copied
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        self._record(func, args, kwargs, result)
        return result

    def _concerns(self, args: Any, kwargs: Any) -> bool:
        return any(self._known(self._locate(leaf)[0]) for leaf in tensors_of((args, kwargs)))

    def _known(self, key: int) -> bool:
        return key in self._watched or key in self._spans

    def _locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The key of the known storage in whose memory the tensor lies, and the bytes from that one's start to the tensor's
        own storage, which differs if the memory came back through another library; else the tensor's own key and 0."""
        key = key_of(tensor)
        if self._known(key):
            return key, 0
        start, end = addresses(anchor(tensor))
        if start == end:
            return key, 0
        pools = [(key_of_anchor(holder), addresses(holder)) for holder in self._pools]
        for other, (low, high) in (*pools, *self._places.items()):
            if low <= start < high:
                return other, start - low
        return key, 0

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.split("::")[1]
        written, inputs = _arguments(func, name, args, kwargs)
        derived = [tensor for tensor in inputs if self._is_derived(tensor)]
        known = {key_of(tensor) for tensor in [*inputs, *written]}
        for target in written:
            self._put(func, name, target, derived, whole=name not in PARTIAL_WRITES)
        for output in tensors_of(result):
            if key_of(output) not in known:
                self._put(func, name, output, derived, whole=True)

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        key, shift = self._locate(tensor)
        if key in self._watched:
            return True
        start, end = byte_range(tensor)
        spans = self._spans.get(key)
        return spans is not None and spans.touches(start + shift, end + shift)

    def _put(self, func: Any, name: str, output: torch.Tensor, derived: list[torch.Tensor], *, whole: bool) -> None:
        """Notes what `output` holds now. A watched storage is what is derived from: what is written into it is no copy."""
        key, shift = self._locate(output)
        if key in self._watched:
            return
        if derived and _swapping() and self._is_swap(name, output, derived):
            self._watched.add(key)
            self._spans.pop(key, None)
            self._remember(key, output, self._watched.discard)
            return
        count = derived_bytes(name, output, derived)
        start, end = (bound + shift for bound in byte_range(output))
        if key not in self._spans:
            if not count:
                return
            self._spans[key] = Spans()
            self._remember(key, output, self._spans.pop, None)
        spans = self._spans[key]
        if whole and _is_dense(output):
            spans.clear(start, end)
        spans.add(start, end, count)
        if spans.total > self.limit_bytes:
            raise CastError(_user_frames(), str(func), spans.total, self.limit_bytes, output.dtype)

    def _remember(self, key: int, tensor: torch.Tensor, forget: Callable[..., Any], *args: Any) -> None:
        """Keeps the addresses of a storage, and forgets it when it is freed."""
        holder = anchor(tensor)
        self._places[key] = addresses(holder)
        weakref.finalize(holder, forget, key, *args).atexit = False
        weakref.finalize(holder, self._places.pop, key, None).atexit = False

    def _is_swap(self, name: str, output: torch.Tensor, derived: list[torch.Tensor]) -> bool:
        return (name in COPIES or name in CONCATENATIONS) and all(
            self._locate(tensor)[0] in self._watched and tensor.dtype == output.dtype for tensor in derived
        )


def _swapping() -> bool:
    return getattr(_local, "swaps", 0) > 0


def _is_dense(tensor: torch.Tensor) -> bool:
    return isinstance(anchor(tensor), torch.Tensor) or tensor.is_contiguous()


def _watchable(watch: Any) -> list[torch.Tensor]:
    """The tensors to watch; raises `TypeError`."""
    items = [watch] if isinstance(watch, PagedPool | torch.Tensor) or not isinstance(watch, Iterable) else list(watch)
    tensors = [tensor for item in items for tensor in (item.storages if isinstance(item, PagedPool) else (item,))]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"watch holds a {type(tensor).__name__}: PagedPool and torch.Tensor are watched")
    return tensors_of(tensors)


def _arguments(func: Any, name: str, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation writes to and those that it reads."""
    written: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for argument, value in schema_arguments(func, args, kwargs):
        tensors = tensors_of(value)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors
            if name in OVERWRITES or name in PARTIAL_WRITES or argument.kwarg_only:
                continue
        inputs += tensors
    return written, inputs


def _user_frames() -> list[tuple[str, int]]:
    """Files and lines outside torch and this module, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename not in _HERE and not filename.startswith((_TORCH, "<")):
            frames.append((filename, frame.f_lineno))
        frame = frame.f_back
    return frames
