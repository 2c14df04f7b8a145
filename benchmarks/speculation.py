"""Speculation: does any greedy text change, how many drafts are accepted, and what do they give?

    python benchmarks/speculation.py --prompts 200 --csv benchmarks/results/speculation-cpu.csv
    python benchmarks/speculation.py --prompts 200 --device cuda --csv benchmarks/results/speculation-h200.csv
    python benchmarks/speculation.py --prompts 200 --device cuda --batch 4 --only 3 --csv ...    # several at a time

Prompts are cut from the bundled model's held-out text; requests run without a prefix cache and one at a time, in deterministic
mode on a GPU `GPU_DETERMINISTIC_BATCH`. A row is one setting; `texts_changed` counts texts that differ from those of the same
mode without drafts. Exit code 1 if a greedy one does; a sampled one may outside of deterministic mode, by rounding. `speedup`
is against the row without drafts before it. On a GPU the model is in BF16, and its steps are CUDA graphs where they can be
captured. A mode that the machine cannot keep is said and left out. `--batch` runs the default mode, so many requests at a time.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from uncast.bench.environment import device_name, versions
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, RunnerError
from uncast.engine.sampler import SamplingParams
from uncast.engine.speculation import AUTO_COUNTS, parse_speculate
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

PROMPT_CHARACTERS = 120
SETTINGS = (
    *((False, count, 0.0) for count in ("off", "1", "2", "3", "auto")),
    *((True, count, 0.0) for count in ("off", "2", "auto")),
    *((False, count, 1.0) for count in ("off", "1", "2")),
)
"""Deterministic or not, `--speculate`, temperature."""
GPU_SETTINGS = (
    *((False, count, 0.0) for count in ("off", "1", "2", "3", "auto", "8")),
    (True, "off", 0.0),
    (True, "2", 0.0),
)
"""What decides first."""
GPU_DETERMINISTIC_BATCH = 16
"""There a text of deterministic mode is the same in every batch, and one request fills one row of a tile of 16."""


COLUMNS = (
    "model", "kv_cache_dtype", "deterministic", "temperature", "speculate", "at_the_end", "prompts", "tokens", "texts_changed",
    "drafted", "accepted", "acceptance", "tokens_per_step", "tokens_per_s", "speedup", "batch", "device", "versions",
)  # fmt: skip


@dataclass
class Result:
    """One setting's texts and figures."""

    texts: list[list[int]]
    decoded: int
    seconds: float
    steps: int
    drafted: int
    accepted: int
    described: str
    captured: str
    batch: int


def measure(
    model: MLADecoder, tokenizer: Tokenizer, prompts: list[list[int]], new: int, speculate: str, *,
    deterministic: bool, temperature: float, batch: int,
) -> Result:  # fmt: skip
    """Runs all prompts, `batch` at a time; seconds, steps (each request's counted) and decoded tokens are those after the step
    that ends the last prompt of a batch."""
    count = parse_speculate(speculate)
    runner = ModelRunner(model, num_pages=16 * batch, deterministic=deterministic, drafts=count != 0)
    why_not: str | None = "cpu"
    if model.device.type != "cpu":
        drafts = AUTO_COUNTS if count is None else (count,)
        why_not = runner.capture(batch, drafts=[number for number in drafts if number], buckets=(batch,))
    engine = Engine(runner, tokenizer, EngineConfig(max_running=batch, prefix_cache=False, speculate=count))
    texts = [list[int]() for _ in prompts]
    decoded, seconds, steps = 0, 0.0, 0
    for first in range(0, len(prompts), batch):
        numbers = {}
        for index in range(first, min(first + batch, len(prompts))):
            params = SamplingParams(temperature, seed=index)
            numbers[f"{index}"] = index
            engine.add(Request(prompts[index], params, new, ignore_eos=True, request_id=f"{index}"))
        begun: set[str] = set()
        began = 0.0
        while engine.has_work:
            counts = len(begun) == len(numbers)
            outputs = engine.step()
            for output in outputs:
                texts[numbers[output.request_id]] += output.token_ids
                decoded += counts * len(output.token_ids)
                begun.add(output.request_id)
            steps += counts * len({output.request_id for output in outputs})
            if not counts:
                began = time.perf_counter()
        seconds += time.perf_counter() - began
    stats, spec = engine.stats(), engine.speculation
    described = "off" if spec is None else spec.describe()
    accepted = stats.draft_tokens_accepted_total
    captured = "eager" if why_not is not None else "static"
    if why_not not in (None, "cpu"):
        print(why_not, file=sys.stderr)
    return Result(texts, decoded, seconds, steps, stats.draft_tokens_total, accepted, described, captured, batch)


def row(found: Result, plain: Result, setting: tuple[bool, str, float]) -> dict[str, object]:
    """A line of the CSV file; `plain` is the same mode without drafts."""
    deterministic, speculate, temperature = setting
    return {
        "model": "tiny-glm",
        "kv_cache_dtype": "fp8_ds_mla",
        "deterministic": deterministic,
        "temperature": temperature,
        "speculate": speculate,
        "at_the_end": found.described,
        "prompts": len(found.texts),
        "tokens": found.decoded,
        "texts_changed": sum(a != b for a, b in zip(found.texts, plain.texts, strict=True)),
        "drafted": found.drafted,
        "accepted": found.accepted,
        "acceptance": round(found.accepted / max(1, found.drafted), 3),
        "tokens_per_step": round(found.decoded / found.steps, 3),
        "tokens_per_s": round(found.decoded / found.seconds, 1),
        "speedup": round(plain.seconds / plain.decoded / (found.seconds / found.decoded), 3),
        "batch": found.batch,
        "device": device_name(),
        "versions": versions(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--only", metavar="auto|off|N", help="these settings and those without drafts, at temperature 0"
    )
    parser.add_argument("--batch", type=int, help="the default mode alone, so many requests at a time")
    parser.add_argument("--csv", type=Path, help="file to write, row by row (default: stdout)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gpu = args.device == "cuda"
    folder = BUNDLED["tiny-glm"]
    model = load_model(folder, mtp=True, device=args.device, dtype=torch.bfloat16 if gpu else torch.float32)
    tokenizer, changed, plain = Tokenizer(folder), 0, None
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    stride = (len(text) - PROMPT_CHARACTERS) // args.prompts
    prompts = [tokenizer.encode(text[i * stride : i * stride + PROMPT_CHARACTERS]) for i in range(args.prompts)]
    with args.csv.open("w", newline="") if args.csv else sys.stdout as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for setting in GPU_SETTINGS if gpu else SETTINGS:
            deterministic, speculate, temperature = setting
            if args.batch is not None and deterministic:
                continue
            if args.only is not None and (temperature or speculate not in ("off", args.only)):
                continue
            try:
                found = measure(
                    model, tokenizer, prompts, args.max_tokens, speculate, deterministic=deterministic,
                    temperature=temperature, batch=GPU_DETERMINISTIC_BATCH if gpu and deterministic else args.batch or 1,
                )  # fmt: skip
            except RunnerError as error:
                print(f"{setting}: {error}", file=sys.stderr, flush=True)
                continue
            plain = found if speculate == "off" or plain is None else plain
            fields = row(found, plain, setting)
            if not temperature:
                changed += int(str(fields["texts_changed"]))
            print({key: fields[key] for key in COLUMNS[2:15]}, f"{found.captured} steps", file=sys.stderr, flush=True)
            writer.writerow(fields)
            file.flush()
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
