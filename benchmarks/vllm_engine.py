"""Decodes with vLLM engines: layer shapes of published models, random weights, one attention backend each.

    python benchmarks/vllm_engine.py --engines glm:UNCAST:fp8,glm:default:fp8,glm:default:auto --csv engines.csv --out logs

Needs vLLM and a GPU. Each engine lives in a process of its own. All start at once, and each stops itself (SIGSTOP) when it is
up; when the last one is, they are measured one after another, each alone on the machine. The largest logit differences are
against the model's first engine with a BF16 cache (`auto`). Every step's token is forced, so all engines see the same tokens.

ms_per_token: wall time of a step, the engine's host work included. gpu_ms_per_token: time in which any kernel ran, from CUPTI:
kernels that overlap (uncast's combine starts under its decode kernel) count once.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine_models import (
    COLUMNS,
    FORCED_TOKEN,
    LOGIT_STEP,
    MODELS,
    draw_weights,
    kernel_ms,
    model_config,
    model_name,
    prompts,
    replace,
)


class Engine:
    """vLLM's engine in this process, and the logits of its last step."""

    def __init__(self, model: str, backend: str, dtype: str, args: argparse.Namespace, folder: str) -> None:
        import vllm.model_executor.model_loader.dummy_loader as loader
        from vllm import LLM

        Path(folder, "config.json").write_text(json.dumps(model_config(model, args.layers)), encoding="utf-8")
        replace(loader.DummyModelLoader, "load_weights", lambda _, model, *__: draw_weights(model))
        llm = LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", seed=0,
            attention_backend=None if backend == "default" else backend, kv_cache_dtype=dtype,
            max_model_len=args.context + 128, max_num_seqs=max(args.batch), max_num_batched_tokens=8192,
            kv_cache_memory_bytes=args.cache_gib << 30, gpu_memory_utilization=0.1, enable_prefix_caching=False,
            disable_log_stats=True, compilation_config={
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(args.batch)
            },
        )  # fmt: skip
        self.engine, self.model, self.context, self.steps = llm.llm_engine, model, args.context, args.steps
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        self.backend = next(layer.attn_backend.get_name() for layer in layers if hasattr(layer, "impl"))
        compute = runner.model.compute_logits
        self.logits: torch.Tensor | None = None

        def remember(*inputs: Any, **named: Any) -> Any:
            found = compute(*inputs, **named)
            self.logits = found if found is not None else self.logits
            return found

        runner.model.compute_logits = remember

    def fill(self, batch: int, tokens: int) -> None:
        """Prefills `batch` requests and decodes until each has two tokens."""
        from vllm import SamplingParams

        have = dict[str, int]()
        for index, ids in enumerate(prompts(self.model, batch, self.context - 64)):
            params = SamplingParams(
                temperature=0,
                max_tokens=tokens + batch,
                ignore_eos=True,
                allowed_token_ids=[FORCED_TOKEN],
                detokenize=False,
            )
            self.engine.add_request(f"{batch}-{index}", {"prompt_token_ids": ids}, params)
        while len(have) < batch or min(have.values()) < 2:
            have.update((out.request_id, len(out.outputs[0].token_ids)) for out in self.engine.step())

    def measure(self, batch: int) -> tuple[float, float, torch.Tensor]:
        """(wall ms, ms in kernels) of a decode step, and the logits of one, float32 on the CPU."""
        self.fill(batch, self.steps + LOGIT_STEP + 16)
        for _ in range(LOGIT_STEP):
            self.engine.step()
        torch.cuda.synchronize()
        assert self.logits is not None
        logits, walls = self.logits.float().cpu(), []
        for _ in range(self.steps):
            start = time.perf_counter()
            self.engine.step()
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - start)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(8):
                self.engine.step()
            torch.cuda.synchronize()
        busy = kernel_ms(profile, 8)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return statistics.median(walls) * 1e3, busy, logits


def run_engine(name: str, args: argparse.Namespace) -> None:
    """An engine's process: starts, stops itself until it is continued, measures, appends its rows."""
    model, wanted, dtype = name.split(":")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's objects are looked into
    if not hasattr(torch.accelerator, "empty_host_cache"):  # torch below 2.12, which vLLM 0.33 otherwise runs on
        torch.accelerator.empty_host_cache = lambda *_, **__: None
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(model, wanted, dtype, args, folder)
        print(f"UP {name}: {engine.backend}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for batch in args.batch:
            wall, busy, logits = engine.measure(batch)
            reference, difference, note = args.out / f"reference-{model}-{batch}.pt", "", ""
            if dtype == "auto" and not reference.exists():
                torch.save(logits, reference)
                note = f"reference of the logits, std {float(logits.std()):.3f}"
            if reference.exists():
                expected = torch.load(reference)
                difference = f"{float((logits - expected).abs().max()):.5f}"
                relative = float((logits - expected).norm() / expected.norm())
                note = note or f"logits: std {float(expected.std()):.3f}, relative difference {relative:.2e}"
            note += "; the default for this cache" if wanted == "default" else ""
            versions = f"torch {torch.__version__}, {args.versions}".rstrip(", ")
            row = (
                "vllm", vllm.__version__, engine.backend, dtype, model_name(model, args.layers), batch, args.context,
                f"{wall:.3f}", difference, torch.cuda.get_device_name(), versions, f"{busy:.3f}", note,
            )  # fmt: skip
            print(dict(zip(COLUMNS, row, strict=True)), flush=True)
            new = not args.csv.exists()
            with args.csv.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([COLUMNS, row] if new else [row])
    os._exit(0)  # engines are slow to take down


def state(process: subprocess.Popen[bytes]) -> str:
    """ "stopped", "ended" or "running"."""
    pid, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
    if not pid:
        return "running"
    return "stopped" if os.WIFSTOPPED(status) else "ended"


def wait_for(processes: dict[str, subprocess.Popen[bytes]], seconds: float) -> dict[str, str]:
    """The states that the engines have reached when none is running any more, or after `seconds`."""
    end, states = time.monotonic() + seconds, dict.fromkeys(processes, "running")
    while "running" in states.values() and time.monotonic() < end:
        for name in [name for name, now in states.items() if now == "running"]:
            states[name] = state(processes[name])
            if states[name] != "running":
                print(f"{name}: {states[name]} after {seconds - end + time.monotonic():.0f} s", flush=True)
        time.sleep(0.1)
    return states


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", default="glm:UNCAST:fp8,glm:default:fp8,glm:default:auto",
        help=f"model ({', '.join(MODELS)}):attention backend or default:cache dtype,...",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cache-gib", type=int, default=3, help="GiB of an engine's KV cache")
    parser.add_argument("--start-timeout", type=float, default=110, help="seconds until all engines are up")
    parser.add_argument("--timeout", type=float, default=30, help="seconds an engine may be measured")
    parser.add_argument("--versions", default="", help="versions of other packages, for the CSV file")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and the reference's logits")
    parser.add_argument("--csv", type=Path, required=True, help="rows are appended")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_engine(args.child, args)
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("reference-*.pt"):
        old.unlink()
    processes = {}
    for name in args.engines.split(","):
        with (args.out / f"{name.replace(':', '-')}.log").open("w") as log:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
            processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    failed = False
    try:
        states = wait_for(processes, args.start_timeout)
        # A model's reference first: the others' rows are written as they come.
        for name in sorted(processes, key=lambda one: not one.endswith(":auto")):
            if states[name] == "stopped":
                os.killpg(processes[name].pid, signal.SIGCONT)
                states[name] = (
                    "measured" if wait_for({name: processes[name]}, args.timeout)[name] == "ended" else "slow"
                )
            text = (args.out / f"{name.replace(':', '-')}.log").read_text(errors="replace")
            rows = [line for line in text.splitlines() if line.startswith("{'engine'")]
            failed |= len(rows) < len(args.batch)
            print(
                f"{name}: {states[name]}",
                *rows,
                *([] if rows else text.strip().splitlines()[-3:]),
                sep="\n",
                flush=True,
            )
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
