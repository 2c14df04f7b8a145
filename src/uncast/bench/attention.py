"""Decode attention on one GPU: the native kernels beside every installed peer, in one run.

Times are medians of CUDA-graph replays over rotating caches that exceed the L2. Every timed call's output is compared with
float64 on the values its cache stores. A peer gets its best case: inputs in its own form, no conversion in the timed region.
The floor is max(cache bytes / `READ_BANDWIDTH`, FLOP / `MATRIX_RATE`), both measured on an H200 (copy of 8.6 GB, bf16 GEMM).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from uncast.attention.oracle import relative_errors
from uncast.bench.environment import device_name, versions
from uncast.latent.codec import decode_rows
from uncast.latent.layouts import RowLayout, row_layout

READ_BANDWIDTH = 4.4e12
"""Bytes per second."""
MATRIX_RATE = 770e12
"""FLOP per second, bf16 or fp16 operands."""
ROTATE_BYTES = 400 * 2**20
MAX_CACHES = 8
PAGE = 64
CALLS_PER_GRAPH = 20
REPLAYS = 9
ORACLE_REQUESTS = 2

Call = Callable[[int], torch.Tensor]
"""Computes attention over rotating cache i and returns the output [batch, heads, 512]."""


@dataclass(frozen=True)
class Shape:
    """`batch` requests of `context` cached tokens, one query row of `heads` heads each."""

    batch: int
    context: int
    heads: int

    @property
    def flop(self) -> int:
        """Two per multiply-add: 576 for the scores, 512 for the output, per head and token."""
        return 2 * self.batch * self.heads * self.context * (576 + 512)

    def floor_us(self, row_bytes: int) -> float:
        """Microseconds below which no kernel on rows of this size can go on an H200."""
        return max(self.batch * self.context * row_bytes / READ_BANDWIDTH, self.flop / MATRIX_RATE) * 1e6


REFERENCE_SHAPES = tuple(
    Shape(*values)
    for values in (
        (1, 4096, 64), (1, 32768, 64), (1, 131072, 64), (1, 4096, 8), (1, 131072, 8),
        (32, 8192, 16), (32, 8192, 64), (128, 4096, 64), (64, 8192, 128),
    )
)  # fmt: skip


@dataclass(frozen=True)
class AttentionResult:
    """One CSV row; `error` is relative over the whole output of the first requests, `us` NaN when the backend refused."""

    batch: int
    context: int
    heads: int
    layout: str
    backend: str
    us: float
    error: float
    floor_us: float
    gpu: str
    versions: str

    def row(self) -> dict[str, object]:
        return asdict(self)


class Inputs:
    """Random queries and rotating caches of one shape.

    Attributes:
        query: bf16 [batch, heads, 576], nope then rope.
        table: int32 [batch, pages], a random page order; lens: int32 [batch].
        sm_scale: 1/16, as GLM's 256-wide heads.
    """

    def __init__(self, shape: Shape, *, seed: int = 0, device: str = "cuda") -> None:
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.pages = -(-shape.context // PAGE)
        self.num_pages = shape.batch * self.pages
        self.sm_scale = 1 / 16
        self.query = self._randn(shape.batch, shape.heads, 576).to(torch.bfloat16)
        order = torch.randperm(self.num_pages, generator=self.generator, device=device)
        self.table = order.to(torch.int32).view(shape.batch, self.pages)
        self.lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        self.qo_indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)

    def _randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def scales(self, layout: RowLayout) -> dict[str, float | None]:
        """Scales of `fp8_e4m3` (powers of ten apart from 1, the same for both parts, as checkpoints have them)."""
        scale = 0.013 if layout.has_external_scales else None
        return {"ckv_scale": scale, "kpe_scale": scale}

    def caches(self, layout: RowLayout) -> list[torch.Tensor]:
        """uint8 [num_pages, 64, row_bytes], enough of them to exceed the L2 several times."""
        from uncast.latent.codec import encode_rows

        size = self.num_pages * PAGE * layout.row_bytes
        made = []
        for _ in range(max(2, min(MAX_CACHES, ROTATE_BYTES // size + 1))):
            cache = torch.empty((self.num_pages * PAGE, layout.row_bytes), dtype=torch.uint8, device=self.device)
            for start in range(0, cache.shape[0], 65536):
                rows = min(65536, cache.shape[0] - start)
                scales = self.scales(layout)
                cache[start : start + rows] = encode_rows(
                    self._randn(rows, 512), self._randn(rows, 64), layout,
                    ckv_scale=scales["ckv_scale"], kpe_scale=scales["kpe_scale"],
                )  # fmt: skip
            made.append(cache.view(self.num_pages, PAGE, layout.row_bytes))
        return made

    def oracle(self, layout: RowLayout, cache: torch.Tensor) -> torch.Tensor:
        """float64 [requests, heads, 512] of the first `ORACLE_REQUESTS` requests."""
        scales, out = self.scales(layout), []
        for request in range(min(self.shape.batch, ORACLE_REQUESTS)):
            rows = cache[self.table[request].long()].view(-1, layout.row_bytes)[: self.shape.context]
            ckv, kpe = decode_rows(
                rows, layout, ckv_scale=scales["ckv_scale"], kpe_scale=scales["kpe_scale"], dtype=torch.float64
            )
            query = self.query[request].double()
            scores = (query[:, :512] @ ckv.T + query[:, 512:] @ kpe.T) * self.sm_scale
            out.append(scores.softmax(-1) @ ckv)
        return torch.stack(out)


def time_us(call: Call) -> float:
    """Median microseconds of one call: a CUDA graph of `CALLS_PER_GRAPH` calls over rotating caches, `REPLAYS` times."""
    return graph_us(call, CALLS_PER_GRAPH) / CALLS_PER_GRAPH


def graph_us(call: Call, calls: int) -> float:
    """Median microseconds of a captured sequence of `calls` calls."""
    for index in range(3):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return statistics.median(times)


def bench_attention(
    shapes: list[Shape], contenders: dict[str, tuple[str, Callable[..., Call]]], *, report: Callable[[str], None]
) -> Iterator[AttentionResult]:
    """Measures every contender on every shape.

    Args:
        shapes: what to run.
        contenders: name -> (layout, maker); `maker(inputs, layout, caches)` prepares and returns a `Call`, or raises to refuse.
        report: gets one sentence per refusal.
    """
    for shape in shapes:
        inputs = Inputs(shape)
        for layout_name in dict.fromkeys(layout for layout, _ in contenders.values()):
            layout = row_layout(layout_name)
            caches = inputs.caches(layout)
            expected = inputs.oracle(layout, caches[0])
            for name, (wanted, maker) in contenders.items():
                if wanted != layout_name:
                    continue
                us = error = math.nan
                try:
                    call = maker(inputs, layout, caches)
                    error = relative_errors(call(0)[: expected.shape[0]].view(expected.shape), expected)[1]
                    us = time_us(call)
                except (ImportError, ValueError, RuntimeError, AssertionError) as refusal:
                    report(
                        f"{name} on {shape}: {str(refusal).splitlines()[0] if str(refusal) else type(refusal).__name__}"
                    )
                yield AttentionResult(
                    shape.batch, shape.context, shape.heads, layout_name, name, round(us, 2), error,
                    round(shape.floor_us(layout.row_bytes), 2), device_name(), versions(),
                )  # fmt: skip
            del caches
            torch.cuda.empty_cache()
