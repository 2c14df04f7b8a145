"""An OpenAI endpoint with a script: what to send, when, and how to break."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from uncast.bench import serve, serve_request
from uncast.bench.serve_request import EventReader

LIMIT_S = 300.0
"""Longer than any machine stalls; nothing waits for it unless a test fails."""
MODELS = {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "vllm"}]}
Handler = Callable[["Connection"], Awaitable[None]]


class Connection:
    """One request, and how to answer it with raw bytes."""

    def __init__(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: Any) -> None:
        self._writer, self.path, self.headers, self.body = writer, path, headers, body

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def whole(self, body: Any, status: int = 200, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        await self.raw(head.encode() + data)

    async def begin(self) -> None:
        """The head of an event stream."""
        await self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def events(self, *events: Any) -> None:
        """Events in one piece."""
        texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
        await self.chunk("".join(f"data: {text}\n\n" for text in texts).encode())

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def close(self) -> None:
        self._writer.close()


class FakeServer:
    """`requests` has every body that came to an answering route, with its headers under "headers"."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.requests, self.url, self.lists_models = handler, list[Any](), "", True
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1000))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._started.set()
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                connection = Connection(writer, first.split()[1], headers, json.loads(raw or b"null"))
                if connection.path == "/v1/models":
                    await (connection.whole(MODELS) if self.lists_models else connection.whole({}, 404))
                else:
                    self.requests.append({**connection.body, "headers": headers, "path": connection.path})
                    await self.handler(connection)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            writer.close()

    def refuse(self) -> None:
        """No connection is taken any more."""
        self._loop.call_soon_threadsafe(self._server.close)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)


@contextmanager
def fake_server(handler: Handler) -> Iterator[FakeServer]:
    server = FakeServer(handler)
    try:
        yield server
    finally:
        server.stop()


class Clock:
    """The clock that a load is measured by. It stands still until a script moves it, so that figures are exact.

    Attributes:
        now: what `time.perf_counter` says in `uncast.bench`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._sent, self._taken = 1000.0, 0, 0
        for module in (serve, serve_request):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        push = EventReader.push

        def counted(reader: EventReader, raw: bytes) -> list[str]:
            events = push(reader, raw)
            self._taken += len(events)
            return events

        monkeypatch.setattr(EventReader, "push", counted)

    async def events(self, connection: Connection, *events: Any) -> None:
        """Sends events in one piece and waits until the client has noted them."""
        self._sent += len(events)
        await connection.events(*events)
        while self._taken < self._sent:
            await asyncio.sleep(0.001)

    def sleeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever sleeps in a load moves the clock instead; its ticks are left out."""

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(0)  # what was begun before reads the clock before it moves
            self.now += seconds

        async def no_ticks(lag: list[float]) -> None:
            return

        monkeypatch.setattr(serve, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        monkeypatch.setattr(serve, "_tick", no_ticks)


def text(piece: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": reason}]}


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **details}}
