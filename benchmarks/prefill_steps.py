"""What a prompt of 8,192 tokens takes in steps of 1,024, 2,048 and 8,192 tokens on a GPU, and its kernels.

    python benchmarks/prefill_steps.py prefill.json [--layers 4] [--tokens 8192]

Layers of GLM-4.7-Flash with random weights, an `fp8_e4m3` cache, eager steps of the engine's runner. Per step the time until
the host is through with it and until the GPU is, then torch's profile of the kernels of one more prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from decode_layer import FLASH, random_model

from uncast.bench.environment import device_name, versions
from uncast.engine.runner import ModelRunner, Sequence
from uncast.models.config import ModelConfig

STEPS = (1024, 2048, 8192)


def prefill(runner: ModelRunner, tokens: int, step: int) -> list[tuple[float, float]]:
    """Milliseconds of each step: of the host, and of both."""
    sequence = Sequence([7 * place % 150_000 for place in range(tokens)])
    runner.ensure_pages(sequence, tokens)
    times = []
    for _ in range(0, tokens, step):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        runner.step([(sequence, min(step, tokens - sequence.cached))])
        through = time.perf_counter()
        torch.cuda.synchronize()
        times.append((round(1e3 * (through - begin), 2), round(1e3 * (time.perf_counter() - begin), 2)))
    runner.free(sequence)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures a CUDA GPU, and torch sees none here")
    model = random_model(ModelConfig.from_hf({**FLASH, "num_hidden_layers": args.layers}), "cuda")
    runner = ModelRunner(model, kv_layout="fp8_e4m3", num_pages=args.tokens // 64 + 2)
    found: dict[str, object] = {
        "layers": args.layers,
        "tokens": args.tokens,
        "gpu": device_name(),
        "versions": versions(),
    }
    for step in STEPS:
        for _ in range(2):
            prefill(runner, args.tokens, step)
        times = prefill(runner, args.tokens, step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            prefill(runner, args.tokens, step)
        kernels = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:20]
        found[f"steps of {step}"] = {
            "host_and_all_ms": times,
            "kernels_us": [(event.key[:80], event.count, round(event.device_time_total)) for event in kernels],
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(
            f"steps of {step}: {sum(all_ms for _, all_ms in times):.1f} ms, host {sum(host for host, _ in times):.1f}"
        )


if __name__ == "__main__":
    main()
