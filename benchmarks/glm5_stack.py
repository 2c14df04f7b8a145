"""A stack of GLM-5's layers at true width, in NVFP4, through the engine's model runner.

    PYTHONPATH=src python3 benchmarks/glm5_stack.py --out DIR               # one GPU: as many layers as fit
    PYTHONPATH=src python3 benchmarks/glm5_stack.py --out DIR --tiny        # small, on a CPU, to try the script

Weights are random and made where they stay: MLPs and experts NVFP4, attention and indexer BF16, as NVIDIA's GLM-5-NVFP4 has
them; every layer is a mixture. The cache holds random rows in `fp8_ds_mla`. Up to 2,048 tokens of context GLM-5's sparse
attention selects every token, so a step is dense by definition and only stores its index keys; longer contexts run the indexer
and sparse attention. `step_ms` is the runner's eager step as its caller sees it, `graph_ms` the same step of the same runner
after `capture`, which replays CUDA graphs. Every shape runs again without an indexer; `--dense` runs only that.

Floor of a step: every weight byte that it needs (routed experts: those that were chosen), the cache rows and index keys that it
reads, over the bandwidth that a large copy reached on this machine (bytes read and written). File: glm5-stack.csv, written anew
after every row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from glm5_weights import GLM_5, TINY, Maker, copy_rate, sync, timed, write

from uncast.engine.runner import ModelRunner, Sequence
from uncast.latent.codec import encode_rows
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.experts import ExpertStack
from uncast.models.fused import choose_experts
from uncast.models.layers import MoE
from uncast.quant.packed import Fp8Blocks, Nvfp4

SPARE_BYTES = 20 << 30
"""Left for the pool's scratch, the probe's child processes and the benchmark's own buffers."""


def weight_bytes(value: object) -> int:
    """Of all weights reachable from a layer, except its routed experts."""
    if isinstance(value, torch.Tensor | Nvfp4 | Fp8Blocks):
        return value.nbytes
    if isinstance(value, ExpertStack):
        return 0
    return sum(map(weight_bytes, vars(value).values())) if hasattr(value, "__dict__") else 0


def build(raw: dict[str, Any], layers: int, device: str, dtype: torch.dtype) -> MLADecoder:
    config, maker = ModelConfig.from_hf(raw | {"num_hidden_layers": layers}), Maker(device, dtype)
    embed = maker.dense(config.vocab_size, config.hidden_size)
    stack = [maker.layer(config, index) for index in range(layers)]
    return MLADecoder(config, embed, stack, maker._ones(config.hidden_size), maker.dense(*embed.shape))


def layers_that_fit(raw: dict[str, Any], pool_bytes_a_layer: int) -> int:
    """By the bytes of one layer, measured on the meta device."""
    config = ModelConfig.from_hf(raw | {"num_hidden_layers": 1})
    layer = Maker("meta", torch.bfloat16).layer(config, 0)
    assert isinstance(layer.mlp, MoE) and isinstance(layer.mlp.experts, ExpertStack)
    experts = layer.mlp.experts.gate_up.nbytes + layer.mlp.experts.down.nbytes
    outside = 4 * config.vocab_size * config.hidden_size
    free = torch.cuda.mem_get_info()[0] - SPARE_BYTES - outside
    return int(free // (weight_bytes(layer) + experts + pool_bytes_a_layer))


def without_indexer(model: MLADecoder) -> MLADecoder:
    """The same weights; up to index_topk tokens of context the same results."""
    layers = [replace(layer, attention=replace(layer.attention, indexer=None)) for layer in model.layers]
    config = replace(model.config, indexer=None)
    return MLADecoder(config, model.embed, layers, model.final_norm, model.lm_head)


def fill_cache(runner: ModelRunner) -> None:
    """Random rows in every slot of every layer; index keys of random codes with scale 1."""
    pool, c = runner.pool, runner.model.config
    rows = encode_rows(
        torch.randn(4096, c.kv_lora_rank), torch.randn(4096, c.qk_rope_head_dim), pool.layout
    ).to(pool.storage.device)  # fmt: skip
    for layer in range(pool.num_layers):
        flat = pool.storage[layer].view(-1, pool.layout.row_bytes)
        for start in range(0, flat.shape[0], 4096):
            flat[start : start + 4096].copy_(rows[: flat.shape[0] - start])
    if pool.index_storage is not None and pool.index_layout is not None:
        pages = pool.index_storage.view(-1, pool.index_storage.shape[-2] * pool.index_storage.shape[-1])
        scales = pool.index_layout.scale_offset(runner.page_size)
        pages[:, :scales].random_(0, 0x70)
        if scales < pages.shape[1]:
            pages[:, scales:].view(torch.float32).fill_(1.0)


def chosen_experts(runner: ModelRunner, step: Callable[[], object]) -> float:
    """Different experts that a layer's step reads, on average: the routers are asked while one step runs."""
    import uncast.models.layers as module

    counts: list[int] = []

    def counting(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = choose_experts(*args)
        counts.append(chosen.unique().numel())
        return weights, chosen

    module.choose_experts = counting
    try:
        step()
    finally:
        module.choose_experts = choose_experts
    return sum(counts) / len(counts)


def attention_words(config: ModelConfig, context: int) -> str:
    if config.indexer is None:
        return "dense"
    return "sparse" if context + 1 > config.indexer.topk else "dense, index keys stored"


def measure_steps(
    runner: ModelRunner, batch: int, context: int, rate: float, device: str, repeats: int
) -> dict[str, object]:
    """One row: `batch` sequences of `context` cached tokens decode one token each."""
    model, config = runner.model, runner.model.config
    sequences = []
    for index in range(batch):
        sequence = Sequence([(7919 * (index + i)) % config.vocab_size for i in range(context + 1)])
        runner.ensure_pages(sequence, context + 1)
        sequences.append(sequence)

    def step() -> None:
        for sequence in sequences:
            sequence.cached = context
        logits = runner.step([(sequence, 1) for sequence in sequences])
        assert logits.shape == (batch, config.vocab_size)

    step()
    experts = chosen_experts(runner, step)
    cache = runner.last_step_bytes().needed
    layer = model.layers[0]
    assert isinstance(layer.mlp, MoE) and isinstance(layer.mlp.experts, ExpertStack)
    a_expert = (layer.mlp.experts.gate_up.nbytes + layer.mlp.experts.down.nbytes) / len(layer.mlp.experts)
    stack = len(model.layers) * (weight_bytes(layer) + experts * a_expert) + cache
    floor = 1e3 * (stack + model.lm_head.nbytes) / rate
    eager = timed(step, device, repeats)
    why_not = runner.capture(batch, buckets=(batch,))
    if why_not is not None:
        print(f"{batch} x {context}: {why_not}", flush=True)
    graph = None if why_not is not None else timed(step, device, repeats)
    runner.decode_steps = None
    row: dict[str, object] = {
        "batch": batch, "context": context, "layers": len(model.layers),
        "attention": attention_words(config, context),
        "backend": runner.attention_backend, "step_ms": round(eager, 3),
        "graph_ms": "" if graph is None else round(graph, 3),
        "floor_ms": round(floor, 3), "ms_a_layer": round(eager / len(model.layers), 4),
        "graph_ms_a_layer": "" if graph is None else round(graph / len(model.layers), 4),
        "floor_ms_a_layer": round(1e3 * stack / rate / len(model.layers), 4),
        "experts_read": round(experts, 1), "gb_a_step": round((stack + model.lm_head.nbytes) / 1e9, 3),
        "gb_s_of_copy": round(rate / 1e9),
    }  # fmt: skip
    for sequence in sequences:
        runner.free(sequence)
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV files")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--dense", action="store_true", help="the same shapes without the indexer")
    parser.add_argument("--layers", type=int, help="layers (default: as many as fit)")
    parser.add_argument("--steps", default="1x2047,8x2047,32x2047,128x2047", help="batch x context, comma-separated")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if args.tiny else "cuda"
    raw = TINY if args.tiny else GLM_5
    if args.dense:
        raw = raw | {"model_type": "glm4_moe_lite"}
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.steps.split(",")]
    rate = copy_rate(device)
    pages = max(batch * -(-(context + 1) // 64) for batch, context in shapes)
    layers = args.layers or (2 if args.tiny else layers_that_fit(raw, pages * 64 * (656 + 132)))
    start = time.perf_counter()
    model = build(raw, layers, device, torch.float32 if args.tiny else torch.bfloat16)
    sync(device)
    made = time.perf_counter() - start
    rows: list[dict[str, object]] = []
    models = [model] if model.config.indexer is None else [model, without_indexer(model)]
    for variant in models:
        runner = ModelRunner(variant, kv_layout="fp8_ds_mla", num_pages=pages)
        print(f"{layers} layers made in {made:.1f} s, runner up after {time.perf_counter() - start:.1f} s", flush=True)
        fill_cache(runner)
        for batch, context in shapes:
            rows.append(measure_steps(runner, batch, context, rate, device, 3 if args.tiny else 10))
            write(args.out / "glm5-stack.csv", rows, device)


if __name__ == "__main__":
    main()
