"""Records what a second GPU changes and what it gains: a random model of GLM-5's width, whole and shared by two GPUs.

    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 2 benchmarks/record_distributed.py --out DIR
    PYTHONPATH=src:. torchrun --standalone --nproc-per-node 2 benchmarks/record_distributed.py --out DIR --tiny   # on CPUs

Rank 0 first runs the whole model by itself, then all ranks run their parts; each weight comes from a seed of its own, so that
both are the same model.

Logits: a prompt, then decode steps over given tokens. In float32 both are compared as they are. The BF16 model has the same
weights; it is run with the experts that the float32 model chose, where both are also compared with the float32 model, and with
its own. Rows "with other experts" are those whose tokens went to other experts in any layer: two experts are nearly tied there,
and rounding decides.

Times: BF16 weights, dense attention, an `fp8_ds_mla` cache full of random rows; each step eager, decode also as a CUDA graph
(on a CPU: in static buffers, without one).

DIR/distributed.csv and distributed.json are written anew after every comparison and every series of times.
`--compile WHAT:LAYOUT` only compiles what a whole model or a part needs, so that processes side by side fill Triton's cache.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.distributed_logits import Looked, Routes, compare, difference, ids, looked_at, routes
from benchmarks.distributed_model import COMPARED, TIMED, TINY, build
from benchmarks.float32_attention import NAME as FLOAT32

from uncast.bench.environment import device_name, versions
from uncast.engine.crew import Crew, join_crew
from uncast.engine.lockstep import follow, make_runner
from uncast.engine.runner import ModelRunner, Sequence
from uncast.latent.codec import encode_rows
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import Parallel

LAYOUT, PAGE = "fp8_ds_mla", 64
COLUMNS = (
    "model", "what", "run", "processes", "ms_one", "ms_shared", "speed_up", "rows", "rows_with_other_experts",
    "largest_logit", "largest_difference", "largest_relative_to_row_maximum", "relative_norm", "device", "versions",
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A step: decode of `batch` requests of `context` rows, or a prefill of `context` tokens if `batch` is 0."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode {self.batch} x {self.context}" if self.batch else f"prefill {self.context}"


@dataclass(frozen=True)
class Sizes:
    """Of a recording: `tokens` of the compared prompt, and the timed steps, the largest decode last among them."""

    compared: ModelConfig
    timed: ModelConfig
    tokens: int
    loads: tuple[Load, ...]

    @property
    def decodes(self) -> tuple[Load, ...]:
        return tuple(load for load in self.loads if load.batch)

    @property
    def timed_pages(self) -> int:
        return max(-(-(load.context + 32) // PAGE) * max(1, load.batch) for load in self.loads)


FULL = Sizes(
    ModelConfig.from_hf(COMPARED), ModelConfig.from_hf(TIMED), 512,
    (Load(1, 4096), Load(16, 4096), Load(64, 4096), Load(0, 4096)),
)  # fmt: skip
SMALL = Sizes(
    ModelConfig.from_hf(TINY), ModelConfig.from_hf(TINY), 64, (Load(1, 64), Load(4, 64), Load(0, 128))
)  # fmt: skip


def fill(runner: ModelRunner) -> None:
    """Every page gets the same random rows."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn((PAGE, width), generator=generator) for width in (512, 64)]
    page = encode_rows(rows[0], rows[1], runner.pool.layout).to(runner.pool.storage.device)
    runner.pool.storage.copy_(page.expand_as(runner.pool.storage))


def timed(runner: ModelRunner, load: Load) -> float:
    """Median milliseconds of a step as its caller sees it."""
    vocab = runner.model.config.vocab_size
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


def one_step(runner: ModelRunner, load: Load) -> torch.Tensor:
    """Logits of a decode step, on the host."""
    sequences = [Sequence(ids(load.context + 1, runner.model.config.vocab_size, n)) for n in range(load.batch)]
    for sequence in sequences:
        runner.ensure_pages(sequence, load.context + 1)
        sequence.cached = load.context
    logits = runner.step([(sequence, 1) for sequence in sequences]).cpu()
    for sequence in sequences:
        runner.free(sequence)
    return logits


@dataclass
class Record:
    """What DIR gets, and what it gets it from."""

    out: Path
    world: int
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, config: ModelConfig, what: str, run: str, **values: Any) -> None:
        model = f"{config.num_layers} layers of width {config.hidden_size} with {config.num_heads} heads"
        named = {"model": model, "what": what, "run": run, "processes": self.world}
        self.rows.append({**named, **values, "device": device_name(), "versions": versions()})

    def compared(self, config: ModelConfig, what: str, one: Looked, two: Looked, ref: Looked | None = None) -> None:
        found = compare(one, two, sum(kind != "dense" for kind in config.mlp_kinds))
        if ref is not None:
            found["one_from_float32"] = difference(ref.logits, one.logits)
            found["shared_from_float32"] = difference(ref.logits, two.logits)
        self.facts[what] = found
        counts = {name: found[name] for name in ("rows", "rows_with_other_experts")}
        for part in ("all_rows", "rows_with_equal_experts", "one_from_float32", "shared_from_float32"):
            if part in found and (part != "rows_with_equal_experts" or found["rows_with_other_experts"]):
                values = {name: f"{number:.3g}" for name, number in found[part].items() if name in COLUMNS}
                self.add(config, f"logits: {what}", part.replace("_", " "), **counts, **values)
        print(f"logits {what}: {json.dumps(found)}", flush=True)
        self.write()

    def timed(self, config: ModelConfig, loads: tuple[Load, ...], run: str, one: list[float], two: list[float]) -> None:
        for load, alone, shared in zip(loads, one, two, strict=True):
            self.add(
                config, load.name, run,
                ms_one=round(alone, 3), ms_shared=round(shared, 3), speed_up=round(alone / shared, 3),
            )  # fmt: skip
        print(f"times {run}: {[f'{a:.3f} {b:.3f}' for a, b in zip(one, two, strict=True)]}", flush=True)
        self.write()

    def write(self) -> None:
        (self.out / "distributed.json").write_text(json.dumps(self.facts, indent=1) + "\n")
        with (self.out / "distributed.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)


@dataclass
class Stage:
    """One model in one cache, whole on rank 0 and then shared: the steps are the same functions of a runner."""

    crew: Crew
    device: torch.device
    after: Path | None

    def wait_for_kernels(self) -> None:
        """Until those that compile them are through, for a minute at most."""
        until = time.monotonic() + 60.0
        while self.after is not None and not self.after.exists() and time.monotonic() < until:
            time.sleep(0.1)

    def alone(self, config: ModelConfig, dtype: torch.dtype) -> MLADecoder:
        return build(config, self.device, dtype, None)

    def shared(
        self, config: ModelConfig, dtype: torch.dtype, pages: int, given: Routes | None, **options: Any
    ) -> ModelRunner | None:
        """Rank 0's runner; None on the others, which have run it by then."""
        self.crew = Crew(Parallel(self.crew.parallel.rank, self.crew.parallel.world), self.device)
        model = build(config, self.device, dtype, self.crew.parallel)
        runner = make_runner(model, self.crew, lambda: pages, **options)
        if options.get("kv_layout") == LAYOUT:
            fill(runner)
        if self.crew.leads:
            return runner
        with nullcontext() if given is None else routes(given):  # noting routes makes the host wait
            follow(runner, self.crew)
        self.end(runner)
        return None

    def end(self, runner: ModelRunner) -> None:
        self.crew.close()
        runner.release_steps()


def freed(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compared(stage: Stage, record: Record, sizes: Sizes) -> None:
    """In float32, then in BF16."""
    config, pages, leads = sizes.compared, -(-(sizes.tokens + 64) // PAGE), stage.crew.leads
    truth: Looked | None = None
    given: Routes | None = None
    for dtype, layout, backend in (
        (torch.float32, "fp32", FLOAT32), (torch.bfloat16, "bf16", "auto"), (torch.bfloat16, LAYOUT, "auto")
    ):  # fmt: skip
        what, alone = f"{str(dtype).removeprefix('torch.')} weights over {layout}", list[Looked]()
        if dtype != torch.float32:
            stage.wait_for_kernels()
        if leads:
            runner = ModelRunner(
                stage.alone(config, dtype), num_pages=pages, kv_layout=layout, attention_backend=backend
            )
            forced = truth and looked_at(runner, sizes.tokens, given)
            free = looked_at(runner, sizes.tokens)
            truth = truth or free
            alone += [forced or free, free]
            del runner
            freed(stage.device)
        given = given or shared_routes(truth.routes if truth else None, stage)
        shared = stage.shared(config, dtype, pages, given, kv_layout=layout, attention_backend=backend)
        if shared is not None:
            forced = looked_at(shared, sizes.tokens, given)
            record.compared(config, what, alone[1], looked_at(shared, sizes.tokens))
            record.compared(
                config, f"{what} with experts of float32", alone[0], forced, None if truth is alone[0] else truth
            )
            stage.end(shared)
        del shared
        freed(stage.device)


def shared_routes(routes: Routes | None, stage: Stage) -> Routes:
    """Rank 0's on every rank."""
    held = [routes]
    dist.broadcast_object_list(held, src=0, device=stage.device)
    assert held[0] is not None
    return held[0]


def eager_times(runner: ModelRunner, sizes: Sizes) -> list[float]:
    found = [timed(runner, load) for load in sizes.loads]
    print(f"eager, ms: {[round(ms, 3) for ms in found]}", flush=True)
    return found


def graph_times(runner: ModelRunner, sizes: Sizes) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds of captured decode steps, and how their logits differ from eager ones."""
    before = [one_step(runner, load) for load in sizes.decodes]
    batches = [load.batch for load in sizes.decodes]
    why_not = runner.capture(max(batches), buckets=batches)
    assert why_not is None, why_not
    after = [one_step(runner, load) for load in sizes.decodes]
    found = {load.name: difference(a, b) for load, a, b in zip(sizes.decodes, before, after, strict=True)}
    graph = [timed(runner, load) for load in sizes.decodes]
    print(f"graph, ms: {[round(ms, 3) for ms in graph]}", flush=True)
    return graph, found


def gained(stage: Stage, record: Record, sizes: Sizes) -> None:
    config, options = sizes.timed, {"kv_layout": LAYOUT}
    eager, graph = list[float](), list[float]()
    if stage.crew.leads:
        runner = ModelRunner(stage.alone(config, torch.bfloat16), num_pages=sizes.timed_pages, **options)  # type: ignore[arg-type]
        fill(runner)
        eager = eager_times(runner, sizes)
        graph, record.facts["captured from eager, one"] = graph_times(runner, sizes)
        runner.release_steps()
        del runner
        freed(stage.device)
    shared = stage.shared(config, torch.bfloat16, sizes.timed_pages, None, **options)
    if shared is not None:
        record.timed(config, sizes.loads, "eager", eager, eager_times(shared, sizes))
        found, record.facts["captured from eager, shared"] = graph_times(shared, sizes)
        record.timed(config, sizes.decodes, "graph", graph, found)
        stage.end(shared)


def compile_only(what: str, sizes: Sizes, device: torch.device) -> None:
    """Runs a dense layer and one with a mixture as everything else will run them, by itself: a part exchanges nothing."""
    kind, _, layout = what.partition(":")
    parallel = None
    if kind == "part":
        parallel = Parallel(0, 2)
        Parallel._collective = lambda self, run: None  # type: ignore[method-assign]
    for config in (sizes.compared, sizes.timed) if layout == LAYOUT else (sizes.compared,):
        config = replace(config, num_layers=2, mlp_kinds=config.mlp_kinds[:2])
        model = build(config, device, torch.bfloat16, parallel)
        runner = ModelRunner(model, num_pages=sizes.timed_pages + 16, kv_layout=layout)
        if layout == LAYOUT:
            fill(runner)
        looked_at(runner, sizes.tokens)
        if config.vocab_size == sizes.timed.vocab_size:
            eager_times(runner, sizes)
            graph_times(runner, sizes)
        del model, runner
        freed(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small model on CPUs")
    parser.add_argument("--compile", metavar="WHAT:LAYOUT", help="whole or part, and a layout; nothing is recorded")
    parser.add_argument("--after", type=Path, help="BF16 waits up to a minute until this file is there")
    args = parser.parse_args()
    sizes = SMALL if args.tiny else FULL
    cuda = torch.cuda.is_available()
    if args.compile:
        compile_only(args.compile, sizes, torch.device("cuda", 0) if cuda else torch.device("cpu"))
        return
    if args.out is None:
        parser.error("--out is missing")
    crew = join_crew(300.0)
    assert crew is not None, "start it with torchrun"
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    stage, record = Stage(crew, device, args.after), Record(args.out, crew.parallel.world)
    crew.close()
    compared(stage, record, sizes)
    gained(stage, record, sizes)
    if crew.leads:
        print("whole", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
