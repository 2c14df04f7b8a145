"""An OpenAI endpoint with a script: what to send, when, and how to break."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

MODELS = {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "vllm"}]}
Handler = Callable[["Connection"], Awaitable[None]]


class Connection:
    """One request, and how to answer it with raw bytes."""

    def __init__(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: Any) -> None:
        self._writer, self.path, self.headers, self.body = writer, path, headers, body
        self.sent = list[float]()

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
        """Events in one piece; `sent` has the times."""
        self.sent.append(time.perf_counter())
        texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
        await self.chunk("".join(f"data: {text}\n\n" for text in texts).encode())

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def close(self) -> None:
        self._writer.close()


class FakeServer:
    """`requests` has every body that came to an answering route, with its headers under "headers"; `sent` has for each of them
    when its events were sent."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.requests, self.url, self.lists_models = handler, list[Any](), "", True
        self.sent = list[list[float]]()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

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
                    self.sent.append(connection.sent)
                    await self.handler(connection)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            writer.close()

    def refuse(self) -> None:
        """No connection is taken any more."""
        self._loop.call_soon_threadsafe(self._server.close)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@contextmanager
def fake_server(handler: Handler) -> Iterator[FakeServer]:
    server = FakeServer(handler)
    try:
        yield server
    finally:
        server.stop()


def text(piece: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": reason}]}


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **details}}
