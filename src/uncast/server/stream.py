"""Answers that watch their client: server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class _Ended(Exception):
    """What work was to end with came before its result."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled (and has ended) if the client leaves first.

    Raises:
        ClientGone: the client left.
    """
    try:
        return await _until(_gone(receive), work)
    except _Ended:
        raise ClientGone from None


async def before(event: asyncio.Event, work: Coroutine[Any, Any, T], otherwise: Exception) -> T:
    """The result of `work`, which is cancelled (and has ended) if the event is set first; then `otherwise` is raised."""
    try:
        return await _until(event.wait(), work)
    except _Ended:
        raise otherwise from None


async def _until(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if `end` comes first, `work` is cancelled (and has ended) and `_Ended` is raised."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Ended
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """`text/event-stream` of the strings of a generator; `owner` is entered before the first and left after the last event,
    however the end comes. Once `expired` is set, the events `last` take the place of those that are not sent yet."""

    media_type = "text/event-stream"

    def __init__(
        self,
        owner: AbstractAsyncContextManager[object],
        events: AsyncGenerator[str, None],
        *,
        expired: asyncio.Event,
        last: Sequence[str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._owner, self._events, self._expired, self._last = owner, events, expired, last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._owner:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await _until(self._expired.wait(), self._send_events(send))
        except _Ended:  # a send that waited for the client has written nothing
            for event in self._last:
                await _send_event(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await _send_event(send, event)


async def _send_event(send: Send, event: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
