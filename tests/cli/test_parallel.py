"""`generate` and `serve` under torchrun, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_parallel import ROOT, free_port
from tests.tiny_model import build_model_folder
from uncast.checkpoints.load import load_config, load_model
from uncast.cli.parallel import ParallelError, Team
from uncast.models.parallel import Parallel

PROMPT = "the latent cache"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "uncast"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def wait_ready(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            call(port, "/ready")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("the server did not become ready")


def children(pid: int) -> list[int]:
    """Worker processes of a launcher, in the order of their start."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in found if b"uncast" in Path(f"/proc/{child}/cmdline").read_bytes())


def test_generate_prints_once_what_one_process_prints(folder: Path) -> None:
    command = ["generate", PROMPT, "--model", str(folder), "--max-tokens", "12", "--json"]
    alone = subprocess.run(
        [sys.executable, "-m", "uncast", *command], env=environment(), capture_output=True, text=True, check=True
    )
    shared = subprocess.run([*LAUNCH, *command], env=environment(), capture_output=True, text=True, check=True)
    one, two = (json.loads(run.stdout) for run in (alone, shared))
    assert (two["text"], two["tokens"]) == (one["text"], 12)
    assert two["kv_bytes_read_per_step"] == one["kv_bytes_read_per_step"]


def test_a_server_of_two_drains_and_one_whose_rank_dies_ends(folder: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    for ending in ("drain", "kill"):
        port = free_port()
        command = ["serve", "--model", str(folder), "--port", str(port), "--kv-pool-tokens", "512"]
        process = subprocess.Popen(
            [*LAUNCH, *command], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            wait_ready(port, process)
            assert call(port, "/v1/completions", body)["usage"]["completion_tokens"] == 8
            if ending == "drain":
                process.send_signal(signal.SIGTERM)
            else:
                os.kill(children(process.pid)[1], signal.SIGKILL)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert out.count("uncast: ready") == 1
        if ending == "kill":
            assert process.returncode == 1
            assert re.search(r"uncast: rank [01] of 2 ends, because rank [01] has ended", err)
        else:
            assert "because rank" not in err and "uncast.engine" not in err


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
