"""A GPU without a GPU: fake CUDA tensors, which have shapes, dtypes and a device but no values.

    with fake_cuda(arch=90) as gpu:
        model = gpu.move(model)                  # dataclasses, lists and attributes of objects are walked
        with gpu.no_sync():                      # what a CUDA graph forbids is an error from here on
            model.forward(batch)
        gpu.launches                             # what would have been launched, in order

What fails here fails on a GPU: tensors of two devices in one operation, values that have to come to the host, a kernel's
argument that is not on the GPU. Kernels are not compiled (`uncast.kernels.variants` does that) and nothing is computed, but
for small integers: those a host list was turned into keep their values, so that planning can read lengths.

A launch is one entry for each kernel of ours and each torch operation that is no view; what torch launches inside one operation
(the two of a split product, the three of a sort) is not seen.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from uncast.engine import graphs
from uncast.numerics import e2m1

_SMALL = 1 << 14
_SHARED = {80: 167_936, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")
_FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias")
_TO_HOST = ("numpy", "tolist", "item", "__int__", "__float__", "__index__", "__bool__")
_SHAPED_BY_VALUES = ("nonzero", "masked_select", "argwhere", "unique", "bincount")
_OPTIONS = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "enable_fp_fusion",
    "launch_pdl",
    "maxnreg",
    "launch_cooperative_grid",
)
_NO_FP8 = (
    "mul",
    "add",
    "sub",
    "div",
    "eq",
    "lt",
    "gt",
    "sum",
    "where",
    "abs",
    "amax",
    "topk",
    "sort",
    "mm",
    "bmm",
    "addmm",
)


class HostSync(AssertionError):
    """Something that makes the host wait for the GPU, or that a graph capture forbids."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel of ours ("triton") or an operation of torch's ("aten", "copy" between devices)."""

    kind: str
    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


class _Mode(FakeTensorMode):
    avoid_device_init = True  # whatever `torch.cuda.is_available` is made to say


class FakeGpu:
    """What a test sees of the pretended GPU.

    Attributes:
        launches: everything so far; clear it before what is to be counted.
    """

    def __init__(self, mode: FakeTensorMode, arch: int) -> None:
        self.mode, self.arch = mode, arch
        self.launches: list[Launch] = []
        self.forbidden = False
        self._addresses: dict[int, tuple[Any, int]] = {}
        self._next = 1 << 32

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in a graph capture: `HostSync` for a value that comes to the host and for a copy from or to its memory."""
        before, self.forbidden = self.forbidden, True
        try:
            yield
        finally:
            self.forbidden = before

    def names(self) -> list[str]:
        return [launch.name for launch in self.launches]

    def sync(self, what: str) -> None:
        if self.forbidden:
            raise HostSync(f"{what} makes the host wait for the GPU")

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def move(self, value: Any) -> Any:
        """A copy of `value` in which every tensor, of whatever device, is a fake one on the GPU with its shape and strides."""
        return _moved(value, {})

    def address(self, tensor: torch.Tensor) -> int:
        """An address of its own for each storage, from a 512-byte boundary as the allocator gives it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._addresses:
            self._addresses[key] = (storage, self._next)
            self._next += (storage.nbytes() + 1023) // 512 * 512
        return self._addresses[key][1] + tensor.storage_offset() * tensor.element_size()


def _moved(value: Any, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, torch.Tensor):
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        new = type(value)(_moved(item, seen) for item in value)
    elif isinstance(value, dict):
        new = {key: _moved(item, seen) for key, item in value.items()}
    elif type(value).__module__.startswith("uncast") and hasattr(value, "__dict__"):
        new = object.__new__(type(value))
        seen[id(value)] = new
        for name, item in vars(value).items():
            object.__setattr__(new, name, None if name == "cache" else _moved(item, seen))
    else:
        return value
    seen[id(value)] = new
    return new


class _Dispatch(TorchDispatchMode):
    """Sees every operation before the fake tensors do: counts it, refuses syncs, and keeps small integers' values."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0]
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = self._known(func, name, tensors, args, kwargs)
        if name in _SYNCS or (name == "index" and any(x.dtype == torch.bool for x in tensors[1:])):
            if any(x.is_cuda for x in tensors):
                self.gpu.sync(name)
            if name == "_local_scalar_dense" and known is not None:
                return known
        out = func(*args, **kwargs)
        self._log(func, name, tensors, out)
        for made, value in zip(_tensors(out), _tensors(known), strict=False):
            made._known = value  # type: ignore[attr-defined]
        return out

    def _known(self, func: Any, name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The result on values that are known, else None."""
        values = {id(x): getattr(x, "_known", None if isinstance(x, FakeTensor) else x) for x in tensors}
        schema = func._schema
        if any(v is None or v.numel() > _SMALL or v.is_cuda for v in values.values()) or (
            not tensors and "empty" in name
        ):
            for argument, given in zip(schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, FakeTensor):
                    given._known = None  # type: ignore[attr-defined]
            return None
        if "rand" in name or "empty" in name:
            return None
        swap = functools.partial(torch.utils._pytree.tree_map, lambda x: _host(values.get(id(x), x)))
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if not tensors and not _is_small(args):
                return None
            return func(*swap(args), **swap(kwargs))

    def _log(self, func: Any, name: str, tensors: list[torch.Tensor], out: Any) -> None:
        made = _tensors(out)
        devices = {x.device.type for x in (*tensors, *made)}
        if devices == {"cpu"} or not devices:
            return
        if devices == {"cpu", "cuda"} and name in ("_to_copy", "copy_"):
            self.gpu.sync(f"{name} between {' and '.join(sorted(devices))}")
            self.gpu.launches.append(Launch("copy", name))
            return
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        held = {x.untyped_storage()._cdata for x in tensors}
        is_view = is_view and all(x.untyped_storage()._cdata in held for x in made)  # `reshape` and `to` may copy
        if is_view or name in _FREE or name.startswith("prim") or (made and all(x.numel() == 0 for x in made)):
            return
        if any(x.dtype == torch.float8_e4m3fn for x in tensors) and name in _NO_FP8:
            raise TypeError(f"{name} is not there for float8 on a GPU")
        self.gpu.launches.append(Launch("aten", name, {"shapes": [tuple(x.shape) for x in (*tensors, *made)]}))


def _host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _is_small(args: Any) -> bool:
    numbers = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, (int, float))]
    return all(abs(x) <= _SMALL for x in numbers)


def _tensors(out: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]


class _Function(TorchFunctionMode):
    """Python's ways into a tensor for which a CPU build has no CUDA device guard, and addresses."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0]
        if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_cuda:
            return func(*args, **kwargs)
        if name == "data_ptr":
            return self.gpu.address(args[0])
        if name == "__getitem__":
            return _get(args[0], args[1])
        if name == "__setitem__":
            return _set(args[0], args[1], args[2])
        if name == "__invert__":
            return torch.bitwise_not(args[0])
        if name == "copy_":
            return _copy(args[0], args[1])
        if name in _SHAPED_BY_VALUES:
            self.gpu.sync(name)
            raise HostSync(f"{name}: its shape depends on values")
        if name in _TO_HOST:
            self.gpu.sync(name)
            value = getattr(args[0], "_known", None)
            if value is None:
                raise HostSync(f"{name} of values that nobody knows")
            with torch._C._DisableTorchDispatch():
                return getattr(value, name)()
        return func(*args, **kwargs)


def _view(x: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that integers, slices, None and ... of a key make, and its tensors by dimension of that view."""
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(k.dim() if _is_mask(k) else k is not None and k is not ... for k in keys)
    whole = [slice(None)] * (x.dim() - taken)
    at = next((i for i, k in enumerate(keys) if k is ...), len(keys))
    dim, chosen = 0, list[torch.Tensor | None]()
    for k in [*keys[:at], *whole, *keys[at + 1 :]]:
        if k is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(k, slice):
            x, dim = torch.ops.aten.slice.Tensor(x, dim, k.start, k.stop, 1 if k.step is None else k.step), dim + 1
        elif isinstance(k, int):
            x = x.select(dim, k)
        else:
            index = k if isinstance(k, torch.Tensor) else torch.tensor(k, device=x.device)
            chosen += [None] * (dim - len(chosen)) + [index]
            dim += index.dim() if _is_mask(k) else 1
    return x, chosen


def _is_mask(key: Any) -> bool:
    return isinstance(key, torch.Tensor) and key.dtype == torch.bool


def _get(x: torch.Tensor, key: Any) -> torch.Tensor:
    view, chosen = _view(x, key)
    if any(_is_mask(k) for k in chosen):
        raise HostSync("a mask as an index makes a shape that depends on values")
    return torch.ops.aten.index.Tensor(view, chosen) if chosen else view


def _set(x: torch.Tensor, key: Any, value: Any) -> None:
    view, chosen = _view(x, key)
    if not isinstance(value, torch.Tensor) and not chosen:
        view.fill_(value)
        return
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    if chosen:
        torch.ops.aten.index_put_.default(view, chosen, value.to(x.dtype))
    else:
        _copy(view, value)


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Autograd's copy asks for a device guard, so it is left out."""
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.copy_.default(target, source)


def _launch_kernel(gpu: FakeGpu, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """In place of `JITFunction.run`: arguments must fit the kernel's signature and be on the GPU."""
    from triton.runtime.jit import MockTensor

    name = kernel.fn.__name__
    named = {k: v for k, v in kwargs.items() if k in inspect.signature(kernel.fn).parameters or k not in _OPTIONS}
    bound = inspect.signature(kernel.fn).bind(*args, **named, **_implied(kernel.fn, args, named, kwargs)).arguments
    if warmup:
        metadata = SimpleNamespace(shared=64 * 1024, num_warps=kwargs.get("num_warps", 4))
        return SimpleNamespace(metadata=metadata, n_regs=128, _init_handles=lambda: None)
    for argument, value in bound.items():
        tensor = getattr(value, "base", value)
        if isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            raise AssertionError(f"{name}: {argument} is on {tensor.device}")
        if isinstance(value, MockTensor) or value is None:
            raise AssertionError(f"{name}: {argument} is {value!r}")
    sizes = grid(bound) if callable(grid) else grid
    if not all(isinstance(n, int) and 0 < n < 2**31 for n in sizes) or any(n > 65535 for n in sizes[1:]):
        raise AssertionError(f"{name}: a grid of {sizes}")
    gpu.launches.append(Launch("triton", name, dict(bound)))
    return None


def _implied(fn: Any, args: tuple[Any, ...], named: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`num_warps`, which a Gluon kernel may have as a parameter that the launcher fills."""
    parameters = inspect.signature(fn).parameters
    return {"num_warps": given.get("num_warps", 4)} if "num_warps" in parameters and "num_warps" not in named else {}


@contextmanager
def fake_cuda(arch: int = 90, sms: int = 132, memory: int = 141 << 30) -> Iterator[FakeGpu]:
    """One GPU of compute capability `arch`; torch's default device stays the CPU."""
    mode = _Mode(allow_non_fake_inputs=True)
    gpu = FakeGpu(mode, arch)
    properties = SimpleNamespace(
        major=arch // 10, minor=arch % 10, multi_processor_count=sms, total_memory=memory, name="fake",
        shared_memory_per_multiprocessor=_SHARED.get(arch, 102_400), regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
    )  # fmt: skip
    there = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (arch // 10, arch % 10),
        "get_device_properties": lambda device=None: properties, "get_device_name": lambda device=None: "fake",
        "mem_get_info": lambda device=None: (memory, memory), "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: gpu.sync("synchronize"), "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: gpu.forbidden, "stream": lambda stream: nullcontext(),
        "Stream": _Stream, "current_stream": lambda device=None: _Stream(), "Event": _Event,
        "CUDAGraph": lambda *a, **k: _Graph(gpu), "graph": lambda graph, **k: graph.capture(),
        "graph_pool_handle": lambda: (0, 0), "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
    }  # fmt: skip
    with ExitStack() as stack:
        for remembered in (graphs._capture_stream, e2m1._pairs):  # by device: no other mode's, nor a real GPU's
            remembered.cache_clear()
            stack.callback(remembered.cache_clear)
        for name, value in there.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(mock.patch.object(torch.backends.cudnn, "version", lambda: 91_000))
        for target in _jit_functions():
            stack.enter_context(mock.patch.object(target, "run", _as_method(gpu)))
        stack.enter_context(mode)
        stack.enter_context(_Dispatch(gpu))
        stack.enter_context(_Function(gpu))
        yield gpu


def _as_method(gpu: FakeGpu) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _launch_kernel(gpu, self, *args, **kwargs)

    return run


def _jit_functions() -> list[Any]:
    from triton.runtime.jit import JITFunction

    return [JITFunction]


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 1.0


class _Graph:
    """Capture refuses what CUDA refuses; replay appends what was captured.

    Attributes:
        captured: launches of the capture.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.captured = gpu, list[Launch]()

    @contextmanager
    def capture(self) -> Iterator[None]:
        before = len(self.gpu.launches)
        with self.gpu.no_sync():
            yield
        self.captured = self.gpu.launches[before:]
        del self.gpu.launches[before:]

    def replay(self) -> None:
        self.gpu.launches.extend(self.captured)

    def reset(self) -> None:
        self.captured = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)
