"""Few rows on a GPU: which operations give a row other bits when more rows stand beside it, and what preventing that costs.

    python benchmarks/few_rows.py ops --out few-rows-ops-h200.json  # by operation: 1 to 16 rows against 16, and a row elsewhere
    python benchmarks/few_rows.py times --out few-rows-h200.json    # decode and verification steps in graphs, before and after

GLM-4.7-Flash's shapes with random weights. `ops`: `plain` is what a library or kernel does with n rows, `engine` what a
decoder's step does (`uncast.kernels.row_tile`, `alone_rows`); of both the numbers of rows, and places, at which some row has
other bits. `times`: before is the same engine with products of n rows, a verification's rows packed for attention, and splits
by the batch; rounds alternate. Results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from decode_layer import FLASH, kernel_table, random_model
from glm5_weights import Maker
from torch.nn import functional as F

from uncast.attention import MLAPagedAttention
from uncast.bench.environment import versions
from uncast.engine.drafted import DraftedRequest
from uncast.engine.runner import ModelRunner
from uncast.engine.sampler import sample_rows
from uncast.engine.static_step import StepRequest
from uncast.kernels import norm_rope, row_tile
from uncast.kernels.few_tokens_moe import few_tokens_moe
from uncast.kernels.router import choose, router_logits
from uncast.kernels.row_tile import ROW_TILE, new_rows, whole_tile
from uncast.latent.codec import encode_rows
from uncast.latent.layouts import row_layout
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder, MTPLayer
from uncast.quant.grouped import moe, packed_linear
from uncast.quant.matmul import linear

Rows = Callable[[torch.Tensor], torch.Tensor]
"""From rows [n, ...] of an operation's input to rows [n, ...] of its result."""
MATRICES = {"qkv_a": (1344, 2048), "q_b": (5120, 768), "o": (2048, 5120), "gate_up": (20480, 2048), "down": (2048, 10240),
            "eh_proj": (2048, 4096), "lm_head": (154880, 2048), "tiny q_b": (512, 128), "tiny o": (384, 256)}  # fmt: skip
CONTEXTS = (70, 1000, 8448, 30000)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    scale: float = shape[-1] ** -0.5
    return torch.randn(shape, device="cuda", dtype=dtype) * scale


def in_tile(x: torch.Tensor) -> torch.Tensor:
    """x as the kernels before a product leave it."""
    kept = new_rows(x, *x.shape)
    kept.copy_(x)
    return kept


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN as well."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def other_bits(run: Rows, x: torch.Tensor) -> list[str]:
    """Where rows of fewer than 16, or a row by itself from another place, differ from those of all 16."""
    expected = run(x).clone()
    found = [f"{n} rows" for n in range(1, ROW_TILE) if not same(run(x[:n]), expected[:n])]
    return found + [f"row {k} alone" for k in (3, 15) if not same(run(x[k : k + 1].clone()), expected[k : k + 1])]


def products() -> Iterator[tuple[str, Rows, Rows, torch.Tensor]]:
    """Name, plain, engine, input."""
    for name, shape in MATRICES.items():
        weight = made(*shape)
        x = torch.randn(ROW_TILE, shape[1], device="cuda", dtype=torch.bfloat16)
        yield f"linear {name}", lambda x, w=weight: F.linear(x, w), lambda x, w=weight: linear(in_tile(x), w), x
    for name, width, across in (("w_uk", 192, 512), ("w_uv", 512, 256)):
        weight = made(20, width, across)
        x = torch.randn(ROW_TILE, 20, width, device="cuda", dtype=torch.bfloat16)
        yield (
            f"bmm {name}",
            lambda x, w=weight: torch.bmm(x.transpose(0, 1), w).transpose(0, 1),
            lambda x, w=weight: torch.bmm(whole_tile(in_tile(x)).transpose(0, 1), w).transpose(0, 1)[: x.shape[0]],
            x,
        )
    maker = Maker("cuda", torch.bfloat16)
    for kind, make in (("fp8", maker.fp8), ("nvfp4", maker.nvfp4)):
        for name in ("qkv_a", "o"):
            packed = make(*MATRICES[name])
            x = torch.randn(ROW_TILE, MATRICES[name][1], device="cuda", dtype=torch.bfloat16)
            yield f"{kind} {name}", lambda x, w=packed: packed_linear(x, w), lambda x, w=packed: linear(x, w), x
    hidden, width, experts = 2048, 1536, 64
    x = torch.randn(ROW_TILE, hidden, device="cuda", dtype=torch.bfloat16)
    router = made(experts, hidden, dtype=torch.float32)
    bias = torch.zeros(experts, device="cuda")

    def chosen(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = router_logits(x, router)
        return choose(logits, bias, sigmoid=True, groups=1, top_groups=1, top_k=4, normalize=True, scale=1.8)

    yield "router", lambda x: torch.cat([part.float() for part in chosen(x)], 1), lambda x: chosen(x)[0], x
    up, down = made(experts, 2 * width, hidden), made(experts, hidden, width)
    shared = made(2 * width, hidden), made(hidden, width)
    yield (
        "mixture",
        lambda x: moe(x, *chosen(x), up, down),
        lambda x: few_tokens_moe(x, *chosen(x), up, down, shared),
        x,
    )
    for kind, make in (("fp8", maker.fp8), ("nvfp4", maker.nvfp4)):
        stacks = make(experts, 2 * width, hidden), make(experts, hidden, width)
        run: Rows = lambda x, w=stacks: moe(x, *chosen(x), *w)  # type: ignore[misc]  # noqa: E731
        yield f"{kind} mixture", run, run, x


def small_steps() -> Iterator[tuple[str, Rows, Rows, torch.Tensor]]:
    x = torch.randn(ROW_TILE, 2048, device="cuda", dtype=torch.bfloat16)
    weight, latent = made(2048) + 1, torch.randn(ROW_TILE, 1344, device="cuda", dtype=torch.bfloat16)
    q_norm, kv_norm = made(768) + 1, made(512) + 1

    def norm(x: torch.Tensor) -> torch.Tensor:
        return norm_rope.add_rms_norm(x, weight, 1e-5, x, 1.0)[0]

    def parts(x: torch.Tensor) -> torch.Tensor:
        c_q, ckv, _ = norm_rope.latent_parts(x[:, :768], x[:, 768:], q_norm, kv_norm, 1e-5, None, True)
        assert c_q is not None
        return torch.cat([c_q, ckv], 1)

    def torch_norm(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)

    yield "norm", torch_norm, norm, x
    yield "latent parts", parts, parts, latent
    yield "silu", norm_rope.silu_mul, norm_rope.silu_mul, x
    logits = torch.randn(ROW_TILE, 154880, device="cuda").bfloat16().float()
    logits[:, 777] = logits[:, 99_999] = logits.max()  # ties
    first = lambda x: x.max(-1).indices  # noqa: E731
    yield "likeliest token", lambda x: x.argmax(-1), first, logits
    ties = [x.tolist() for x in (first(logits), logits.argmax(-1), logits[0].argmax()[None])]
    print("of equal logits the first is taken:", all(found == 777 for one in ties for found in one), flush=True)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        columns = torch.tensor([0.8, 40.0, 0.95, 0.0, 0.37], dtype=torch.float64, device="cuda")
        return sample_rows(x, columns[:, None].expand(5, x.shape[0]), x.argmax(-1))

    yield "drawn token", drawn, drawn, logits
    yield "sum over the vocabulary", lambda x: x.double().cumsum(-1), lambda x: x.double().cumsum(-1), logits[:, :4096]


def attention_rows(layout: str, context: int, rows: int, heads: int = 20) -> dict[str, list[str]]:
    """Rows of one sequence that ends at `context` + `rows`: packed as one request, and as requests of their own that are split
    as alone; at which row they have other bits than a decode step's."""
    spec, pages = row_layout(layout, 512, 64), (context + rows) // 64 + 1
    torch.manual_seed(1)
    q_nope, q_pe = (torch.randn(rows, heads, width, device="cuda", dtype=torch.bfloat16) for width in (512, 64))
    ckv, kpe = (torch.randn(pages * 64, width, device="cuda", dtype=torch.bfloat16) for width in (512, 64))
    cache = encode_rows(ckv, kpe, spec).view(pages, 64, -1)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32)[None]
    given: dict[str, Any] = {"num_heads": heads, "sm_scale": 0.06, "kv_layout": layout}

    def attend(q_lens: list[int], kv_lens: list[int], first: int, alone_rows: int = 0) -> torch.Tensor:
        starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        attention = MLAPagedAttention("native")
        attention.plan(
            starts, block_tables=table.expand(len(kv_lens), -1).contiguous(), max_q_len=max(q_lens), total_q=sum(q_lens),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32).cuda(), alone_rows=alone_rows, **given,
        )  # fmt: skip
        last = first + sum(q_lens)
        out = attention.run(q_nope[first:last], q_pe[first:last], cache)
        assert isinstance(out, torch.Tensor)
        return out

    lens = [context + 1 + row for row in range(rows)]
    packed, each = attend([rows], lens[-1:], 0), attend([1] * rows, lens, 0, alone_rows=rows)
    found: dict[str, list[str]] = {"plain": [], "engine": []}
    for row, length in enumerate(lens):
        if not same(attend([1], [length], row), packed[row : row + 1]):
            found["plain"].append(f"row {row} of {rows}")
        if not same(attend([1], [length], row, alone_rows=1), each[row : row + 1]):
            found["engine"].append(f"row {row} of {rows}")
    return found


@torch.inference_mode()
def ops(out: Path) -> None:
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "versions": versions()}
    bad = []

    def keep(name: str, plain: list[str], engine: list[str]) -> None:
        report[name] = {"plain": plain, "engine": engine}
        bad.extend([name] if engine else [])
        print(
            f"{name:26} plain {' '.join(plain)[:60] or 'same':60} engine {' '.join(engine)[:60] or 'same'}", flush=True
        )
        out.write_text(json.dumps(report, indent=1))

    for made_by in (products, small_steps):
        for name, plain, engine, x in made_by():
            keep(name, other_bits(plain, x), other_bits(engine, x))
    for layout in ("fp8_ds_mla", "fp8_e4m3", "bf16"):
        for context in CONTEXTS:
            both = [attention_rows(layout, context, rows) for rows in (2, 3, 4, 9)]
            packed, each = ([row for one in both for row in one[key]] for key in ("plain", "engine"))
            keep(f"attention {layout} {context}", packed, each)
    print("other bits in the engine:", ", ".join(bad) or "none", flush=True)


@contextmanager
def as_before(before: bool) -> Iterator[None]:
    """Products of n rows where `before`; the runner's part of it is `alone`."""
    devices = row_tile.DEVICES
    try:
        if before:
            row_tile.DEVICES = ()  # type: ignore[assignment]
        yield
    finally:
        row_tile.DEVICES = devices


def microseconds_of(runs: list[Callable[[], object]], series: int = 5, count: int = 20) -> list[float]:
    """Median microseconds of a replay of each, series by turns."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(series):
        for run, times in zip(runs, found, strict=True):
            run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / count * 1e6)
    return [statistics.median(times) for times in found]


def flash(layers: int) -> MLADecoder:
    """With one layer more for drafts."""
    model = random_model(ModelConfig.from_hf({**FLASH, "num_hidden_layers": layers + 1}), "cuda")
    ones = torch.ones(model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    config = ModelConfig.from_hf({**FLASH, "num_hidden_layers": layers})
    mtp = MTPLayer(ones, ones, made(2048, 4096), model.layers[layers], ones)
    return MLADecoder(config, model.embed, model.layers[:layers], model.final_norm, model.lm_head, mtp=mtp)


@torch.inference_mode()
def times(out: Path, layers: int, contexts: list[int]) -> None:
    model, rows = flash(layers), list[dict[str, object]]()
    width = max(contexts) // 64 + 2
    ModelRunner._warm_up = lambda self: "native"  # type: ignore[method-assign]  # probes compile what no step here takes
    sides = []
    for before in (True, False):
        with as_before(before):
            runner = ModelRunner(model, kv_layout="fp8_ds_mla", num_pages=16 * width, drafts=True)
            runner.alone = runner.alone and not before
            said = runner.capture(16, drafts=[1, 2, 3], buckets=(1, 2, 4, 8))
            assert said is None and runner.decode_steps is not None, said
            sides.append(runner.decode_steps)
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(), "versions": versions(), "layers": layers, "layout": "fp8_ds_mla",
    }  # fmt: skip

    def keep(row: dict[str, object]) -> None:
        rows.append(row)
        out.write_text(json.dumps({**report, "rows": rows}, indent=1))
        print(*(f"{key} {value}" for key, value in row.items()), flush=True)

    for context in contexts:
        pages = [list(range(i * width, (i + 1) * width)) for i in range(16)]
        for requests, drafts in ((1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (1, 1), (1, 2), (1, 3), (4, 3)):
            runs = list[Callable[[], object]]()
            for steps in sides:
                if drafts:
                    step = steps.verify[drafts]
                    step.verify([DraftedRequest(p, [1] * (1 + drafts), context, drafts) for p in pages[:requests]])
                    runs.append(step._verify[requests])
                else:
                    steps.decode.run([StepRequest(p, context, 1) for p in pages[:requests]])
                    runs.append(steps.decode._needed(requests)[0].run[0])
            old, new = microseconds_of(runs)
            keep({"context": context, "requests": requests, "drafts": drafts, "before_us": round(old, 1),
                  "after_us": round(new, 1), "ratio": round(new / old, 4)})  # fmt: skip
            if requests == 1 and drafts in (0, 2) and context == contexts[-1]:
                for name, run in zip(("before", "after"), runs, strict=True):
                    report[f"kernels_{name}_{drafts}_drafts"] = kernel_table(run.graph)[:16]  # type: ignore[attr-defined]
                keep({"context": context, "kernels": "written"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ops", "times"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    args = parser.parse_args()
    if args.what == "ops":
        ops(args.out)
    else:
        times(args.out, args.layers, args.contexts)


if __name__ == "__main__":
    main()
