"""Speculation on a CPU: does any greedy text change, how many drafts are accepted, and what do they give?

    python benchmarks/speculation.py --prompts 200 --csv benchmarks/results/speculation-cpu.csv

Prompts are cut from the bundled model's held-out text; requests run one at a time without a prefix cache. A row is one setting;
`texts_changed` counts texts that differ from those of the same mode without drafts. Exit code 1 if a greedy one does; a sampled
one may outside of deterministic mode, by rounding. `speedup` is against the row without drafts before it.
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
from uncast.engine.runner import ModelRunner
from uncast.engine.sampler import SamplingParams
from uncast.engine.speculation import parse_speculate
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

PROMPT_CHARACTERS = 120
SETTINGS = (
    *((False, count, 0.0) for count in ("off", "1", "2", "3", "auto")),
    *((True, count, 0.0) for count in ("off", "2", "auto")),
    *((False, count, 1.0) for count in ("off", "1", "2")),
)
"""Deterministic or not, `--speculate`, temperature."""


@dataclass
class Result:
    """One setting's texts and figures."""

    texts: list[list[int]]
    seconds: float
    steps: int
    drafted: int
    accepted: int
    described: str


def measure(
    model: MLADecoder, tokenizer: Tokenizer, prompts: list[list[int]], new: int, speculate: str, *,
    deterministic: bool, temperature: float,
) -> Result:  # fmt: skip
    """Runs all prompts, one after the other; seconds are those of steps that decode."""
    count = parse_speculate(speculate)
    runner = ModelRunner(model, num_pages=16, deterministic=deterministic, drafts=count != 0)
    engine = Engine(runner, tokenizer, EngineConfig(max_running=1, prefix_cache=False, speculate=count))
    texts, seconds, steps = [], 0.0, 0
    for index, prompt in enumerate(prompts):
        engine.add(Request(prompt, SamplingParams(temperature, seed=index), new, ignore_eos=True))
        engine.step()
        text = list(engine.scheduler.running[0].sequence.tokens[len(prompt) :])
        began = time.perf_counter()
        while engine.has_work:
            text += [token for output in engine.step() for token in output.token_ids]
            steps += 1
        seconds += time.perf_counter() - began
        texts.append(text)
    stats, spec = engine.stats(), engine.speculation
    described = "off" if spec is None else spec.describe()
    return Result(texts, seconds, steps, stats.draft_tokens_total, stats.draft_tokens_accepted_total, described)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument(
        "--only", metavar="auto|off|N", help="these settings and those without drafts, at temperature 0"
    )
    parser.add_argument("--csv", type=Path, help="file to write (default: stdout)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = BUNDLED["tiny-glm"]
    model, tokenizer = load_model(folder, mtp=True), Tokenizer(folder)
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    stride = (len(text) - PROMPT_CHARACTERS) // args.prompts
    prompts = [tokenizer.encode(text[i * stride : i * stride + PROMPT_CHARACTERS]) for i in range(args.prompts)]
    rows, changed, plain = [], 0, Result([], 0.0, 0, 0, 0, "")
    for deterministic, speculate, temperature in SETTINGS:
        if args.only is not None and (temperature or speculate not in ("off", args.only)):
            continue
        found = measure(
            model, tokenizer, prompts, args.max_tokens, speculate, deterministic=deterministic, temperature=temperature
        )
        plain = found if speculate == "off" else plain
        decoded = sum(map(len, found.texts)) - len(prompts)
        differing = sum(a != b for a, b in zip(found.texts, plain.texts, strict=True))
        changed += 0 if temperature else differing
        rows.append(
            {
                "model": "tiny-glm",
                "kv_cache_dtype": "fp8_ds_mla",
                "deterministic": deterministic,
                "temperature": temperature,
                "speculate": speculate,
                "at_the_end": found.described,
                "prompts": len(prompts),
                "tokens": decoded,
                "texts_changed": differing,
                "drafted": found.drafted,
                "accepted": found.accepted,
                "acceptance": round(found.accepted / max(1, found.drafted), 3),
                "tokens_per_step": round(decoded / found.steps, 3),
                "tokens_per_s": round(decoded / found.seconds, 1),
                "speedup": round(plain.seconds / found.seconds, 3),
                "device": device_name(),
                "versions": versions(),
            }
        )
        print({key: rows[-1][key] for key in list(rows[-1])[2:15]}, file=sys.stderr, flush=True)
    with args.csv.open("w", newline="") if args.csv else sys.stdout as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
