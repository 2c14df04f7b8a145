"""Single-stream decoding at a fixed context: does time or traffic depend on the pool's size?

Configurations take turns step by step, so that whatever else the machine does hits all of them alike; each figure is the
median over rounds, and the pool's effect is the median of paired ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from uncast.attention import MLAPagedAttention, ProblemSpec
from uncast.bench.environment import device_name, versions
from uncast.engine.generate import PREFILL_CHUNK
from uncast.engine.runner import ModelRunner, Sequence
from uncast.models.decoder import MLADecoder

WARM_UP_STEPS = 3
PAGE_SIZE = 64


@dataclass(frozen=True)
class DecodeResult:
    """One row of the recorded CSV; `ratio_to_first` is the median of this configuration's step time over the first one's."""

    model: str
    kv_cache_dtype: str
    attention_backend: str
    context: int
    pool_tokens: int
    ms_per_step: float
    tokens_per_s: float
    ratio_to_first: float
    kv_bytes_read_per_step: int
    kv_bytes_written_per_step: int
    kv_bytes_needed_per_step: int
    device: str
    versions: str

    def row(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class DecodeCase:
    """A configuration: a layout, a backend and a pool of `pool_tokens` rows."""

    kv_cache_dtype: str
    attention_backend: str
    pool_tokens: int


def resolve_backend(name: str, model: MLADecoder, kv_layout: str) -> str:
    """The backend that `name` ("auto" or a registered one) stands for with this model and layout.

    Raises:
        LayoutError, Refused, UnknownBackend: it cannot serve them.
    """
    config = model.config
    major, minor = torch.cuda.get_device_capability(model.device) if model.device.type == "cuda" else (0, 0)
    return MLAPagedAttention(name).resolve(
        ProblemSpec(
            num_heads=config.num_heads, head_dim_ckv=config.kv_lora_rank, head_dim_kpe=config.qk_rope_head_dim,
            page_size=PAGE_SIZE, kv_layout=kv_layout, q_data_type=model.dtype, sm_scale=config.sm_scale,
            device=model.device.type, arch=10 * major + minor,
        )
    )  # fmt: skip


def bench_decode(
    model: MLADecoder, name: str, cases: list[DecodeCase], *, context: int, rounds: int
) -> Iterator[DecodeResult]:
    """Yields one result per case, all measured in turns over `rounds` decode steps that start at `context` rows."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        0, model.config.vocab_size, (context + rounds + WARM_UP_STEPS,), generator=generator
    ).tolist()
    runners, sequences = [], []
    for case in cases:
        pages = -(-max(case.pool_tokens, len(tokens)) // PAGE_SIZE)
        runner = ModelRunner(
            model,
            kv_layout=case.kv_cache_dtype,
            attention_backend=case.attention_backend,
            num_pages=pages,
            page_size=PAGE_SIZE,
        )
        sequence = Sequence(list(tokens))
        runner.ensure_pages(sequence, len(tokens))
        while sequence.cached < context:
            runner.step([(sequence, min(PREFILL_CHUNK, context - sequence.cached))])
        runners.append(runner)
        sequences.append(sequence)
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(WARM_UP_STEPS + rounds):
        for index, (runner, sequence) in enumerate(zip(runners, sequences, strict=True)):
            began = time.perf_counter()
            runner.step([(sequence, 1)])
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= WARM_UP_STEPS:
                times[index].append(time.perf_counter() - began)
    for runner, taken in zip(runners, times, strict=True):
        seconds, step = statistics.median(taken), runner.last_step_bytes()
        yield DecodeResult(
            model=name,
            kv_cache_dtype=runner.pool.layout.name,
            attention_backend=runner.attention_backend,
            context=context,
            pool_tokens=runner.pool.num_pages * PAGE_SIZE,
            ms_per_step=round(seconds * 1e3, 3),
            tokens_per_s=round(1 / seconds, 2),
            ratio_to_first=round(statistics.median(a / b for a, b in zip(taken, times[0], strict=True)), 3),
            kv_bytes_read_per_step=step.read,
            kv_bytes_written_per_step=step.written,
            kv_bytes_needed_per_step=step.needed,
            device=device_name(),
            versions=versions(),
        )
