"""How long one `run` takes: what `auto` chooses by among verified backends.

One batch for all: 32 requests of 4,096 cached tokens (on a CPU 4 of 512), one query each in decode and eight in extend, planned
once. Median of `RUNS` runs; on a GPU of replays of a captured graph, else, where a library cannot be captured, of runs between
two events, whose launches then count.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from uncast.attention import ClaimedCapabilityWarning, MLAPagedAttention, ProblemSpec
from uncast.attention.verified import EXTEND_QUERIES
from uncast.latent.codec import encode_rows
from uncast.verify.cases import ProbeCase, plan_case, run_without_lse

BATCH = {"cuda": (32, 4096), "cpu": (4, 512)}
"""Requests and cached tokens of each."""
WARM_UPS, RUNS, GRAPH_RUNS = 2, 9, 4
_DRAWN_ROWS = 4096


@dataclass
class TimedInputs:
    """The batch for specs of the same shapes."""

    key: ProblemSpec
    case: ProbeCase

    @classmethod
    def of(cls, spec: ProblemSpec, before: TimedInputs | None) -> TimedInputs:
        """Inputs for `spec`: those of the measurement before where they fit."""
        key = replace(spec, causal=True, lse_base="2", batch_invariant=False)
        return before if before is not None and before.key == key else cls(key, _timed_case(spec))


def describe(device: str) -> str:
    """The batch for a sentence."""
    batch, kv_len = BATCH[device]
    return f"in a batch of {batch} requests of {kv_len:,} tokens"


def _timed_case(spec: ProblemSpec) -> ProbeCase:
    batch, kv_len = BATCH[spec.device]
    queries = EXTEND_QUERIES if spec.max_q_len > 1 else 1
    device = spec.device
    generator = torch.Generator(device=device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    scales = (0.013, 0.021) if spec.layout.has_external_scales else (None, None)
    drawn = min(_DRAWN_ROWS, batch * kv_len)
    rows = encode_rows(
        randn(drawn, spec.head_dim_ckv), randn(drawn, spec.head_dim_kpe), spec.layout, ckv_scale=scales[0], kpe_scale=scales[1],
    )  # fmt: skip
    pages = batch * kv_len // spec.page_size
    order = torch.randperm(pages, generator=generator, device=device).int()
    query = randn(batch * queries, spec.num_heads, spec.head_dim_ckv + spec.head_dim_kpe).to(spec.q_data_type)
    return ProbeCase(
        block_tables=order.view(batch, -1),
        seq_lens=torch.full((batch,), kv_len, dtype=torch.int32, device=device),
        qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
        q_nope=query[..., : spec.head_dim_ckv].contiguous(), q_pe=query[..., spec.head_dim_ckv :].contiguous(),
        cache=rows.repeat(batch * kv_len // drawn, 1).view(pages, spec.page_size, -1),
        ckv_scale=scales[0], kpe_scale=scales[1],
    )  # fmt: skip


def time_backend(backend: str, spec: ProblemSpec, case: ProbeCase) -> float:
    """Microseconds of one `run` of `backend`. Raises whatever the backend raises."""
    attention = MLAPagedAttention(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClaimedCapabilityWarning)
        plan_case(attention, spec, case)
    out = torch.empty_like(case.q_nope)

    def once() -> None:
        run_without_lse(attention, case, out)

    for _ in range(WARM_UPS):
        once()
    if spec.device == "cpu":
        return _median(lambda: _cpu_us(once))
    several, calls = _captured(once)
    return _median(lambda: _gpu_us(several) / calls)


def _median(measure: Callable[[], float]) -> float:
    return round(statistics.median(measure() for _ in range(RUNS)), 2)


def _captured(once: Callable[[], None]) -> tuple[Callable[[], None], int]:
    """A graph of `GRAPH_RUNS` runs and that number; the run itself and 1 where it cannot be captured."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_RUNS):
                once()
    except RuntimeError:
        torch.cuda.synchronize()
        return once, 1
    graph.replay()
    return graph.replay, GRAPH_RUNS


def _gpu_us(call: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _cpu_us(once: Callable[[], None]) -> float:
    start = time.perf_counter()
    once()
    return (time.perf_counter() - start) * 1e6
