"""Runs Gluon kernels on a CPU, as Triton's interpreter does for plain Triton kernels (it has none for Gluon).

A kernel's functions are executed as the Python they are, with `gl`, `mbarrier` and the rest replaced by the ones below;
values are torch tensors, layouts mean nothing (the compiler checks those), shared memory is a tensor. The partitions of
`warp_specialize` take turns, chosen at random at every barrier, so that a missing barrier shows as a wrong result and a wrong
phase or count as a deadlock, which is reported at once. Every load and store is checked against its tensor's storage. Copies
and products complete where they are issued: what is wrong only because they are asynchronous is not found here.
"""

from __future__ import annotations

import math
import random
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.experimental.gluon import language as real_gl
from triton.runtime.jit import JITFunction


class Value(torch.Tensor):
    """A register tensor or scalar."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def value(x: Any, like: torch.dtype | None = None) -> Any:
    if isinstance(x, Pointer):
        return x
    if not isinstance(x, torch.Tensor):
        kind = torch.bool if isinstance(x, bool) else torch.int32 if isinstance(x, int) else torch.float32
        x = torch.tensor(x, dtype=like or kind)
    return x.as_subclass(Value)


def broadcast(*xs: Any) -> Any:
    return torch.broadcast_tensors(*xs)  # type: ignore[no-untyped-call]


@dataclass
class Pointer:
    """Elements `offset` of the flat tensor `memory`."""

    memory: torch.Tensor
    offset: Any = 0

    @classmethod
    def of(cls, x: torch.Tensor) -> Pointer:
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(x.as_strided((room,), (1,), x.storage_offset()))

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + (more.long() if isinstance(more, torch.Tensor) else more))

    def to(self, what: Any) -> Pointer:
        return Pointer(self.memory.view(what[1])) if isinstance(what, tuple) else self

    def places(self, mask: Any, *more: Any) -> tuple[Any, Any]:
        """Offsets and mask, broadcast; raises where an unmasked one lies outside the tensor's storage."""
        at, ok = torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask)
        at, ok, *rest = broadcast(at, ok, *more)
        bad = ok & ((at < 0) | (at >= self.memory.numel()))
        if bool(bad.any()):
            raise IndexError(f"offset {int(at[bad].view(-1)[0])} of {self.memory.numel()} elements is read or written")
        return torch.where(ok, at, 0), (ok, *rest)


class Shared:
    """A shared memory descriptor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.shape, self.dtype, self.rank, self.layout = (
            memory,
            list(memory.shape),
            memory.dtype,
            memory.ndim,
            None,
        )

    def index(self, i: Any) -> Shared:
        """An entry out of range (of a buffer that a layout does not have) may be named, but has no memory to load from."""
        return Shared(self.memory[int(i)] if 0 <= int(i) < self.shape[0] else self.memory[0, ..., :0])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, int(start), length))

    def permute(self, order: Any) -> Shared:
        return Shared(self.memory.permute(tuple(order)))

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.memory.view(tuple(shape)))

    def load(self, layout: Any = None) -> Any:
        return value(self.memory.clone())

    def store(self, x: Any) -> None:
        if list(x.shape) != self.shape or x.dtype != self.dtype:
            raise TypeError(f"{list(x.shape)} {x.dtype} stored to shared memory {self.shape} {self.dtype}")
        self.memory.copy_(x)

    def view(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        if len(shape) == 3 and list(shape)[1:] == [16, 64] and self.rank == 2:
            return Blocks(self.memory)
        flat = self.memory.reshape(-1).view(torch.uint8)
        return Shared(flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape))


class Blocks(Shared):
    """A 16-bit matrix of shared memory as blocks of 16 rows x 64 columns, rows first: as NVMMASharedLayout(128, 16, 2) lies."""

    def index(self, i: Any) -> Shared:
        column, row = divmod(int(i), self.shape[0] // 16)
        return Shared(self.memory[row * 16 : row * 16 + 16, column * 64 : column * 64 + 64])


class Turns:
    """Which partition runs; one at a time, changed at barriers only."""

    def __init__(self, seed: int) -> None:
        self.random, self.lock, self.current = random.Random(seed), threading.Condition(), 0
        self.failure: BaseException | None = None
        self.blocked: dict[int, Callable[[], bool]] = {}

    def choose(self) -> None:
        ready = [i for i, is_ready in self.blocked.items() if is_ready()]
        if ready:
            self.current = self.random.choice(ready)
        elif self.blocked:
            self.failure = self.failure or RuntimeError("deadlock: every partition waits for a barrier")
        self.lock.notify_all()

    def wait(self, me: int, is_ready: Callable[[], bool]) -> None:
        with self.lock:
            self.blocked[me] = is_ready
            self.choose()
            self.lock.wait_for(lambda: self.failure is not None or self.current == me)
            if self.failure is not None:
                raise self.failure

    def run(self, partitions: list[Callable[[], Any]], warps: list[int]) -> None:
        self.blocked = {i: lambda: True for i in range(len(partitions))}

        def body(me: int) -> None:
            HERE.turns, HERE.me, HERE.warps = self, me, warps[me]
            HERE.program, HERE.programs = where
            try:
                with self.lock:
                    self.lock.wait_for(lambda: self.failure is not None or self.current == me)
                if self.failure is None:
                    partitions[me]()
            except BaseException as error:
                with self.lock:
                    self.failure = self.failure or error
            with self.lock:
                self.blocked.pop(me, None)
                self.choose()

        where = HERE.program, HERE.programs
        threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(partitions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


HERE = threading.local()


class Barriers:
    """`mbarrier`: a barrier's word holds the index of its state."""

    MBarrierLayout = staticmethod(lambda *a, **k: None)

    def __init__(self) -> None:
        self.states: list[list[int]] = []  # phase, arrivals missing, count, bytes missing

    def state(self, bar: Shared) -> list[int]:
        return self.states[int(bar.memory.reshape(-1)[0]) - 1]

    def init(self, bar: Shared, count: int) -> None:
        self.states.append([0, count, count, 0])
        bar.memory.fill_(len(self.states))

    def arrive(self, bar: Shared, count: int = 1, pred: bool = True) -> None:
        if bool(pred):
            self.change(bar, count, 0)

    def expect(self, bar: Shared, size: int, pred: bool = True) -> None:
        self.change(bar, 1, size)

    def change(self, bar: Shared, arrivals: int, size: int) -> None:
        s = self.state(bar)
        s[1] -= arrivals
        s[3] += size
        if s[1] < 0:
            raise RuntimeError("more arrivals than a barrier's count")
        if s[1] == 0 and s[3] == 0:
            s[0], s[1] = s[0] ^ 1, s[2]

    def wait(self, bar: Shared, phase: Any, pred: bool = True) -> None:
        s, parity = self.state(bar), int(phase)
        HERE.turns.wait(HERE.me, lambda: s[0] != parity)


BARRIERS = Barriers()


def _codes(x: torch.Tensor) -> torch.Tensor:
    """int16 [..., n] -> fp16 [..., n, 2] of the e4m3 codes in the low and the high byte."""
    return x.contiguous().view(torch.float8_e4m3fn).to(torch.float16).view(*x.shape, 2)


def _asm(asm: str, constraints: str, args: list[Any], **_: Any) -> Any:
    x = value(args[0])
    if "max.xorsign.abs" in asm:
        return torch.fmax(x.abs(), args[1].abs()) * x.sign() * args[1].sign()
    if "ex2.approx" in asm:
        return torch.exp2(x)
    if "mov.b32 $0, 0" in asm:
        return torch.zeros_like(x)
    if "rcp.approx" in asm:
        return 1 / x
    if "griddepcontrol" in asm:
        return x
    if "mul.rn.bf16x2" in asm:
        return x * args[1]
    if "x2.f32 $0, $2, $1" in asm:
        kind = torch.bfloat16 if "bf16x2" in asm else torch.float16
        return torch.stack(tuple(a.to(kind) for a in args), -1).view(torch.int32).squeeze(-1)
    if "cvt.rn.f16x2.e4m3x2" in asm:
        codes = _codes(x)
        if "prmt" in asm:
            pair = codes[..., 0], codes[..., 1]
        else:
            four = codes.view(*x.shape[:-1], -1, 2, 2)
            pair = four[..., 0, :].reshape(tuple(x.shape)), four[..., 1, :].reshape(tuple(x.shape))
        return tuple(value(p * args[1] if "mul.rn.f16x2" in asm else p) for p in pair)
    raise NotImplementedError(asm)


def _load(p: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    at, (ok,) = p.places(mask)
    return value(torch.where(ok, p.memory[at], torch.as_tensor(other).to(p.memory.dtype)))


def _store(p: Pointer, x: Any, mask: Any = None) -> None:
    at, (ok, x) = p.places(mask, torch.as_tensor(x))
    p.memory[at[ok]] = x[ok].to(p.memory.dtype)


def _copy(dst: Shared, p: Pointer, mask: Any = None, **_: Any) -> None:
    dst.memory.copy_(_load(p, mask, 0))


def _tma(desc: Any, at: list[Any], bar: Shared, dst: Shared) -> None:
    (row, column), (rows, columns) = (int(i) for i in at), dst.shape
    dst.memory.copy_(desc.base[row : row + rows, column : column + columns])
    BARRIERS.change(bar, 0, -dst.memory.numel() * dst.memory.element_size())


def _mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, **_: Any) -> Any:
    a = a.memory if isinstance(a, Shared) else a
    assert a.dtype == b.dtype and a.shape[1] == b.shape[0] and list(acc.shape) == [a.shape[0], b.shape[1]]
    product = value(a.float() @ b.memory.float())
    return acc + product if use_acc else product


def _reduce(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis=None: f(x, axis).to(x.dtype)


def _specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    work: list[Callable[[], Any]] = [partial(f, *a) for f, a in partitions]
    Turns(HERE.seed + int(HERE.program)).run(work, [4, *warps])


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any = None, value: Any = None) -> Shared:
    nan = dtype.is_floating_point
    memory = torch.full(tuple(shape), math.nan if nan else 2**15 - 1, dtype=dtype)
    return Shared(memory if value is None else memory.copy_(value))


def _binary(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: f(*broadcast(value(x), value(y, getattr(x, "dtype", None))))


def _where(c: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Pointer):
        return x if bool(c) else y
    like = next((i.dtype for i in (x, y) if isinstance(i, torch.Tensor)), None)
    return torch.where(value(c), value(x, like), value(y, like))


def _dead(*_: Any, **__: Any) -> None:
    return None


_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float32)
_LAYOUTS = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout")
GL = types.SimpleNamespace(
    **{str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES},
    **dict.fromkeys((*_LAYOUTS, "SwizzledSharedLayout"), _dead),
    constexpr=None,
    int1=torch.bool,
    static_range=range,
    program_id=lambda axis: value(HERE.program),
    num_programs=lambda axis: value(HERE.programs),
    pointer_type=lambda dtype: ("pointer", dtype),
    arange=lambda start, end, layout=None: value(torch.arange(start, end).int()),
    zeros=lambda shape, dtype, layout=None: value(torch.zeros(tuple(shape), dtype=dtype)),
    full=lambda shape, x, dtype, layout=None: value(torch.ones(tuple(shape), dtype=dtype) * x).to(dtype),
    load=_load,
    store=_store,
    where=_where,
    abs=torch.abs,
    exp2=torch.exp2,
    log2=torch.log2,
    maximum=_binary(torch.maximum),
    minimum=_binary(torch.minimum),
    max=_reduce(torch.amax),
    min=_reduce(torch.amin),
    sum=_reduce(torch.sum),
    associative_scan=lambda x, axis, add: torch.cumsum(x, axis).to(x.dtype),
    broadcast=broadcast,
    split=lambda x: (x[..., 0], x[..., 1]),
    join=lambda x, y: torch.stack((x, y), -1),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    inline_asm_elementwise=_asm,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
)
REPLACED = {
    "gl": GL, "mbarrier": BARRIERS, "warpgroup_mma": _mma, "cp_async": _copy, "tma_load": _tma,
    "warpgroup_mma_wait": lambda n=0, deps=None: tuple(deps) if len(deps) > 1 else deps[0],
    "mma_v2": lambda a, b, acc: acc + value(a.float() @ b.float()), "smem_view": Shared.view,
    **dict.fromkeys(["cta_barrier", "fence_async_shared", "cp_async_commit", "cp_async_wait"], _dead),
    "async_copy": types.SimpleNamespace(
        mbarrier_arrive=lambda bar, increment_count=True: BARRIERS.change(bar, 32 * HERE.warps, 0)
    ),
}  # fmt: skip


class OnCpu:
    """A Gluon function or kernel as a Python function; a kernel is launched as always: `OnCpu(kernel)[grid](...)`."""

    def __init__(self, function: JITFunction[Any], seed: int = 0) -> None:
        self.function, self.seed = function, seed
        self.python: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kw: Any) -> Any:
        if self.python is None:
            fn = self.function.fn
            world = {name: self.replace(name, x) for name, x in fn.__globals__.items()}
            self.python = types.FunctionType(fn.__code__, world, fn.__name__, fn.__defaults__)
        return self.python(*args, **kw)

    @staticmethod
    def replace(name: str, x: Any) -> Any:
        if name in REPLACED:
            return REPLACED[name]
        if isinstance(x, JITFunction):
            return OnCpu(x)
        return x.value if isinstance(x, real_gl.constexpr) else x

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **constexprs: Any) -> None:
            given = [
                Pointer.of(a) if isinstance(a, torch.Tensor) else value(a) if isinstance(a, int | float) else a
                for a in args
            ]
            for option in ("launch_pdl", "enable_fp_fusion"):
                constexprs.pop(option, None)
            if "num_warps" in self.function.arg_names:
                constexprs["num_warps"] = num_warps
            HERE.seed, HERE.programs = self.seed, grid[0]
            for program in range(grid[0]):
                BARRIERS.states.clear()
                HERE.program = program
                self(*given, **constexprs)

        return launch
