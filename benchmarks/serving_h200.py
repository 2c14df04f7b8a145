"""Decode of one checkpoint by uncast's server and by vLLM's, asked in the same way over HTTP: serving-h200.csv.

    python benchmarks/random_checkpoint.py /tmp/model --layers 16
    python benchmarks/serving_h200.py /tmp/model --out DIR                              # uncast and vllm
    python benchmarks/serving_h200.py tiny-glm --out DIR --servers uncast --contexts 64,256 --batches 1,4   # on a CPU

All servers start at once; when each is ready or has failed, they are measured one after the other while the rest is stopped
(SIGSTOP). Of each batch and context:

    ttft_ms        prompts that no cache knows, `batch` at a time: median time to the first token
    ms_per_token   the same prompts again, their rows cached, `--tokens` tokens each: of each answer the time per token while
                   all of the batch decode, the median of all answers

so that one request's prefill is in no other's decode time. Greedy, `ignore_eos`; timed by `uncast.bench.serve`, as its client
sees it. A row is written as soon as it is there. vLLM runs with full CUDA graphs for decoding, without torch.compile; where its
HTTP server does not start, its engine is measured in this process by the same definition (server `vllm-offline`).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.metadata
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uncast.bench.environment import device_name, versions
from uncast.bench.serve import Answer, Closed, Endpoint, Prompt, discover, measure
from uncast.bench.serve_prompts import token_prompts
from uncast.checkpoints.bundled import model_folder

COLUMNS = (
    "server", "version", "model", "kv_cache_dtype", "batch", "context", "ms_per_token", "ttft_ms", "gpu", "versions",
)  # fmt: skip
COLD_TOKENS = 4
HERE = Path(__file__).resolve()
VLLM_POOL_GIB, POOL_SLACK = 8, 4096
_IN_VLLM = "SERVING_H200_IN_VLLM"


@dataclass(frozen=True)
class Case:
    """`batch` requests at a time with `context` cached tokens when decoding starts."""

    batch: int
    context: int


@dataclass
class Server:
    """A server in a process group of its own.

    Attributes:
        name: uncast, vllm or vllm:BACKEND; url: where it will answer.
    """

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ready(self) -> bool:
        path = "/ready" if self.name == "uncast" else "/health"
        with contextlib.suppress(OSError, urllib.error.URLError):
            return bool(urllib.request.urlopen(self.url + path, timeout=1).status == 200)
        return False

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        self.send(signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def command(name: str, args: argparse.Namespace, port: int) -> list[str]:
    """What starts a server on `port`."""
    kept = (args.repeats + 1) * (args.tokens + 64)  # rows of earlier answers stay in the prefix cache, too
    rows = max(case.batch * (case.context + kept) for case in args.cases) + POOL_SLACK
    if name == "uncast":
        return [
            sys.executable, "-m", "uncast", "serve", "--model", args.model, "--port", str(port), "--kv-cache-dtype",
            args.kv_cache_dtype, "--kv-pool-tokens", str(rows), "--max-running", str(args.widest),
            *args.uncast_options.split(),
        ]  # fmt: skip
    _, _, backend = name.partition(":")
    return [sys.executable, str(HERE), "--run-vllm", "--port", str(port), "--host", "127.0.0.1"] + [
        f"--{key.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in vllm_options(args, backend).items()
    ]


def vllm_options(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """What vLLM is told, by Python's names."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(args.batches)}
    options = {
        "model": args.model, "dtype": "bfloat16", "kv_cache_dtype": "fp8", "max_num_seqs": args.widest,
        "max_model_len": max(case.context for case in args.cases) + args.tokens + 64, "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": VLLM_POOL_GIB << 30, "seed": 0, "compilation_config": graphs,
        "gpu_memory_utilization": 0.4,  # what must be free at the start: other servers are on the GPU, too
    }  # fmt: skip
    return options | ({"attention_backend": backend} if backend else {})


def start(name: str, args: argparse.Namespace) -> Server:
    port, log = free_port(), args.out / f"server-{name.replace(':', '-')}.log"
    more = {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        command(name, args, port), stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | more,
    )  # fmt: skip
    return Server(name, f"http://127.0.0.1:{port}", process, log)


def wait_ready(servers: Sequence[Server], seconds: float) -> Iterator[Server]:
    """Those that answer within `seconds`; says what became of each."""
    began, missing = time.monotonic(), list(servers)
    while missing and time.monotonic() - began < seconds:
        for server in list(missing):
            if server.ready or server.dead:
                missing.remove(server)
                what = f"ended with {server.process.returncode}" if server.dead else "ready"
                print(f"{server.name}: {what} after {time.monotonic() - began:.0f} s", flush=True)
                if not server.dead:
                    yield server
        time.sleep(0.2)
    for server in missing:
        print(f"{server.name}: not ready after {seconds:.0f} s: {last_words(server.log)}", flush=True)
        server.end()


def last_words(log: Path) -> str:
    """What a log ends with: its last error, else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["nothing was said"]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1][-300:]


def per_token_ms(answers: Sequence[Answer]) -> float:
    """Median of the answers' times per token between the moment when all have begun and the one when the first is done.

    A server whose streams fall behind its engine sends many tokens at once; where an answer has fewer than two chunks in that
    time, it is from each answer's own first chunk to its last (`uncast.bench.serve`'s TPOT), which is said.
    """
    begin, end = max(answer.chunks[0] for answer in answers), min(answer.chunks[-1] for answer in answers)
    inside = [[at for at in answer.chunks if begin <= at <= end] for answer in answers]
    if min(map(len, inside)) < 2:
        print(f"{len(answers)} answers share less than two chunks: times from each one's first to its last", flush=True)
        return statistics.median(
            1e3 * (answer.chunks[-1] - answer.chunks[0]) / max(answer.tokens - 1, 1) for answer in answers
        )
    return statistics.median(
        1e3 * (times[-1] - times[0]) / (len(times) - 1) * len(answer.chunks) / answer.tokens
        for times, answer in zip(inside, answers, strict=True)
    )


def measured(server: Server, case: Case, args: argparse.Namespace, vocab: int) -> tuple[float, float]:
    """(ms per token, ms to the first token); see above."""
    endpoint = Endpoint(
        server.url, discover(server.url).model, timeout_s=60, extra={"temperature": 0, "ignore_eos": True}
    )
    load, prompts = (
        Closed(case.batch),
        token_prompts(case.batch, case.context, args.tokens, vocab_size=vocab, seed=case.context),
    )
    other = token_prompts(case.batch, case.context, COLD_TOKENS, vocab_size=vocab, seed=case.context + 1)
    first = measure(endpoint, other, load)  # a shape's first requests may compile for it
    cold = measure(endpoint, [replace(prompt, max_tokens=COLD_TOKENS) for prompt in prompts], load)
    runs = [measure(endpoint, prompts, load) for _ in range(args.repeats)]
    for result in (first, cold, *runs):
        if not result.good:
            detail = next((answer.detail for answer in result.answers if answer.failure), "")
            raise RuntimeError(f"{result.failures} {detail}")
    waits = [1e3 * (answer.chunks[0] - answer.due) for answer in cold.answers]
    return statistics.median(per_token_ms(run.answers) for run in runs), statistics.median(waits)


def row(server: str, case: Case, times: tuple[float, float], args: argparse.Namespace) -> dict[str, object]:
    kind = server.partition(":")[0].removesuffix("-offline")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {
            "server": server, "version": "source" if kind == "uncast" else importlib.metadata.version(kind),
            "model": args.label, "kv_cache_dtype": args.kv_cache_dtype if kind == "uncast" else "fp8_e4m3",
            "batch": case.batch, "context": case.context, "ms_per_token": round(times[0], 3), "ttft_ms": round(times[1], 1),
            "gpu": device_name(), "versions": versions(),
        }  # fmt: skip
    raise RuntimeError(f"{kind} is not installed")


def keep(path: Path, found: dict[str, object]) -> None:
    print({name: found[name] for name in ("server", "batch", "context", "ms_per_token", "ttft_ms")}, flush=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(found)


def measure_server(server: Server, args: argparse.Namespace, vocab: int) -> bool:
    """All cases of one server; whether every one came to a row."""
    good = True
    for case in args.cases:
        try:
            keep(args.csv, row(server.name, case, measured(server, case, args, vocab), args))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            good = False
            print(f"{server.name} {case}: {str(error)[:300]}; log: {last_words(server.log)}", flush=True)
            if server.dead:
                break
    return good


def offline(args: argparse.Namespace, backend: str, vocab: int) -> None:
    """vLLM's engine in this process: a request's first token is timed from `add_request`, tokens by the engine's steps."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    old_torch()
    from vllm import LLM, SamplingParams

    engine = LLM(**vllm_options(args, backend)).llm_engine

    def run(prompts: Sequence[Prompt], tag: str) -> list[Answer]:
        answers, due = {}, time.perf_counter()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens, ignore_eos=True)
            answers[f"{tag}-{number}"] = Answer(due)
            engine.add_request(f"{tag}-{number}", {"prompt_token_ids": list(prompt.content)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer, count = answers[output.request_id.partition(":")[0]], len(output.outputs[0].token_ids)
                if count > len(answer.chunks):
                    answer.chunks.append(time.perf_counter())
                answer.output_tokens = count
        return list(answers.values())

    for number, case in enumerate([args.cases[0], *args.cases]):
        prompts = token_prompts(
            case.batch, case.context, args.tokens, vocab_size=vocab, seed=case.context + (number == 0)
        )
        cold = run([replace(prompt, max_tokens=COLD_TOKENS) for prompt in prompts], f"{number}c")
        hot = [per_token_ms(run(prompts, f"{number}h{turn}")) for turn in range(args.repeats)]
        waits = statistics.median(1e3 * (answer.chunks[0] - answer.due) for answer in cold)
        keep(args.csv, row("vllm-offline", case, (statistics.median(hot), waits), args))


def old_torch() -> None:
    """vLLM 0.33 calls one function that torch 2.11 does not have."""
    import torch

    if not hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache = lambda *_, **__: None  # type: ignore[attr-defined]


def run_vllm(argv: list[str]) -> None:
    """vLLM's server, as `python -m vllm.entrypoints.openai.api_server` starts it. Its processes are forks of this one, or
    import this file again."""
    import runpy

    os.environ[_IN_VLLM] = "1"
    old_torch()
    sys.argv = ["vllm.entrypoints.openai.api_server", *argv]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a bundled model's name")
    parser.add_argument("--out", type=Path, required=True, help="folder for serving-h200.csv and the servers' logs")
    parser.add_argument("--servers", default="uncast,vllm", help="uncast, vllm, vllm:BACKEND (default: %(default)s)")
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192], help="tokens (default: 1024,8192)")
    parser.add_argument("--batches", type=numbers, default=[1, 32], help="requests at a time (default: 1,32)")
    parser.add_argument("--tokens", type=int, default=256, help="decoded by each request (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="decode runs of a case (default: %(default)s)")
    parser.add_argument("--kv-cache-dtype", default="fp8_e4m3", help="of uncast; the default is what vLLM's fp8 is")
    parser.add_argument("--uncast-options", default="", help="more options of `uncast serve`, in one argument")
    parser.add_argument(
        "--ready-seconds", type=float, default=100.0, help="for the servers' start (default: %(default)g)"
    )
    parser.add_argument("--label", help="the CSV's model (default: by the folder's config.json)")
    return parser


def main() -> int:
    if sys.argv[1:2] == ["--run-vllm"]:
        run_vllm(sys.argv[2:])
        return 0
    args = build_parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.csv, args.widest = args.out / "serving-h200.csv", max(args.batches)
    args.cases = [Case(batch, context) for batch in args.batches for context in args.contexts]
    raw = json.loads((model_folder(args.model) / "config.json").read_text(encoding="utf-8"))
    args.label = (
        args.label or f"hidden {raw['hidden_size']}, {raw['num_hidden_layers']} layers, {Path(args.model).name}"
    )
    # Servers have process groups of their own and must not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    servers, good = list[Server](), True
    try:
        servers += [start(name, args) for name in args.servers.split(",")]
        ready = list(wait_ready(servers, args.ready_seconds))
        for server in ready:
            for other in ready:
                other.send(signal.SIGCONT if other is server else signal.SIGSTOP)
            good &= measure_server(server, args, raw["vocab_size"])
    finally:
        for server in servers:
            server.end()
    for server in servers:
        if server not in ready:
            good = False
            print(f"{server.name} did not serve: {last_words(server.log)}", flush=True)
            if server.name.startswith("vllm"):
                offline(args, server.name.partition(":")[2], raw["vocab_size"])
    return 0 if good else 1


if os.environ.get(_IN_VLLM):
    old_torch()
if __name__ == "__main__":
    sys.exit(main())
