"""What the load test can drive: the engine in this process, or `uncast serve` in another."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch

from uncast.checkpoints.bundled import model_folder
from uncast.checkpoints.load import load_model
from uncast.engine.async_engine import AsyncEngine, QueueFull
from uncast.engine.core import Engine
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

_DRAIN_S = 30


class Left(Exception):
    """The client left, as it was told to."""


class Full(RuntimeError):
    """HTTP 429."""


@dataclass
class Parts:
    """A model, its tokenizer, and the tokens of a text to cut prompts from."""

    model: MLADecoder
    tokenizer: Tokenizer
    ids: list[int]


def load_parts(model: str) -> Parts:
    folder = model_folder(model)
    tokenizer = Tokenizer(folder)
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    gpu = torch.cuda.is_available()
    loaded = load_model(folder, device="cuda", dtype=torch.bfloat16) if gpu else load_model(folder)
    return Parts(loaded, tokenizer, tokenizer.encode(text, add_special_tokens=False))


class Target(ABC):
    """Something that serves.

    Attributes:
        full: raised by `stream` when the queue is full.
    """

    full: type[Exception]

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    def stream(self, request: Request, leave_after: int | None) -> AsyncIterator[str]:
        """Pieces of the answer; leaves after that many pieces (0: at once), raising `Left`, unless the end comes before."""

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """The engine's counters by `EngineStats`' names."""

    @abstractmethod
    def rss(self) -> int:
        """Resident bytes of the serving process."""

    @abstractmethod
    async def finish(self, requests: list[Request]) -> str:
        """Ends it; "ok", or what was wrong with the end."""


class EngineTarget(Target):
    """`AsyncEngine` in this process."""

    full = QueueFull

    def __init__(self, parts: Parts, args: argparse.Namespace) -> None:
        pages = -(-args.pool_tokens // args.page_size)
        runner = ModelRunner(
            parts.model, num_pages=pages, page_size=args.page_size, deterministic=args.mode == "deterministic"
        )
        self.engine = AsyncEngine(Engine(runner, parts.tokenizer))

    async def start(self) -> None:
        self.engine.start()

    async def stream(self, request: Request, leave_after: int | None) -> AsyncIterator[str]:
        fresh = Request(request.prompt, request.params, request.max_tokens, ignore_eos=request.ignore_eos)
        seen = 0
        async with contextlib.aclosing(self.engine.submit(fresh)) as outputs:
            if leave_after == 0:
                raise Left
            async for output in outputs:
                yield output.text
                seen += 1
                if seen == leave_after and not output.finished:
                    raise Left

    async def stats(self) -> dict[str, float]:
        return {k: v for k, v in asdict(self.engine.stats()).items() if isinstance(v, int | float)}

    def rss(self) -> int:
        return _rss(os.getpid())

    async def finish(self, requests: list[Request]) -> str:
        await self.engine.check_integrity()
        await self.engine.stop()
        core = self.engine.engine
        assert core.prefix_cache is not None
        core.prefix_cache.evict(len(core.prefix_cache))
        pool = core.runner.pool
        return "ok" if pool.num_free == pool.num_pages else f"{pool.num_pages - pool.num_free} pages were lost"


class HttpTarget(Target):
    """`uncast serve` in a process of its own, over SSE."""

    full = Full

    def __init__(self, args: argparse.Namespace) -> None:
        self._command = [
            sys.executable, "-m", "uncast", "serve", "--model", args.model, "--port", "0",
            "--kv-pool-tokens", str(args.pool_tokens), "--page-size", str(args.page_size),
            "--grace-seconds", str(_DRAIN_S), *(["--deterministic"] if args.mode == "deterministic" else []),
        ]  # fmt: skip
        self._name = args.model
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(600), limits=httpx.Limits(max_connections=None))

    async def start(self) -> None:
        self._server = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self._server.stdout is not None
        url = ""
        async for raw in self._server.stdout:
            line = raw.decode()
            print(line, end="", flush=True)
            found = re.search(r"http://\S+?(?=[,\s]|$)", line)
            url = found.group() if found else url
            if "ready" in line:
                break
        else:
            raise RuntimeError("the server ended before it was ready")
        self._http.base_url = httpx.URL(url)
        self._reader = asyncio.create_task(self._read_on())

    async def _read_on(self) -> None:
        assert self._server.stdout is not None
        async for raw in self._server.stdout:
            print(raw.decode(), end="", flush=True)

    async def stream(self, request: Request, leave_after: int | None) -> AsyncIterator[str]:
        params = request.params
        body = {
            "model": self._name, "prompt": list(request.prompt), "max_tokens": request.max_tokens, "stream": True,
            "temperature": params.temperature, "top_p": params.top_p, "seed": params.seed,
            "frequency_penalty": params.frequency_penalty, "ignore_eos": request.ignore_eos,
        }  # fmt: skip
        seen = 0
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                raise Full(answer.headers.get("retry-after"))
            if answer.status_code != 200:
                raise RuntimeError(f"HTTP {answer.status_code}: {(await answer.aread()).decode()}")
            if leave_after == 0:
                raise Left
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream broke: {event['error']}")
                for choice in event["choices"]:
                    yield choice["text"]
                    seen += 1
                    if seen == leave_after and choice["finish_reason"] is None:
                        raise Left

    async def stats(self) -> dict[str, float]:
        text = (await self._http.get("/metrics")).text
        values = {m[1]: float(m[2]) for m in re.finditer(r"^uncast_(\w+) (\S+)$", text, re.MULTILINE)}
        renamed = {
            "waiting": "requests_waiting", "running": "requests_running", "swapped": "requests_swapped",
            "pool_pages": "kv_pool_pages", "pool_pages_free": "kv_pool_pages_free",
            "pool_pages_cached": "kv_pool_pages_cached",
        }  # fmt: skip
        return {**values, **{name: values[metric] for name, metric in renamed.items()}}

    def rss(self) -> int:
        return _rss(self._server.pid)

    async def finish(self, requests: list[Request]) -> str:
        """SIGTERM while eight requests run: they must complete, and the exit code must be 0."""
        streams = [asyncio.create_task(self._whole(request)) for request in requests[:8]]
        await asyncio.sleep(0.5)
        self._server.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*streams, return_exceptions=True)
        code = await asyncio.wait_for(self._server.wait(), _DRAIN_S + 10)
        await self._http.aclose()
        broken = [str(result) for result in results if isinstance(result, BaseException)]
        if broken:
            return f"{len(broken)} of 8 requests did not survive SIGTERM: {broken[0]}"
        return "ok" if code == 0 else f"exit code {code} after SIGTERM"

    async def _whole(self, request: Request) -> str:
        return "".join([piece async for piece in self.stream(request, None)])


def _rss(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0
