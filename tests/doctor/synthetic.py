"""Builds small profiler traces in Kineto's format: the events that a server's decode steps leave behind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PID, TID, STREAM = 4242, 4242, 7
CAST = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::"
    "operator()() const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>, 4, "
    "TrivialOffsetCalculator<1, unsigned int>, TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>, "
    "at::native::memory::StoreWithCast<1> >(int, ...)"
)
STRIDED = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}>("
    "at::TensorIteratorBase&, ...)::{lambda(int)#1}>(int, ...)"
)
TO_FLOAT = "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda(...)>"
TO_BF16 = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(...)::{lambda(float)#1}>"
)
GEMM_IN, GEMM_OUT = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_128x8_64x12_2x1_v_bz_splitK_TNT"
ATTENTION = "mma_decode_kernel"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(...)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BF16, FP8, FP32 = "c10::BFloat16", "c10::Float8_e4m3fn", "float"
H200 = {
    "id": 0,
    "name": "NVIDIA H200",
    "totalGlobalMem": 150_000_000_000,
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
}


class Tracer:
    """Two clocks in microseconds, the CPU's and the GPU's; calls append events."""

    def __init__(self, *, gpu: str = "NVIDIA H200", integer: bool = False, stacks: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self.cpu = 1_000_000.0
        self.gpu = 0.0
        self.correlation = 100
        self.stacks, self.integer = stacks, integer
        self.capturing = False
        self.meta: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [H200 | {"name": gpu}], "record_shapes": 1}

    def add(self, cat: str, name: str, ts: float, dur: float, args: dict[str, Any], **extra: Any) -> None:
        if self.integer:
            ts, dur = int(ts), int(dur)
        event = {"ph": "X", "cat": cat, "name": name, "pid": PID, "tid": TID, "ts": ts, "dur": dur, "args": args}
        self.events.append(event | extra)

    @contextmanager
    def span(self, cat: str, name: str, args: dict[str, Any] | None = None, before: float = 1.0) -> Iterator[None]:
        start = self.cpu
        self.cpu += before
        place = len(self.events)
        yield
        self.cpu += 1.0
        self.add(cat, name, start, self.cpu - start, {"External id": len(self.events)} | (args or {}))
        self.events.insert(place, self.events.pop())

    @contextmanager
    def frame(self, name: str) -> Iterator[None]:
        if self.stacks:
            with self.span("python_function", name, {"Python id": len(self.events)}):
                yield
        else:
            yield

    def step(self, name: str) -> Any:
        return self.span("user_annotation", name)

    def op(
        self, name: str, dims: Sequence[Any], types: Sequence[str], kernel: str, dur: float, grid: int = 132,
        strides: Sequence[Any] = (), block: int = 128,
    ) -> None:  # fmt: skip
        """An operator that launches one kernel."""
        args = {"External id": self.correlation, "Input Dims": list(dims), "Input type": list(types)}
        if strides:
            args["Input Strides"] = list(strides)
        with self.span("cpu_op", name, args):
            self.launch(kernel, dur, grid, block)

    def launch(
        self, kernel: str, dur: float, grid: int = 132, block: int = 128, call: str = "cudaLaunchKernel"
    ) -> None:
        self.correlation += 1
        self.add("cuda_runtime", call, self.cpu, 4.0, {"correlation": self.correlation, "cbid": 211})
        self.cpu += 5.0
        if not self.capturing:
            self.kernel(kernel, dur, grid, block)

    def kernel(self, name: str, dur: float, grid: int, block: int = 128) -> None:
        """Runs after what is queued, with the correlation of the last launch."""
        self.gpu = max(self.gpu + 0.5, self.cpu + 3.0)
        args = {"correlation": self.correlation, "stream": STREAM, "grid": [grid, 1, 1], "block": [block, 1, 1]}
        self.add("kernel", name, self.gpu, dur, args, pid=0, tid=STREAM)
        self.gpu += dur

    def memcpy(self, way: str, size: int, dur: float) -> None:
        self.correlation += 1
        self.add("cuda_runtime", "cudaMemcpyAsync", self.cpu, 4.0, {"correlation": self.correlation})
        self.cpu += 5.0
        self.gpu = max(self.gpu + 0.5, self.cpu + 3.0)
        args = {"correlation": self.correlation, "stream": STREAM, "bytes": size}
        self.add("gpu_memcpy", f"Memcpy {way} (Device -> Device)", self.gpu, dur, args, pid=0, tid=STREAM)
        self.gpu += dur

    def sync(self, call: str = "cudaStreamSynchronize") -> None:
        """The CPU waits for the GPU."""
        wait = max(1.0, self.gpu - self.cpu)
        self.correlation += 1
        self.add("cuda_runtime", call, self.cpu, wait, {"correlation": self.correlation})
        self.cpu += wait + 1.0

    def replay(self, kernels: Sequence[tuple[str, float, int]], launch_us: float = 20.0, pause_us: float = 0.0) -> None:
        """One graph launch that runs `kernels` (name, microseconds, grid), with pauses of the GPU between them."""
        self.correlation += 1
        self.add("cuda_runtime", "cudaGraphLaunch", self.cpu, launch_us, {"correlation": self.correlation})
        self.cpu += launch_us + 1.0
        for name, dur, grid in kernels:
            self.kernel(name, dur, grid)
            self.gpu += pause_us

    def document(self) -> dict[str, Any]:
        return self.meta | {"displayTimeUnit": "ms", "traceEvents": self.events, "traceName": "synthetic"}

    def write(self, path: Path) -> Path:
        data = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(data, 1) if path.name.endswith(".gz") else data)
        return path


POOL = [495_552, 1, 576]
POOL_GRID = 495_552 * 576 // 512


def layer(t: Tracer, *, cast_us: float = 0.0, pool: Sequence[int] = POOL, extra: Any = None) -> None:
    """One MLA layer: projection, perhaps a pool cast, attention, projection."""
    with t.frame("nn.Module: MLALayer_0"), t.frame("/srv/python/engine/layers/mla.py(77): forward"):
        t.op("aten::mm", [[1, 6144], [6144, 36864]], [BF16, BF16], GEMM_IN, 90.0)
        if cast_us:
            with (
                t.frame("/srv/python/engine/attention/fa3.py(410): get_bf16_cache"),
                t.span("cpu_op", "aten::to", {"Input Dims": [list(pool), []], "Input type": [FP8, "Scalar"]}),
            ):
                numel = pool[0] * pool[1] * pool[2]
                t.op("aten::copy_", [pool, pool, []], [BF16, FP8, "Scalar"], CAST, cast_us, -(-numel // 512),
                     strides=[[576, 576, 1], [576, 576, 1], []])  # fmt: skip
        t.launch(ATTENTION, 15.0, 132, 128, "cuLaunchKernelEx")
        if extra is not None:
            extra(t)
        t.op("aten::mm", [[1, 32768], [32768, 6144]], [BF16, BF16], GEMM_OUT, 80.0)


def decode(
    *, layers: int = 78, steps: int = 3, cast_us: float = 0.0, label: str = "step[DECODE bs=1 g_sk=4096]", extra: Any = None,
    pool: Sequence[int] = POOL, tracer: Tracer | None = None,
) -> Tracer:  # fmt: skip
    """Eager decode steps that end with a wait for the GPU."""
    t = tracer or Tracer()
    with t.frame("/srv/python/engine/server.py(12): run_batch"):
        for _ in range(steps):
            with t.step(label):
                for _ in range(layers):
                    layer(t, cast_us=cast_us, pool=pool, extra=extra)
            t.sync()
    return t


def layer_kernels(cast_us: float) -> list[tuple[str, float, int]]:
    cast = [(CAST, cast_us, POOL_GRID)] if cast_us else []
    return [(GEMM_IN, 90.0, 132), *cast, (ATTENTION, 15.0, 132), (GEMM_OUT, 80.0, 132)]


def decode_graph(
    *, layers: int = 78, steps: int = 3, cast_us: float = 828.0, label: str = "step[DECODE bs=1 g_sk=4096]"
) -> Tracer:
    """The same as graph replays."""
    t = Tracer(stacks=False)
    for _ in range(steps):
        with t.step(label):
            t.replay(layer_kernels(cast_us) * layers)
        t.sync()
    return t


def capture(*, layers: int = 78, cast_us: float = 828.0) -> Tracer:
    """The capture pass of that graph, without kernels, as CUDA leaves it."""
    t = Tracer()
    t.capturing = True
    t.add("cuda_runtime", "cudaStreamBeginCapture", t.cpu, 1.0, {"correlation": 1})
    t.cpu += 2.0
    for _ in range(layers):
        layer(t, cast_us=cast_us)
    t.add("cuda_runtime", "cudaStreamEndCapture", t.cpu, 1.0, {"correlation": 2})
    return t
