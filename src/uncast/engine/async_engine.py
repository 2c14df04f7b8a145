"""`AsyncEngine`: the synchronous engine in one thread, behind asyncio.

    engine = AsyncEngine(Engine(runner, tokenizer, EngineConfig(max_waiting=256)))
    engine.start()
    async with contextlib.aclosing(engine.submit(Request(prompt=ids, max_tokens=64))) as outputs:
        async for output in outputs:
            print(output.text, end="")
    await engine.drain(grace_s=30)
    await engine.stop()

Ownership: the engine's thread alone touches the core (scheduler, pool, model). Other threads append to `_inbox` under `_wake`
and read counters; a stream's queue is filled in its own event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from uncast.engine.core import Engine
from uncast.engine.request import Request, RequestError, RequestOutput
from uncast.engine.stats import EngineStats

_POLL_S = 0.01
_MAX_RETRY_AFTER_S = 60


class QueueFull(RuntimeError):
    """The waiting queue is full (HTTP 429). `retry_after_s` (whole seconds, 1 to 60) is when half of it should be gone."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} requests are waiting and no more are accepted: retry in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Draining(RuntimeError):
    """The engine is shutting down and accepts no request (HTTP 503)."""


class EngineDead(RuntimeError):
    """The engine's thread is not running: never started, stopped, or ended by an error, which the sentence names."""


class OutputStream(AsyncIterator[RequestOutput]):
    """Outputs of one request, in order, until one has a finish_reason. `aclose()` before that aborts the request."""

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self.request_id = request_id
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._queue: asyncio.Queue[RequestOutput | EngineDead] = asyncio.Queue()
        self._over = False

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            EngineDead: the engine ended before the request did.
        """
        if self._over:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineDead):
            self._over = True
            raise item
        self._over = item.finished
        return item

    async def aclose(self) -> None:
        """Ends the iteration; aborts the request unless it is finished. May be called more than once."""
        if not self._over:
            self._over = True
            self._engine.abort(self.request_id)

    def deliver(self, item: RequestOutput | EngineDead) -> bool:
        """Hands over an item from any thread; False if the stream's event loop is gone."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: its client cannot be reached
            return False
        return True


class AsyncEngine:
    """Runs an `Engine` in one thread. `submit`, `abort` and `stats` return at once; all methods are safe from any thread,
    `submit`, `drain`, `stop` and `check_integrity` within a running event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], list[RequestOutput]]] = deque()
        self._arriving = 0
        self._streams: dict[str, OutputStream] = {}
        self._thread: threading.Thread | None = None
        self._stopping = self._draining = False
        self._failure: str | None = "the engine was not started"
        self._last_finish, self._finish_interval = time.monotonic(), 0.0

    @property
    def failure(self) -> str | None:
        """Why the engine cannot serve, one sentence; None while its thread runs."""
        return self._failure

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def active(self) -> int:
        """Requests that were accepted and are not finished."""
        return len(self._streams)

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="uncast-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> OutputStream:
        """Queues a request; the returned async iterator yields its outputs. Errors are raised here, not by the iterator.

        Raises:
            RequestError: the request does not fit the model or the pool, or its id is in use.
            QueueFull: the waiting queue is full.
            Draining: after `drain`.
            EngineDead: the thread does not run.
        """
        self.engine.check(request)
        with self._wake:
            if self._failure is not None:
                raise EngineDead(self._failure)
            if self._draining:
                raise Draining("the server is shutting down and accepts no new requests")
            waiting = self.engine.num_waiting + self._arriving
            if waiting >= self.engine.config.max_waiting:
                raise QueueFull(waiting, self._retry_after(waiting))
            if request.request_id in self._streams:
                raise RequestError(f"request_id {request.request_id!r} is in use")
            stream = self._streams[request.request_id] = OutputStream(self, request.request_id)
            self._arriving += 1
            self._inbox.append(lambda: self._arrive(request))
            self._wake.notify()
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request in any state; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        with self._wake:
            self._inbox.append(lambda: self.engine.abort(request_id))
            self._wake.notify()

    async def drain(self, grace_s: float) -> int:
        """Refuses new requests, waits up to `grace_s` seconds for the accepted ones, then aborts the rest.

        Returns:
            How many were aborted.
        """
        self._draining = True
        deadline = time.monotonic() + grace_s
        while self._streams and self._failure is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        left = list(self._streams)
        for request_id in left:
            self.abort(request_id)
        while self._streams and self._failure is None:
            await asyncio.sleep(_POLL_S)
        return len(left)

    async def stop(self) -> None:
        """Aborts what is left and ends the thread after its current step. May be called more than once."""
        if self._thread is None:
            return
        for request_id in list(self._streams):
            self.abort(request_id)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        while self._thread.is_alive():
            await asyncio.sleep(_POLL_S)

    async def check_integrity(self) -> None:
        """Checks the pool between two steps; the thread does the same by itself whenever it becomes idle.

        Raises:
            PoolError: naming the page that is wrong.
            EngineDead: the thread does not run.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def check() -> list[RequestOutput]:
            try:
                self.engine.check_integrity()
            except RuntimeError as error:
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                loop.call_soon_threadsafe(done.set_result, None)
            return []

        with self._wake:
            if self._failure is not None:
                raise EngineDead(self._failure)
            self._inbox.append(check)
            self._wake.notify()
        await done

    def stats(self) -> EngineStats:
        """Counters for `/metrics`; read without stopping the engine, so that they may be of two neighbouring steps."""
        stats = self.engine.stats()
        return dataclasses.replace(stats, waiting=stats.waiting + self._arriving, draining=self._draining)

    def _arrive(self, request: Request) -> list[RequestOutput]:
        self._arriving -= 1
        self.engine.add(request)
        return []

    def _retry_after(self, waiting: int) -> int:
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self._finish_interval * waiting / 2)))

    def _run(self) -> None:
        failure = "the engine was stopped"
        try:
            while self._turn():
                pass
        except Exception as error:  # whatever ended the thread is what every stream and /health report
            failure = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(failure)

    def _turn(self) -> bool:
        """Waits for work, takes the inbox, runs one step; False to stop."""
        outputs: list[RequestOutput] = []
        with self._wake:
            while not (self._inbox or self.engine.has_work or self._stopping):
                self._wake.wait()
            # Under the lock, so that a request always counts as arriving or as waiting, never as neither.
            while self._inbox:
                outputs += self._inbox.popleft()()
        if self._stopping:
            self._deliver(outputs)
            return False
        if self.engine.has_work:
            outputs += self.engine.step()
        self._deliver(outputs)
        if not self.engine.has_work:
            self.engine.check_integrity()
        return True

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                self._streams.pop(output.request_id)
                now = time.monotonic()
                self._finish_interval += 0.1 * (now - self._last_finish - self._finish_interval)
                self._last_finish = now
            if not stream.deliver(output):
                self.abort(output.request_id)

    def _end(self, failure: str) -> None:
        with self._wake:
            self._failure = failure
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.deliver(EngineDead(failure))
