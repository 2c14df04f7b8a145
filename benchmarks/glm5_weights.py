"""What the GLM-5 benchmarks share: its configuration, random weights at true width, timers and the CSV."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from uncast.bench.environment import versions
from uncast.models.config import ModelConfig
from uncast.models.decoder import Layer, MLAWeights
from uncast.models.experts import MLP, ExpertStack
from uncast.models.layers import MoE
from uncast.quant.packed import Fp8Blocks, Nvfp4

GLM_5: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "num_attention_heads": 64, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
TINY = GLM_5 | {
    "vocab_size": 512, "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "q_lora_rank": 128,
}  # fmt: skip
E2M1_RMS = 2.92  # of codes that are equally frequent


class Maker:
    """Random weights on a device, scaled so that products keep the size of their input."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def dense(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype) * shape[-1] ** -0.5

    def bytes_(self, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device).random_(low, high)

    def nvfp4(self, *shape: int) -> Nvfp4:
        *lead, columns = shape
        factor = torch.full(lead, columns**-0.5 / E2M1_RMS, device=self.device)
        return Nvfp4(self.bytes_(*lead, columns // 2), self.bytes_(*lead, columns // 16, low=0x34, high=0x3C), factor)

    def fp8(self, *shape: int) -> Fp8Blocks:
        *lead, rows, columns = shape
        scales = torch.full((*lead, -(-rows // 128), -(-columns // 128)), columns**-0.5, device=self.device)
        return Fp8Blocks(self.bytes_(*shape, low=0x30, high=0x40), scales)

    def layer(self, c: ModelConfig, index: int) -> Layer:
        assert c.moe is not None
        ones, hidden, width = self._ones, c.hidden_size, c.moe.intermediate_size
        q_rank = c.q_lora_rank or 0
        both = self.dense(q_rank + c.kv_lora_rank + c.qk_rope_head_dim, hidden)
        attention = MLAWeights(
            q_a=both[:q_rank], q_a_norm=ones(q_rank), qkv_a=both,
            q_b=self.dense(c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), q_rank),
            kv_a=both[q_rank:], kv_a_norm=ones(c.kv_lora_rank),
            w_uk=self.dense(c.num_heads, c.qk_nope_head_dim, c.kv_lora_rank),
            w_uv=self.dense(c.num_heads, c.v_head_dim, c.kv_lora_rank), o=self.dense(hidden, c.num_heads * c.v_head_dim),
            indexer=self.indexer(c, index),
        )  # fmt: skip
        experts = ExpertStack(
            self.nvfp4(c.moe.num_experts, 2 * width, hidden), self.nvfp4(c.moe.num_experts, hidden, width)
        )
        shared = MLP(self.nvfp4(2 * width, hidden), self.nvfp4(hidden, width))
        router = self.dense(c.moe.num_experts, hidden, dtype=torch.float32)
        bias = torch.zeros(c.moe.num_experts, device=self.device)
        return Layer(ones(hidden), attention, ones(hidden), MoE(c.moe, router, bias, experts, shared))

    def indexer(self, c: ModelConfig, index: int) -> Any:
        if c.indexer is None:
            return None
        from uncast.models.indexer import IndexerWeights

        heads, dim = c.indexer.num_heads, c.indexer.head_dim
        return IndexerWeights(
            q_b=self.dense(heads * dim, c.q_lora_rank or 0), k=self.dense(dim, c.hidden_size), k_norm=self._ones(dim),
            k_norm_bias=self._ones(dim) * 0, weights=self.dense(heads, c.hidden_size, dtype=torch.float32), layer=index,
        )  # fmt: skip

    def _ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, device=self.device, dtype=self.dtype)


def timed(work: Callable[[], object], device: str, repeats: int) -> float:
    """Median milliseconds, the host's part included."""
    times = []
    for _ in range(repeats):
        sync(device)
        start = time.perf_counter()
        work()
        sync(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def graphed(work: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of one replay of `work` as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_rate(device: str) -> float:
    """Bytes a second of a large copy, read and written."""
    x = torch.ones(1 << (31 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    y.copy_(x)
    return 2e3 * x.numel() / min(timed(lambda: y.copy_(x), device, 5), timed(lambda: y.copy_(x), device, 5))


def write(path: Path, rows: list[dict[str, object]], device: str) -> None:
    if not rows:
        return
    where = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "none", "versions": versions()}
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, [*rows[0], *where], lineterminator="\n")
        out.writeheader()
        out.writerows(row | where for row in rows)
