"""A start: the port opens after the warm-up, leaves nothing of it behind, and a path that fails is one sentence."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.server.live import LIMIT_S, MODEL, ServerProcess, make_engine, metrics, request
from uncast.cli.main import main
from uncast.engine.runner import ModelRunner, RunnerError
from uncast.server import start
from uncast.server.run import ListenError, bind, serve
from uncast.server.start import PHASES, StartClock, process_age
from uncast.server.state import Served, ServerConfig, ServerState

SLOW = """
import sys, time
from uncast.cli import serve
from uncast.cli.main import main

def warm_up(engine):
    print("warming up", flush=True)
    time.sleep(3600)

serve.warm_up = warm_up
sys.exit(main(["serve", "--port", "0", "--model", sys.argv[1]]))
"""


def test_until_the_warm_up_is_over_nobody_can_connect_and_a_signal_ends_in_order(folder: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(folder)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.rpartition(":")[2])
        assert line.startswith("uncast: loading tiny for http://127.0.0.1:")
        assert process.stdout.readline() == "warming up\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0 and process.stdout.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_the_start_says_and_counts_what_it_took_and_no_request(folder: Path) -> None:
    with ServerProcess(folder, "--kv-pool-tokens", "1024") as server:
        told = metrics(server.url)
        phases = {name: told[f'uncast_start_seconds{{phase="{name}"}}'] for name in PHASES}
        assert all(seconds > 0 for seconds in phases.values())
        assert told["uncast_ready_seconds"] == pytest.approx(sum(phases.values()))
        assert f"uncast: started in {told['uncast_ready_seconds']:.1f} s: imports " in server.output
        left = ("requests", "prompt_tokens", "completion_tokens", "prefix_query_tokens", "steps", "kv_cache_bytes_read")
        assert [told[f"uncast_{name}_total"] for name in left] == [0] * len(left)
        assert told["uncast_kv_pool_pages_free"] == told["uncast_kv_pool_pages"] == 16
        assert request("GET", server.url + "/health").status_code == 200


def test_a_path_that_fails_ends_the_start_with_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def differs(runner: ModelRunner, max_q_len: int) -> None:
        raise RunnerError("torch_cpu differs from the oracle")

    monkeypatch.setattr(ModelRunner, "probe", differs)
    assert main(["serve", "--model", str(folder), "--port", "0", "--kv-pool-tokens", "256"]) == 1
    out, err = capfd.readouterr()
    assert err == "uncast: warm-up: attention of up to 1 queries failed: torch_cpu differs from the oracle\n"
    assert "ready" not in out


def test_a_port_that_another_process_took_meanwhile_is_one_sentence(folder: Path) -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    state = ServerState(ServerConfig(MODEL), Served.of(make_engine(folder)))
    with sock, bind("127.0.0.1", port) as other:
        other.listen()
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            asyncio.run(serve(state, sock, lambda line: None))


def test_the_clock_tells_phases_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 11.75])
    with monkeypatch.context() as patch:
        patch.setattr(start, "time", SimpleNamespace(monotonic=lambda: next(times)))
        clock = StartClock(2.0)
        clock.mark("imports")
        clock.mark("weights")
    assert clock.seconds == {"imports": 2.5, "weights": 1.25} and clock.total == 3.75
    clock.kernels = lambda: {"compiled": 3, "found": 4}
    assert clock.describe() == "started in 3.8 s: imports 2.5, weights 1.2; 3 kernels compiled, 4 found compiled"
    assert StartClock().seconds == {}


def test_a_process_knows_its_age() -> None:
    young = "from uncast.server.start import process_age; print(process_age())"
    age = float(subprocess.run([sys.executable, "-c", young], capture_output=True, check=True).stdout)
    assert 0 < age < process_age()
