"""A stack of GLM-5's layers at true width, in NVFP4, through the engine's model runner; and its experts' product alone.

    PYTHONPATH=src python3 benchmarks/glm5_stack.py --out DIR               # one GPU: as many layers as fit
    PYTHONPATH=src python3 benchmarks/glm5_stack.py --out DIR --tiny        # small, on a CPU, to try the script

Weights are random and made where they stay: MLPs and experts NVFP4, attention and indexer BF16, as NVIDIA's GLM-5-NVFP4 has
them; every layer is a mixture. The cache holds random rows in `fp8_ds_mla`. Up to 2,048 tokens of context GLM-5's sparse
attention selects every token, so a step is dense by definition and only stores its index keys; longer contexts run the indexer
and sparse attention. Every shape runs again without an indexer, also as a CUDA graph (`graph_ms`), which is what a step takes
once its launches cost nothing; `--dense` runs only that.

Floor of a step: every weight byte that it needs (routed experts: those that were chosen), the cache rows and index keys that it
reads, over the bandwidth that a large copy reached on this machine (bytes read and written). Files: glm5-stack.csv and
packed-moe.csv, with versions.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from uncast.bench.environment import versions
from uncast.engine.runner import ModelRunner, Sequence
from uncast.latent.codec import encode_rows
from uncast.models.config import ModelConfig
from uncast.models.decoder import Layer, MLADecoder, MLAWeights
from uncast.models.experts import MLP, ExpertStack
from uncast.models.layers import MoE, route
from uncast.quant.packed import Fp8Blocks, Nvfp4, Packed

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
SPARE_BYTES = 20 << 30
"""Left for the pool's scratch, the probe's child processes and the benchmark's own buffers."""
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
        attention = MLAWeights(
            q_a=self.dense(q_rank, hidden), q_a_norm=ones(q_rank),
            q_b=self.dense(c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), q_rank),
            kv_a=self.dense(c.kv_lora_rank + c.qk_rope_head_dim, hidden), kv_a_norm=ones(c.kv_lora_rank),
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


def weight_bytes(value: object) -> int:
    """Of all weights reachable from a layer, except its routed experts."""
    if isinstance(value, torch.Tensor | Nvfp4 | Fp8Blocks):
        return value.nbytes
    if isinstance(value, ExpertStack):
        return 0
    return sum(map(weight_bytes, vars(value).values())) if hasattr(value, "__dict__") else 0


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
        weights, chosen = route(*args)
        counts.append(chosen.unique().numel())
        return weights, chosen

    module.route = counting
    try:
        step()
    finally:
        module.route = route
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
    row: dict[str, object] = {
        "batch": batch, "context": context, "layers": len(model.layers),
        "attention": attention_words(config, context),
        "backend": runner.attention_backend, "step_ms": round(eager, 3),
        "graph_ms": round(graph_time(runner, step), 3) if device == "cuda" and config.indexer is None else "",
        "floor_ms": round(floor, 3), "ms_a_layer": round(eager / len(model.layers), 4),
        "graph_ms_a_layer": "", "floor_ms_a_layer": round(1e3 * stack / rate / len(model.layers), 4),
        "experts_read": round(experts, 1), "gb_a_step": round((stack + model.lm_head.nbytes) / 1e9, 3),
        "gb_s_of_copy": round(rate / 1e9),
    }  # fmt: skip
    if row["graph_ms"] != "":
        row["graph_ms_a_layer"] = round(float(str(row["graph_ms"])) / len(model.layers), 4)
    for sequence in sequences:
        runner.free(sequence)
    print(row, flush=True)
    return row


def graph_time(runner: ModelRunner, step: Callable[[], object]) -> float:
    """Milliseconds of one step's forward pass replayed as a CUDA graph, its attention planned once."""
    decoder, kept = runner._decoder, []

    class Keep:
        def forward(self, batch: Any) -> torch.Tensor:
            kept.append(batch)
            return decoder.forward(batch)

    runner._decoder = Keep()  # type: ignore[assignment]
    try:
        step()
    finally:
        runner._decoder = decoder
    return graphed(lambda: decoder.forward(kept[0]))


def measure_experts(raw: dict[str, Any], batches: list[int], rate: float) -> list[dict[str, object]]:
    """The routed experts of one layer: our kernel, BF16 experts by torch's grouped product, and dequantising what was chosen
    before that product."""
    from uncast.quant.grouped import moe

    maker, c = Maker("cuda", torch.bfloat16), ModelConfig.from_hf(raw | {"num_hidden_layers": 1})
    assert c.moe is not None
    shapes = (c.moe.num_experts, 2 * c.moe.intermediate_size, c.hidden_size), (
        c.moe.num_experts, c.hidden_size, c.moe.intermediate_size,
    )  # fmt: skip
    dense: list[torch.Tensor] = [maker.dense(*shape) for shape in shapes]
    rows: list[dict[str, object]] = []
    for name, make in (("nvfp4", maker.nvfp4), ("fp8", maker.fp8)):
        packed: list[Packed] = [make(*shape) for shape in shapes]
        for batch in batches:
            x = torch.randn(batch, c.hidden_size, device="cuda", dtype=torch.bfloat16)
            logits = torch.randn(batch, c.moe.num_experts, device="cuda")
            weights, chosen = route(c.moe, logits, torch.zeros(c.moe.num_experts, device="cuda"))
            distinct = chosen.unique().tolist()

            def product(
                w: list[Any], x: torch.Tensor = x, weights: torch.Tensor = weights, chosen: torch.Tensor = chosen
            ) -> torch.Tensor:
                return moe(x, weights, chosen, w[0], w[1])

            def dequantise_first(
                packed: list[Packed] = packed, distinct: list[int] = distinct, product: Callable[..., Any] = product
            ) -> None:
                for target, source in zip(dense, packed, strict=True):
                    for expert in distinct:
                        target[expert].copy_(source.expert(expert).dequantize(torch.bfloat16))
                product(dense)

            needed = sum(p.nbytes for p in packed) * len(distinct) / c.moe.num_experts
            row: dict[str, object] = {
                "format": name, "batch": batch, "experts_read": len(distinct),
                "packed_us": round(1e3 * graphed(lambda packed=packed, product=product: product(packed)), 1),
                "bf16_grouped_us": round(1e3 * graphed(lambda product=product: product(dense)), 1),
                "dequantise_then_grouped_us": round(1e3 * graphed(dequantise_first, 3), 1) if batch <= 64 else "",
                "floor_us": round(1e6 * needed / rate, 1), "gb_s_of_copy": round(rate / 1e9),
            }  # fmt: skip
            print(row, flush=True)
            rows.append(row)
        del packed
    return rows


def write(path: Path, rows: list[dict[str, object]], device: str) -> None:
    if not rows:
        return
    where = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "none", "versions": versions()}
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, [*rows[0], *where], lineterminator="\n")
        out.writeheader()
        out.writerows(row | where for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV files")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--dense", action="store_true", help="the same shapes without the indexer")
    parser.add_argument("--layers", type=int, help="layers (default: as many as fit)")
    parser.add_argument("--steps", default="1x2047,8x2047,32x2047,128x2047", help="batch x context, comma-separated")
    parser.add_argument("--experts", default="1,4,16,64,256,1024", help="batches for the experts alone; '' skips them")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if args.tiny else "cuda"
    raw = TINY if args.tiny else GLM_5
    if args.dense:
        raw = raw | {"model_type": "glm4_moe_lite"}
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.steps.split(",")]
    rate = copy_rate(device)
    if args.experts and device == "cuda":
        batches = [int(batch) for batch in args.experts.split(",")]
        write(args.out / "packed-moe.csv", measure_experts(raw, batches, rate), device)
        torch.cuda.empty_cache()
    pages = max(batch * -(-(context + 1) // 64) for batch, context in shapes)
    layers = args.layers or (2 if args.tiny else layers_that_fit(raw, pages * 64 * (656 + 132)))
    start = time.perf_counter()
    model = build(raw, layers, device, torch.float32 if args.tiny else torch.bfloat16)
    sync(device)
    made = time.perf_counter() - start
    rows = []
    models = [model] if model.config.indexer is None else [model, without_indexer(model)]
    for variant in models:
        runner = ModelRunner(variant, kv_layout="fp8_ds_mla", num_pages=pages)
        print(f"{layers} layers made in {made:.1f} s, runner up after {time.perf_counter() - start:.1f} s", flush=True)
        fill_cache(runner)
        rows += [measure_steps(runner, b, t, rate, device, 3 if args.tiny else 10) for b, t in shapes]
    write(args.out / "glm5-stack.csv", rows, device)


if __name__ == "__main__":
    main()
