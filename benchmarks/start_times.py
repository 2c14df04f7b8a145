"""How long `uncast serve` takes to its first answer, with an empty cache folder (cold) and with what that start left (warm).

    python benchmarks/start_times.py --csv benchmarks/results/start-cpu.csv
    python benchmarks/start_times.py --model /path/to/model --csv start-h200.csv --timeout 300 -- --kv-cache-dtype fp8_ds_mla
    python benchmarks/start_times.py --processes 2 --csv start-x2.csv            # by torchrun

Options after `--` go to `uncast serve`. A row is one start: `answer_s` is from the start of the command to the end of a first
completion of one token, the others are the server's own /metrics. What the operating system keeps of the files is left to it,
so that weights may be read faster after the first start; `load` is its load average, as other work makes starts slower. Rows
are written as they come; exit code 1 if a start fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uncast.bench.environment import versions
from uncast.server.start import PHASES

COLUMNS = (
    "start", "repeat", "answer_s", "ready_s", "imports_s", "weights_s", "probe_s", "warm_up_s", "kernels_compiled",
    "kernels_found", "load", "model", "processes", "options", "device", "versions",
)  # fmt: skip
_KEPT = ("UNCAST_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")
_DEVICE = "from uncast.bench.environment import device_name; print(device_name())"


class StartError(RuntimeError):
    """A server that did not start, answer or end; the message ends with what it said."""


class Server:
    """`uncast serve` on a free port, with its output."""

    def __init__(self, args: argparse.Namespace, cache: Path) -> None:
        command = ["-m", "uncast", "serve", "--model", args.model, "--port", "0", *args.options]
        if args.processes > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.processes)]
            command = [*launch, *command]
        environment = {name: value for name, value in os.environ.items() if name not in _KEPT}
        environment |= {"UNCAST_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
        self.began, self.lines, self._timeout = time.monotonic(), list[str](), args.timeout
        self._alone = args.processes == 1
        self.process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def url(self) -> str:
        """Waits until it is ready."""
        while self.process.poll() is None and time.monotonic() < self.began + self._timeout:
            found = re.search(r"^uncast: ready: .* on (http://[^\s,]+)", "".join(self.lines), re.MULTILINE)
            if found is not None:
                return found[1]
            time.sleep(0.01)
        raise self.fault("is not ready")

    def stop(self) -> None:
        """Ends it in order."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            raise self.fault("does not end") from None
        if code and self._alone:  # torchrun's is 1 after any signal
            raise self.fault(f"ended with exit code {code}")

    def fault(self, what: str) -> StartError:
        self._reader.join(1)
        seconds = time.monotonic() - self.began
        return StartError(f"the server {what} after {seconds:.0f} s:\n{''.join(self.lines[-12:])}")


@contextmanager
def started(args: argparse.Namespace, cache: Path) -> Iterator[Server]:
    """A server that is gone afterwards."""
    server = Server(args, cache)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def measure(args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """One start, from the command to the first answer, and an orderly end.

    Raises:
        StartError: it did not come to that.
    """
    load = os.getloadavg()[0]
    with started(args, cache) as server:
        url = server.url()
        body = json.dumps({"prompt": [1], "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=args.timeout) as answer:
                json.load(answer)
            seconds = time.monotonic() - server.began
            with urllib.request.urlopen(f"{url}/metrics", timeout=args.timeout) as answer:
                told = dict(re.findall(r"^uncast_(\S+) (\S+)$", answer.read().decode(), re.MULTILINE))
        except OSError as error:
            raise server.fault(f"does not answer ({error})") from None
        server.stop()
    return {
        "answer_s": f"{seconds:.2f}",
        "ready_s": f"{float(told['ready_seconds']):.2f}",
        **{f"{name}_s": _phase(told, name) for name in PHASES},
        "kernels_compiled": _count(told, "kernels_compiled_total"),
        "kernels_found": _count(told, "kernels_found_total"),
        "load": f"{load:.1f}",
    }


def _phase(told: dict[str, str], name: str) -> str:
    seconds = told[f'start_seconds{{phase="{name}"}}']
    return f"{float(seconds):.2f}"


def _count(told: dict[str, str], name: str) -> str:
    """Empty on a CPU, which compiles no kernels."""
    return f"{float(told[name]):.0f}" if name in told else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-glm", help="as of uncast serve (default: tiny-glm)")
    parser.add_argument("--repeats", type=int, default=2, help="cold and warm starts (default: 2 of each)")
    parser.add_argument("--processes", type=int, default=1, help="more than 1: started by torchrun (default: 1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a start may take (default: 600)")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("options", nargs="*", help="for uncast serve, after --")
    args = parser.parse_args()
    device = subprocess.run([sys.executable, "-c", _DEVICE], capture_output=True, text=True, check=True).stdout.strip()
    facts = {
        "model": Path(args.model).name, "processes": args.processes, "options": " ".join(args.options), "device": device,
        "versions": versions(),
    }  # fmt: skip
    with args.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        writer.writeheader()
        for repeat in range(1, args.repeats + 1):
            with tempfile.TemporaryDirectory(prefix="uncast-start-") as cache:
                for start in ("cold", "warm"):
                    try:
                        row = measure(args, Path(cache))
                    except StartError as error:
                        print(f"{start} start {repeat}: {error}", file=sys.stderr)
                        return 1
                    writer.writerow({"start": start, "repeat": repeat, **row, **facts})
                    file.flush()
                    print(f"{start} {repeat}: " + ", ".join(f"{name} {value}" for name, value in row.items() if value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
