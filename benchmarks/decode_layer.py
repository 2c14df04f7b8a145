"""Where a decode step's time goes, kernel by kernel: GLM-4.7-Flash's layers with random weights.

    python benchmarks/decode_layer.py --out decode-layer.json [--layers 4] [--context 8192] [--sweep]

A step in a CUDA graph; the table is torch's profile of replays. `--sweep` also times the kernels of a few tokens' mixture with
other tiles. Results are written as they come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from uncast.attention import MLAPagedAttention
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.config import ModelConfig
from uncast.models.decoder import ForwardBatch, Layer, MLADecoder, MLAWeights
from uncast.models.experts import MLP, ExpertStack
from uncast.models.layers import MoE

FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_attention_heads": 20, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "first_k_dense_replace": 0, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def random_model(config: ModelConfig, device: str) -> MLADecoder:
    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.bfloat16)

    moe, hidden, heads = config.moe, config.hidden_size, config.num_heads
    assert moe is not None and config.q_lora_rank is not None
    layers = []
    for _ in range(config.num_layers):
        width, rank = moe.intermediate_size, config.q_lora_rank
        both = made(rank + config.kv_lora_rank + config.qk_rope_head_dim, hidden)
        attention = MLAWeights(
            q_a=both[:rank], q_a_norm=ones(rank), kv_a=both[rank:], kv_a_norm=ones(config.kv_lora_rank), qkv_a=both,
            q_b=made(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), rank),
            w_uk=made(heads, config.qk_nope_head_dim, config.kv_lora_rank),
            w_uv=made(heads, config.v_head_dim, config.kv_lora_rank), o=made(hidden, heads * config.v_head_dim),
        )  # fmt: skip
        experts = ExpertStack(made(moe.num_experts, 2 * width, hidden), made(moe.num_experts, hidden, width))
        router = made(moe.num_experts, hidden, dtype=torch.float32)
        bias = torch.zeros(moe.num_experts, device=device)
        mixture = MoE(moe, router, bias, experts, MLP(made(2 * width, hidden), made(hidden, width)))
        layers.append(Layer(ones(hidden), attention, ones(hidden), mixture))
    embed = made(config.vocab_size, hidden)
    return MLADecoder(config, embed, layers, ones(hidden), embed)


def batch_of(model: MLADecoder, layout: str, tokens: int, context: int) -> ForwardBatch:
    """One new token each of `tokens` requests with `context` rows."""
    config, device, width = model.config, model.device, -(-context // 64)
    rows = row_layout(layout, config.kv_lora_rank, config.qk_rope_head_dim)
    pool = PagedPool(rows, num_layers=config.num_layers, num_pages=tokens * width, page_size=64, device=device)
    tables = torch.arange(tokens * width, dtype=torch.int32, device=device).view(tokens, width)
    attention = MLAPagedAttention("native")
    attention.plan(
        torch.arange(tokens + 1, dtype=torch.int32, device=device), block_tables=tables,
        seq_lens=torch.full((tokens,), context, dtype=torch.int32, device=device), num_heads=config.num_heads,
        sm_scale=config.sm_scale, kv_layout=layout, max_q_len=1, total_q=tokens, num_pages=tokens * width,
    )  # fmt: skip
    places = torch.arange(tokens, device=device)
    return ForwardBatch(
        token_ids=places, positions=torch.full_like(places, context - 1), attention=attention, cache=pool.storage,
        slot_mapping=places * width * 64 + context - 1, counters=torch.zeros(3, dtype=torch.int64, device=device),
        logit_rows=places,
    )  # fmt: skip


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, count: int = 50) -> float:
    """Median wall time of a replay in microseconds, of five series."""
    graph.replay()
    torch.cuda.synchronize()
    series = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        series.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(series)


def kernel_table(graph: torch.cuda.CUDAGraph, replays: int = 5) -> list[dict[str, object]]:
    """Name, launches and microseconds of a replay, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    rows = [
        {"kernel": e.key[:80], "launches": e.count / replays, "us": round(e.self_device_time_total / replays, 2)}
        for e in profile.key_averages()
        if e.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -float(str(row["us"])))


def sweep(model: MLADecoder) -> list[dict[str, object]]:
    """The mixture of one token with other tiles: microseconds of both kernels together."""
    from uncast.kernels import few_tokens_moe as kernels

    mixture = model.layers[0].mlp
    assert isinstance(mixture, MoE)
    x = torch.randn(1, model.config.hidden_size, device=model.device, dtype=torch.bfloat16)
    found: list[dict[str, object]] = []
    before = kernels.ROWS, kernels.COLUMNS, kernels.NUM_WARPS
    for rows, columns, warps in itertools.product((2, 4, 8, 16), (256, 512, 1024), (2, 4, 8)):
        if 2048 <= rows * columns <= 8192:
            kernels.ROWS, kernels.COLUMNS, kernels.NUM_WARPS = rows, columns, warps

            def mixtures() -> None:  # every layer's, so that no weight is in the L2 cache
                for layer in model.layers:
                    layer.mlp(x)

            us = replay_us(captured(mixtures)) / len(model.layers)
            found.append({"rows": rows, "columns": columns, "warps": warps, "mixture_us": round(us, 2)})
    kernels.ROWS, kernels.COLUMNS, kernels.NUM_WARPS = before
    return sorted(found, key=lambda row: float(str(row["mixture_us"])))


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layout", default="fp8_ds_mla")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it measures a CUDA GPU, and torch sees none here")
    model = random_model(ModelConfig.from_hf({**FLASH, "num_hidden_layers": args.layers}), "cuda")
    half = MLADecoder(model.config, model.embed, model.layers[:1], model.final_norm, model.lm_head)
    report: dict[str, object] = {"layers": args.layers, "context": args.context, "layout": args.layout}
    for tokens in args.tokens:
        batch = batch_of(model, args.layout, tokens, args.context)
        graphs = [captured(lambda one=one, batch=batch: one.forward(batch)) for one in (model, half)]  # type: ignore[misc]
        times = [replay_us(graph) for graph in graphs]
        per_layer = (times[0] - times[1]) / max(1, args.layers - 1)
        table = kernel_table(graphs[0])
        report[f"tokens_{tokens}"] = {"step_us": times[0], "layer_us": per_layer, "kernels": table}
        args.out.write_text(json.dumps(report, indent=1))
        print(
            f"{tokens} tokens: {times[0]:.1f} us a step, {per_layer:.1f} us a layer, {len(table)} kernels", flush=True
        )
    if args.sweep:
        report["sweep"] = sweep(model)
        args.out.write_text(json.dumps(report, indent=1))
        print("best tiles:", report["sweep"][:3] if isinstance(report["sweep"], list) else "", flush=True)


if __name__ == "__main__":
    main()
