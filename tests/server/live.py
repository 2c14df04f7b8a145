"""Servers for tests: one in a thread of this process, whose engine can be looked into, and one as a user starts it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from uncast.checkpoints.load import load_model
from uncast.engine.async_engine import AsyncEngine
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.runner import ModelRunner
from uncast.engine.stats import EngineStats
from uncast.engine.tokenizer import Tokenizer
from uncast.server.app import create_app
from uncast.server.run import bind, url_of
from uncast.server.state import Served, ServerConfig, ServerState

MODEL = "tiny"
LIMIT_S = 300
"""For whatever ends within seconds: a machine that stalls or is shared must not fail a test."""
HOLD = Path(__file__).with_name("hold.py")


def with_context(folder: Path, target: Path, context: int) -> Path:
    """A copy of a model folder with another context length."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["max_position_embeddings"] = context
    (target / "config.json").write_text(json.dumps(config))
    return target


def make_engine(
    folder: Path,
    *,
    pool_tokens: int = 4096,
    page_size: int = 16,
    max_running: int = 16,
    max_waiting: int = 64,
    deterministic: bool = False,
) -> AsyncEngine:
    """An engine that is not started."""
    runner = ModelRunner(
        load_model(folder), num_pages=pool_tokens // page_size, page_size=page_size, deterministic=deterministic
    )
    config = EngineConfig(max_running=max_running, max_waiting=max_waiting)
    return AsyncEngine(Engine(runner, Tokenizer(folder), config))


class LiveServer:
    """A server on a free port, in a thread with its own event loop."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        sock = bind("127.0.0.1", 0)
        self.url = url_of(sock)
        # An idle connection is closed by the client alone: closed by both at about the same time, it takes a request with it.
        config = uvicorn.Config(
            create_app(state),
            http="h11",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=3600,
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(sock,), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def _run(self, sock: Any) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets=[sock]))

    @property
    def engine(self) -> AsyncEngine:
        return self.state.served.engine

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def call(self, coroutine: Any) -> Any:
        """Runs a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def wait_idle(self) -> EngineStats:
        """Waits until no request is on its way or in the engine and checks that the pool's pages are all accounted for."""
        # A client that left may have sent a request that is not read yet: it is by the time a later connection has its answer.
        httpx.get(self.url + "/health", timeout=LIMIT_S, verify=False, trust_env=False)
        tasks = self._server.server_state.tasks
        wait_until(lambda: not tasks and self.engine.active == 0 and not self.engine.engine.has_work)
        self.call(self.engine.check_integrity())
        stats = self.stats()
        assert stats.pool_pages_free + stats.pool_pages_cached == stats.pool_pages, stats
        assert self.engine.failure is None
        return stats

    def stop(self) -> None:
        self.call(self.engine.stop())
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(LIMIT_S)


@contextmanager
def live_server(folder: Path, engine: AsyncEngine | None = None, **settings: Any) -> Iterator[LiveServer]:
    """A server in this process that is ready."""
    engine = engine or make_engine(folder)
    engine.start()
    config = ServerConfig(MODEL, **settings)
    server = LiveServer(ServerState(config, Served.of(engine, config)))
    try:
        yield server
    finally:
        server.stop()


class ServerProcess:
    """`uncast serve` on a free port; with `gate` its steps are held as this file says, see `hold`."""

    def __init__(self, folder: Path, *options: str, gate: Path | None = None) -> None:
        program = ["-m", "uncast"] if gate is None else ["-P", str(HOLD), str(gate)]
        command = [sys.executable, *program, "serve", "--model", str(folder), "--port", "0"]
        self._gate = gate
        self.process = subprocess.Popen(
            [*command, "--served-model-name", MODEL, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.line(r"loading \S+ for (http://\S+:\d+)")
        self.line("(ready): ")

    def hold(self, count: int) -> None:
        """Runs no step before so many requests are there, nor when so many run, until `release`; call it while it is idle."""
        assert self._gate is not None
        part = self._gate.with_suffix(".part")
        part.write_text(str(count))
        part.rename(self._gate)

    def release(self) -> None:
        """Ends `hold`."""
        assert self._gate is not None
        self._gate.unlink()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def line(self, pattern: str) -> str:
        """Waits for the pattern in the output; its first group."""
        wait_until(lambda: re.search(pattern, self.output) or self.process.poll() is not None)
        if self.process.poll() is not None:
            self._reader.join(LIMIT_S)
        match = re.search(pattern, self.output)
        assert match, f"no {pattern!r} in {self.output!r}"
        return match[1]

    def wait(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)


def wait_until(condition: Any, timeout: float = LIMIT_S) -> None:
    """Polls until the condition holds; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


_CLIENT = httpx.Client(timeout=LIMIT_S, verify=False, trust_env=False)


def post(url: str, body: Any, **options: Any) -> httpx.Response:
    return _CLIENT.post(url, json=body, **options)


def request(method: str, url: str, **options: Any) -> httpx.Response:
    return _CLIENT.request(method, url, **options)


_METRIC = re.compile(r"^(\w+(?:\{[^}]*\})?) ([-+.\deInfNa]+)$", re.M)


def metrics(url: str) -> dict[str, float]:
    """The samples of /metrics by name and labels."""
    response = request("GET", url + "/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {name: float(value) for name, value in _METRIC.findall(response.text)}
