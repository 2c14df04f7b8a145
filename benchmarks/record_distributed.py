"""Records what a second GPU gains, and that it changes nothing: a random model of GLM-5's width, whole and shared by two GPUs.

    PYTHONPATH=src torchrun --standalone --nproc-per-node 2 benchmarks/record_distributed.py --out DIR
    PYTHONPATH=src torchrun --standalone --nproc-per-node 2 benchmarks/record_distributed.py --out DIR --tiny   # on CPUs

Rank 0 first runs the whole model by itself, then all ranks run their parts; each weight comes from a seed of its own, so that
both are the same model. Dense attention, BF16 weights; times are with an `fp8_ds_mla` cache that is filled with random rows.

DIR/distributed.csv has a row per step; distributed.json, by weights' dtype and cache, the differences of logits over the rows
of a prefill whose tokens went to the same experts in every layer, and how many rows did not (two experts are nearly tied there,
and rounding decides). On GPUs a smaller model of the same widths is compared in float16, too: its rounding is eight times finer
than BF16's, so that a fault of the split would stand out of it.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from uncast.bench.environment import device_name, versions
from uncast.checkpoints.shard import shard_layer
from uncast.engine.crew import Crew, join_crew
from uncast.engine.lockstep import follow, make_runner
from uncast.engine.runner import ModelRunner, Sequence
from uncast.latent.codec import encode_rows
from uncast.models import layers as model_layers
from uncast.models import parallel as model_parallel
from uncast.models.config import ModelConfig
from uncast.models.decoder import Layer, MLADecoder, MLAWeights
from uncast.models.layers import MLP, ExpertStack, MoE
from uncast.models.parallel import Parallel, local_config

LAYOUTS, TIMED, PAGE = ("bf16", "fp8_ds_mla"), "fp8_ds_mla", 64
GLM5: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 6144, "num_attention_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_theta": 1e6}, "num_hidden_layers": 5,
}  # fmt: skip
TINY = {
    **GLM5, "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 64, "intermediate_size": 256,
    "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A step: decode of `batch` requests of `context` rows, or a prefill of `context` tokens if `batch` is 0."""

    batch: int
    context: int


COMPARED = {**GLM5, "n_routed_experts": 32, "num_hidden_layers": 4, "vocab_size": 32768}
LOADS = (Load(1, 4096), Load(16, 4096), Load(64, 4096), Load(0, 4096))
TINY_LOADS = (Load(1, 64), Load(4, 64), Load(0, 128))


class Maker:
    """Random weights, each from its own seed."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype, self.seed = config, device, dtype, 0

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator(self.device).manual_seed(self.seed)
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def layer(self, index: int, mine: range) -> Layer:
        """Whole but for the routed experts, of which it has `mine`."""
        c = self.config
        hidden, rank = c.hidden_size, c.q_lora_rank or 0
        attention = MLAWeights(
            q_a=self.weight(rank, hidden),
            q_a_norm=self.ones(rank),
            q_b=self.weight(c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), rank),
            kv_a=self.weight(c.kv_lora_rank + c.qk_rope_head_dim, hidden),
            kv_a_norm=self.ones(c.kv_lora_rank),
            w_uk=self.weight(c.num_heads, c.qk_nope_head_dim, c.kv_lora_rank),
            w_uv=self.weight(c.num_heads, c.v_head_dim, c.kv_lora_rank),
            o=self.weight(hidden, c.num_heads * c.v_head_dim),
        )
        mlp = self.mlp(c.intermediate_size) if c.mlp_kinds[index] == "dense" else self.moe(mine)
        return Layer(self.ones(hidden), attention, self.ones(hidden), mlp)

    def mlp(self, width: int) -> MLP:
        return MLP(self.weight(2 * width, self.config.hidden_size), self.weight(self.config.hidden_size, width))

    def moe(self, mine: range) -> MoE:
        c, moe = self.config, self.config.moe
        assert moe is not None
        gate_up = self.weight(moe.num_experts, 2 * moe.intermediate_size, c.hidden_size)[mine.start : mine.stop].clone()
        down = self.weight(moe.num_experts, c.hidden_size, moe.intermediate_size)[mine.start : mine.stop].clone()
        router = self.weight(moe.num_experts, c.hidden_size, dtype=torch.float32)
        bias = torch.zeros(moe.num_experts, device=self.device)
        return MoE(moe, router, bias, ExpertStack(gate_up, down), self.mlp(moe.num_shared * moe.intermediate_size))


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype, parallel: Parallel | None) -> MLADecoder:
    """The model, or this rank's part."""
    maker = Maker(config, device, dtype)
    experts = range(config.moe.num_experts if config.moe is not None else 0)
    mine = experts if parallel is None else parallel.range_of(len(experts))
    embed, lm_head = (
        maker.weight(config.vocab_size, config.hidden_size),
        maker.weight(config.vocab_size, config.hidden_size),
    )
    made = []
    for index in range(config.num_layers):
        layer = maker.layer(index, mine)
        made.append(layer if parallel is None else shard_layer(layer, config, parallel, dtype))
    if parallel is not None:
        rows = parallel.range_of(config.vocab_size)
        lm_head, config = lm_head[rows.start : rows.stop].clone(), local_config(config, parallel)
    return MLADecoder(
        config, embed, made, maker.ones(config.hidden_size), lm_head, prefill="absorbed", parallel=parallel
    )


def fill(runner: ModelRunner) -> None:
    """Every page gets the same random rows."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn((PAGE, width), generator=generator) for width in (512, 64)]
    page = encode_rows(rows[0], rows[1], runner.pool.layout).to(runner.pool.storage.device)
    runner.pool.storage.copy_(page.expand_as(runner.pool.storage))


def ids(count: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def timed(runner: ModelRunner, load: Load, vocab: int) -> float:
    """Median milliseconds of a step as its caller sees it."""
    count, times = (load.batch, 12) if load.batch else (1, 4), []
    sequences = [Sequence(ids(load.context + 32, vocab, number)) for number in range(count[0])]
    for sequence in sequences:
        runner.ensure_pages(sequence, load.context + 32)
    for turn in range(count[1] + 2):
        for sequence in sequences:
            sequence.cached = load.context if load.batch else 0
        began = time.perf_counter()
        float(runner.step([(sequence, 1 if load.batch else load.context) for sequence in sequences])[0, 0])
        if turn >= 2:
            times.append(1e3 * (time.perf_counter() - began))
    for sequence in sequences:
        runner.free(sequence)
    return statistics.median(times)


@contextmanager
def routes() -> Iterator[list[torch.Tensor]]:
    """The experts chosen by every mixture while it is open."""
    seen: list[torch.Tensor] = []
    plain = model_layers.choose_experts

    def watched(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = plain(*arguments)
        seen.append(chosen.sort(-1).values.cpu())
        return weights, chosen

    for module in (model_layers, model_parallel):
        module.choose_experts = watched  # type: ignore[attr-defined]
    yield seen
    for module in (model_layers, model_parallel):
        module.choose_experts = plain  # type: ignore[attr-defined]


def looked_at(runner: ModelRunner, tokens: int, vocab: int) -> dict[str, Any]:
    """Logits of every token of a prompt, the experts it went to, and the greedy tokens after it."""
    sequence = Sequence(ids(tokens, vocab, 99))
    runner.ensure_pages(sequence, tokens + 24)
    with routes() as seen:
        logits = runner.step([(sequence, tokens)], every_token=True)
    following = [int(logits[-1].argmax())]
    for _ in range(23):
        sequence.tokens.append(following[-1])
        following.append(int(runner.step([(sequence, 1)])[0].argmax()))
    runner.free(sequence)
    return {"logits": logits, "experts": torch.stack(seen) if seen else None, "greedy": following}


def compare(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    same = (one["experts"] == two["experts"]).all(-1).all(0).to(one["logits"].device)
    difference = (one["logits"] - two["logits"])[same].abs()
    scale = one["logits"][same].abs().amax(-1)
    agreed = next(
        (i for i, (a, b) in enumerate(zip(one["greedy"], two["greedy"], strict=True)) if a != b), len(one["greedy"])
    )
    return {
        "rows": len(same),
        "rows_with_other_experts": int((~same).sum()),
        "largest_logit": float(scale.max()),
        "largest_difference": float(difference.max()),
        "largest_relative_to_row_maximum": float((difference.amax(-1) / scale).max()),
        "relative_norm": float(difference.norm() / one["logits"][same].norm()),
        "top1_equal": float((one["logits"].argmax(-1) == two["logits"].argmax(-1))[same].float().mean()),
        "greedy_tokens_equal": agreed,
    }


Found = tuple[dict[str, dict[str, Any]], list[float]]
"""What was looked at, by layout, and milliseconds of each load."""


@dataclass(frozen=True)
class Run:
    """A model and what is done with it: `tokens` of a prompt are compared, `loads` are timed."""

    config: ModelConfig
    dtype: torch.dtype
    loads: tuple[Load, ...]
    tokens: int

    def pages(self, layout: str) -> int:
        """Of a runner."""
        if layout != TIMED or not self.loads:
            return self.tokens
        return sum(-(-(load.context + 32) // PAGE) * max(1, load.batch) for load in self.loads[-2:]) + 8


def watched(runner: ModelRunner, run: Run, layout: str, looked: dict[str, dict[str, Any]]) -> list[float]:
    """Notes what is looked at; times of the loads, if this is the layout for them."""
    looked[layout] = looked_at(runner, run.tokens, run.config.vocab_size)
    return [timed(runner, load, run.config.vocab_size) for load in run.loads] if layout == TIMED else []


def by_itself(model: MLADecoder, run: Run) -> Found:
    looked, times = dict[str, dict[str, Any]](), list[float]()
    for layout in LAYOUTS:
        runner = ModelRunner(model, kv_layout=layout, num_pages=run.pages(layout))
        if layout == TIMED:
            fill(runner)
        times += watched(runner, run, layout, looked)
    return looked, times


def together(crew: Crew, model: MLADecoder, run: Run) -> Found | None:
    """The same on rank 0; None on a rank that follows."""
    looked, times = dict[str, dict[str, Any]](), list[float]()
    for layout in LAYOUTS:
        if layout != LAYOUTS[0]:
            crew = Crew(crew.parallel, model.device)
        count = run.pages(layout)
        runner = make_runner(model, crew, lambda count=count: count, kv_layout=layout)  # type: ignore[misc]
        if layout == TIMED:
            fill(runner)
        if crew.leads:
            times += watched(runner, run, layout, looked)
        else:
            follow(runner, crew)
        crew.close()
    return (looked, times) if crew.leads else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a small model in float32 on CPUs")
    args = parser.parse_args()
    crew = join_crew(300.0)
    assert crew is not None, "start it with torchrun"
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.float32 if args.tiny else torch.bfloat16
    config, loads = ModelConfig.from_hf(TINY if args.tiny else GLM5), TINY_LOADS if args.tiny else LOADS
    runs = [Run(config, dtype, loads, 64 if args.tiny else 512)]
    if not args.tiny:
        runs.append(Run(ModelConfig.from_hf(COMPARED), torch.float16, (), 512))
    began, alone = time.perf_counter(), list[Found]()
    for run in runs if crew.leads else ():
        model = build(run.config, device, run.dtype, None)
        print(f"whole model made after {time.perf_counter() - began:.1f} s", flush=True)
        alone.append(by_itself(model, run))
        print(f"one, ms: {[round(ms, 3) for ms in alone[-1][1]]} after {time.perf_counter() - began:.1f} s", flush=True)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not crew.leads:  # compile this rank's kernels meanwhile
        part = replace(config, num_heads=config.num_heads // crew.parallel.world, num_layers=1, mlp_kinds=("dense",))
        by_itself(build(part, device, dtype, None), replace(runs[0], config=part))
    crew.wait_ready()
    parallel, facts = crew.parallel, dict[str, Any]()
    for number, run in enumerate(runs):
        crew = Crew(parallel, device) if number else crew
        shared = together(crew, build(run.config, device, run.dtype, parallel), run)
        if shared is None:
            continue
        print(f"shared, ms: {[round(ms, 3) for ms in shared[1]]} after {time.perf_counter() - began:.1f} s", flush=True)
        for layout in LAYOUTS:
            name = f"{str(run.dtype).removeprefix('torch.')} weights, {layout} cache"
            facts[name] = compare(alone[number][0][layout], shared[0][layout])
            print(name, json.dumps(facts[name]), flush=True)
        (args.out / "distributed.json").write_text(json.dumps(facts, indent=1) + "\n")
        if run.loads:
            record(args.out, run, parallel.world, alone[number][1], shared[1])
    dist.destroy_process_group()


def record(out: Path, run: Run, world: int, alone: list[float], shared: list[float]) -> None:
    config = run.config
    rows = [
        {
            "model": f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads",
            "step": f"decode {load.batch} x {load.context}" if load.batch else f"prefill {load.context}",
            "processes": world,
            "ms_one": round(one, 3),
            "ms_shared": round(two, 3),
            "speed_up": round(one / two, 3),
            "device": device_name(),
            "versions": versions(),
        }
        for load, one, two in zip(run.loads, alone, shared, strict=True)
    ]
    with (out / "distributed.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
