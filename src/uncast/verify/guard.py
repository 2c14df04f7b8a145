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
- `.numpy()`, `.tolist()`, `data_ptr()` and code compiled by `torch.compile` before the guard was entered.
- copies spread over many buffers that stay below the limit each and are never joined, and a product that copies (the cache
  times the identity).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uncast.latent.pool import PagedPool
from uncast.verify.taint import (
    CONCATENATIONS,
    COPIES,
    OVERWRITES,
    PARTIAL_WRITES,
    Spans,
    byte_range,
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
        watch: pools or tensors; each stands for its whole storage.
        limit_bytes: derived bytes that one buffer may hold.

    Raises (inside the block):
        CastError: at the first operation that exceeds the limit; the operation has run by then.
    """

    def __init__(self, watch: Sequence[PagedPool | torch.Tensor], *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes is {limit_bytes}: it cannot be negative")
        self.limit_bytes = limit_bytes
        self._pools: list[torch.UntypedStorage] = []
        self._watched: set[int] = set()
        self._spans: dict[int, Spans] = {}
        for item in watch:
            tensor = item.storage if isinstance(item, PagedPool) else item
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"watch holds a {type(item).__name__}: PagedPool and torch.Tensor are watched")
            self._pools.append(tensor.untyped_storage())
            self._watched.add(_key(tensor))

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
        return any(_key(leaf) in self._watched or _key(leaf) in self._spans for leaf in _tensors((args, kwargs)))

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.split("::")[1]
        written, inputs = _arguments(func, name, args, kwargs)
        derived = [tensor for tensor in inputs if self._is_derived(tensor)]
        known = {_key(tensor) for tensor in [*inputs, *written]}
        for target in written:
            self._put(func, name, target, derived, whole=name not in PARTIAL_WRITES)
        for output in _tensors(result):
            if _key(output) not in known:
                self._put(func, name, output, derived, whole=True)

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        if _key(tensor) in self._watched:
            return True
        spans = self._spans.get(_key(tensor))
        return spans is not None and spans.touches(*byte_range(tensor))

    def _put(self, func: Any, name: str, output: torch.Tensor, derived: list[torch.Tensor], *, whole: bool) -> None:
        """Notes what `output` holds now. A watched storage is what is derived from: what is written into it is no copy."""
        key = _key(output)
        if key in self._watched:
            return
        if derived and _swapping() and self._is_swap(name, output, derived):
            self._watched.add(key)
            self._spans.pop(key, None)
            _when_freed(output, self._watched.discard, key)
            return
        count = derived_bytes(name, output, derived)
        span = byte_range(output)
        if key not in self._spans:
            if not count:
                return
            self._spans[key] = Spans()
            _when_freed(output, self._spans.pop, key, None)
        spans = self._spans[key]
        if whole and output.is_contiguous():
            spans.clear(*span)
        spans.add(*span, count)
        if spans.total > self.limit_bytes:
            raise CastError(_user_frames(), str(func), spans.total, self.limit_bytes, output.dtype)

    def _is_swap(self, name: str, output: torch.Tensor, derived: list[torch.Tensor]) -> bool:
        return (name in COPIES or name in CONCATENATIONS) and all(
            _key(tensor) in self._watched and tensor.dtype == output.dtype for tensor in derived
        )


def _swapping() -> bool:
    return getattr(_local, "swaps", 0) > 0


def _when_freed(tensor: torch.Tensor, forget: Callable[..., Any], *args: Any) -> None:
    weakref.finalize(tensor.untyped_storage(), forget, *args).atexit = False


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _arguments(func: Any, name: str, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation writes to and those that it reads."""
    written: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for argument, value in schema_arguments(func, args, kwargs):
        tensors = _tensors(value)
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
