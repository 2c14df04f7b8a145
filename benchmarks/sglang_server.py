"""Serves random weights with SGLang, once per attention backend, and measures its decode steps.

    python benchmarks/sglang_server.py --servers uncast:fp8_e4m3,fa3:fp8_e4m3,fa3:auto --csv engines.csv --out logs

Needs SGLang and a GPU. Each server is `sglang.launch_server` in a process group of its own. All start at once; when every one
of them answers (or has failed), they are measured one at a time while the others are stopped (SIGSTOP). The largest logit
differences are against the first server with a BF16 cache (`auto`).

A plug-in of SGLang's (`sglang_recorder.py`), loaded in each server beside uncast's, draws the weights, forces every token and
times the steps. ms_per_token is the median time from one decode step's launch to the next, the scheduler's work included.
gpu_ms_per_token is the time in which any kernel ran, from CUPTI, in a second run of the same batch: with CUPTI in a process
its launches are slower. So servers that are profiled for `uncast doctor` (`--profile`) are started besides and never timed:
their graphs are captured under a profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_models import COLUMNS, LOGIT_STEP, MODELS, model_config, model_name, prompts
from sglang_recorder import TRACED_STEPS


class Server:
    """One `sglang.launch_server`, from its start to its rows."""

    def __init__(self, name: str, index: int, args: argparse.Namespace, profiled: bool = False) -> None:
        self.backend, self.dtype = name.split(":")
        decode, _, prefill = self.backend.partition("/")
        self.attention = ["--attention-backend", decode]
        if prefill:
            self.attention = ["--decode-attention-backend", decode, "--prefill-attention-backend", prefill]
        self.args, self.port = args, args.port + 10 * index
        kind = "-profile" if profiled else ""
        self.folder: Path = args.out / f"{args.model}-{self.backend.replace('/', '-')}-{self.dtype}{kind}"
        self.error, self.profiled = "", profiled
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "plug/sglang_bench-1.dist-info").mkdir(parents=True)
        info = self.folder / "plug/sglang_bench-1.dist-info"
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-bench\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbench = sglang_recorder:register\n")
        config = model_config(args.model, args.layers)
        (self.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        paths = [str(self.folder / "plug"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "SGLANG_BENCH_FOLDER": str(self.folder),
            "SGLANG_TORCH_PROFILER_DIR": str(self.folder), "SGLANG_GRAPH_BATCH_CAPTURE": str(int(self.profiled)),
        }  # fmt: skip
        with (self.folder / "server.log").open("w") as log:
            self.process = subprocess.Popen(
                self.command(), env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def command(self) -> list[str]:
        args = self.args
        return [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.folder), "--load-format", "dummy",
            "--skip-tokenizer-init", "--skip-server-warmup", "--dtype", "bfloat16", "--host", "127.0.0.1",
            "--port", str(self.port), *self.attention, "--kv-cache-dtype", self.dtype,
            "--page-size", "64", "--context-length", str(args.context + 256), "--max-total-tokens", str(args.pool_tokens),
            "--max-running-requests", str(max(args.batch)), "--chunked-prefill-size", "8192", "--mem-fraction-static", "0.95",
            "--cuda-graph-bs-decode", *map(str, sorted(args.batch)), "--disable-prefill-cuda-graph", "--disable-radix-cache",
            "--sampling-backend", "pytorch", "--grammar-backend", "none", "--random-seed", "0",
            *(["--enable-profile-cuda-graph"] if self.profiled else []), *args.server_arguments.split(),
        ]  # fmt: skip

    def post(self, path: str, body: dict[str, Any], timeout: float) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            found: bytes = response.read()
            return found

    def ready(self) -> bool:
        """Whether it answers; a process that has ended leaves the last line of its log in `error`."""
        if self.process.poll() is not None:
            lines = (self.folder / "server.log").read_text(errors="replace").strip().splitlines()
            named = [line for line in lines if "Error" in line or "error" in line] or lines or ["no output"]
            self.error = f"did not start: {named[-1][-300:]}"
            return False
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def generate(self, batch: int, tokens: int) -> None:
        """One request per row of the batch, prompts of `context` - 64 random tokens."""
        ids = prompts(self.args.model, batch, self.args.context - 64)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        self.post("/generate", {"input_ids": ids, "sampling_params": sampling}, timeout=self.args.timeout)

    def profile(self) -> None:
        """A profile of one request's first steps, as `uncast doctor --url` asks for one, in the server's folder."""
        self.generate(1, 4)
        self.post(
            "/start_profile",
            {"num_steps": 6, "activities": ["CPU", "GPU"], "record_shapes": True, "with_stack": False},
            30,
        )
        self.generate(1, 10)

    def measure(self) -> dict[int, list[Any]]:
        """{batch: [ms between launches, ms in kernels, steps]}."""
        for batch in self.args.batch:
            self.generate(batch, self.args.steps)
        for batch in self.args.batch:
            self.generate(batch, LOGIT_STEP + TRACED_STEPS + 4)
        self.generate(1, 2)  # a prefill: the recorder saves what it has
        found = json.loads((self.folder / "steps.json").read_text())
        return {int(size): times for size, times in found.items()}


@contextlib.contextmanager
def running(servers: list[Server]) -> Iterator[None]:
    """Ends every server's processes in the end, stopped ones too."""
    try:
        yield
    finally:
        for server in servers:
            server.signal(signal.SIGKILL)


def wait_for(servers: list[Server], seconds: float) -> None:
    """Returns when each server answers or has an `error`; stops those that answer, so that the others start undisturbed."""
    end = time.monotonic() + seconds
    waiting = list(servers)
    while waiting and time.monotonic() < end:
        for server in list(waiting):
            if server.ready():
                print(f"{server.backend} {server.dtype}: up, {seconds - end + time.monotonic():.0f} s", flush=True)
                server.signal(signal.SIGSTOP)
                waiting.remove(server)
            elif server.error:
                print(f"{server.backend} {server.dtype}: {server.error}", flush=True)
                waiting.remove(server)
        time.sleep(0.2)
    for server in waiting:
        server.error = f"did not answer within {seconds:.0f} s"


def rows_of(server: Server, times: dict[int, list[Any]], reference: Server | None) -> list[list[object]]:
    """Rows of the CSV file."""
    import sglang
    import triton

    model = model_name(server.args.model, server.args.layers)
    versions = f"torch {torch.__version__}, triton {triton.__version__}, {server.args.versions}".rstrip(", ")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    rows: list[list[object]] = []
    for batch in server.args.batch:
        wall, busy, _ = times.get(batch, [None] * 3)
        file, difference, note = server.folder / f"logits-{batch}.pt", "", server.error
        if reference is not None and file.exists() and (reference.folder / file.name).exists():
            expected, found = torch.load(reference.folder / file.name), torch.load(file)
            difference = f"{float((found - expected).abs().max()):.5f}"
            relative, spread = float((found - expected).norm() / expected.norm()), float(expected.std())
            note = f"pool of {server.args.pool_tokens} tokens; logits: std {spread:.3f}, relative difference {relative:.2e}"
            if server is reference:
                note = f"reference of the logits; pool of {server.args.pool_tokens} tokens; logits: std {spread:.3f}"
        rows.append(
            ["sglang", sglang.__version__, server.backend, server.dtype, model, batch, server.args.context,
             "" if wall is None else f"{wall:.3f}", difference, gpu, versions, "" if busy is None else f"{busy:.3f}", note]
        )  # fmt: skip
    return rows


def record(server: Server, reference: Server | None) -> None:
    """Measures or profiles a server that is up, ends it and appends its rows to the CSV file."""
    times: dict[int, list[Any]] = {}
    if not server.error:
        server.signal(signal.SIGCONT)
        try:
            if server.profiled:
                server.profile()
            else:
                times = server.measure()
        except (OSError, ValueError) as error:
            server.error = f"failed: {type(error).__name__}: {error}"
        server.signal(signal.SIGKILL)
    if server.profiled:
        found = sorted(path.name for path in server.folder.rglob("*.json.gz"))
        print(f"{server.backend} {server.dtype}: {server.error or 'profiled'}, {', '.join(found)}", flush=True)
        return
    rows, csv_file = rows_of(server, times, reference), server.args.csv
    print(*(dict(zip(COLUMNS, row, strict=True)) for row in rows), sep="\n", flush=True)
    new = not csv_file.exists()
    with csv_file.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows] if new else rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--servers",
        default="uncast:fp8_e4m3,fa3:fp8_e4m3,fa3:auto",
        help="attention backend[/prefill's]:cache dtype,... (may be empty with --profile)",
    )
    parser.add_argument("--model", choices=MODELS, default="glm")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--pool-tokens", type=int, default=495_552)
    parser.add_argument("--steps", type=int, default=72, help="tokens a request generates")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds for all servers to answer, and for a request"
    )
    parser.add_argument("--server-arguments", default="", help="more arguments of sglang.launch_server")
    parser.add_argument(
        "--profile",
        default="",
        help="servers, as in --servers, that are started besides and profiled with their graphs' capture",
    )
    parser.add_argument("--versions", default="", help="versions of other packages, for the CSV file")
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, logits and profiles")
    parser.add_argument("--csv", type=Path, required=True, help="rows are appended")
    args = parser.parse_args()
    args.out = args.out.resolve()
    lists = {False: args.servers, True: args.profile}
    names = [(name, profiled) for profiled, some in lists.items() for name in some.split(",") if name]
    servers = [Server(name, index, args, profiled) for index, (name, profiled) in enumerate(names)]
    reference = next((server for server in servers if server.dtype == "auto" and not server.profiled), None)
    with running(servers):
        wait_for(servers, args.timeout)
        # The reference first: the others' rows are written as they come.
        for server in sorted(servers, key=lambda one: (one.profiled, one is not reference)):
            record(server, reference)
    return 1 if any(server.error for server in servers) else 0


if __name__ == "__main__":
    sys.exit(main())
