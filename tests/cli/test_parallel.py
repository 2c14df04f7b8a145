"""`generate` and `serve` under torchrun, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.engine.parallel_worker import PATIENT_S
from tests.tiny_model import build_model_folder
from uncast.checkpoints.load import load_config, load_model
from uncast.cli.parallel import ParallelError, Team
from uncast.models.parallel import Parallel

ROOT = Path(__file__).parents[2]
PROMPT = "the latent cache"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "uncast"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}


class Launched:
    """A command under torchrun whose output is read as it comes."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*LAUNCH, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: dict[str, list[str]] = {"out": [], "err": []}
        pipes = (("out", self.process.stdout), ("err", self.process.stderr))
        self._readers = [threading.Thread(target=self._read, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: IO[str]) -> None:
        self.lines[name].extend(iter(pipe.readline, ""))

    def text(self, name: str) -> str:
        return "".join(self.lines[name])

    def line(self, name: str, pattern: str) -> re.Match[str]:
        """Waits until the pattern is in the output."""
        deadline = time.monotonic() + PATIENT_S
        while (found := re.search(pattern, self.text(name))) is None:
            over = self.process.poll() is not None and not any(reader.is_alive() for reader in self._readers)
            assert not over and time.monotonic() < deadline, (pattern, self.text("out"), self.text("err"))
            time.sleep(0.02)
        return found

    def end(self) -> int:
        """Waits for the end. Returns the exit code; `text` is complete then."""
        code = self.process.wait(PATIENT_S)
        for reader in self._readers:
            reader.join(PATIENT_S)
        return code


def call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data=data, headers={"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENT_S) as answer:
        return json.loads(answer.read())


def children(pid: int) -> list[int]:
    """Worker processes of a launcher, in the order of their start."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in found if b"uncast" in Path(f"/proc/{child}/cmdline").read_bytes())


def test_generate_prints_once_what_one_process_prints(folder: Path) -> None:
    """With rows in float32: the ranks add their sums in another order, and a number next to a limit of FP8 would show it."""
    command = ["generate", PROMPT, "--model", str(folder), "--max-tokens", "12", "--kv-cache-dtype", "fp32", "--json"]
    alone = subprocess.run(
        [sys.executable, "-m", "uncast", *command], env=environment(), capture_output=True, text=True, check=True
    )
    shared = subprocess.run([*LAUNCH, *command], env=environment(), capture_output=True, text=True, check=True)
    one, two = (json.loads(run.stdout) for run in (alone, shared))
    assert (two["text"], two["tokens"]) == (one["text"], 12)
    assert two["kv_bytes_read_per_step"] == one["kv_bytes_read_per_step"]


@pytest.mark.parametrize("ending", ["drain", "kill"])
def test_a_server_of_two_drains_and_one_whose_rank_dies_ends(folder: Path, ending: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    server = Launched("serve", "--model", str(folder), "--port", "0", "--kv-pool-tokens", "512")
    try:
        url = server.line("out", r"loading \S+ for (http://\S+:\d+)")[1]
        server.line("out", "uncast: ready")
        assert call(url, "/v1/completions", body)["usage"]["completion_tokens"] == 8
        if ending == "drain":
            server.process.send_signal(signal.SIGTERM)
        else:  # the launcher would end the other rank, too, if it came first
            rank = children(server.process.pid)[1]
            server.process.send_signal(signal.SIGSTOP)
            os.kill(rank, signal.SIGKILL)
            server.line("err", r"uncast: rank [01] of 2 ends, because rank [01] has ended")
            server.process.send_signal(signal.SIGCONT)
        code = server.end()
    finally:
        server.process.kill()
    assert server.text("out").count("uncast: ready") == 1
    if ending == "kill":
        assert code == 1
    else:
        assert "because rank" not in server.text("err") and "uncast.engine" not in server.text("err")


def test_speculation_is_refused_in_a_crew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = SimpleNamespace(parallel=Parallel(0, 2), leads=True)
    monkeypatch.setattr("uncast.cli.parallel.join_crew", lambda: crew)
    with pytest.raises(ParallelError, match="speculation runs in one process"):
        Team(load_config(folder), lambda parallel: load_model(folder, parallel=parallel), lambda: 1, drafts=True)
    assert not Team(load_config(folder), lambda parallel: load_model(folder, parallel=parallel), lambda: 1).follows


def test_a_model_that_two_cannot_share_is_one_sentence(tmp_path: Path) -> None:
    own = build_model_folder(tmp_path / "odd", num_attention_heads=3, num_key_value_heads=3)
    run = subprocess.run(
        [*LAUNCH, "generate", "x", "--model", str(own)], env=environment(), capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "uncast: 2 processes cannot share 3 attention heads evenly: use one of 1, 3" in run.stderr
