"""Choices of one API request, generated together: submitted all or none, merged, aborted when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from uncast.engine.async_engine import AsyncEngine, Draining, EngineDead, OutputStream, QueueFull
from uncast.engine.request import Request, RequestError, RequestOutput
from uncast.server.errors import ApiError, aborted, bad_request, draining
from uncast.server.metrics import Metrics


class Generation:
    """An async context manager: entered with every request accepted, left with none running.

    Iterating yields (choice, output) as outputs arrive, until every choice is finished.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[Request], metrics: Metrics) -> None:
        """Submits the requests.

        Raises:
            ApiError: 400, 429 with Retry-After, or 503; then none of them runs.
        """
        self._metrics = metrics
        self._began = time.monotonic()
        self._streams: list[OutputStream] = []
        try:
            for request in requests:
                self._streams.append(engine.submit(request))
        except (RequestError, QueueFull, Draining, EngineDead) as error:
            for stream in self._streams:
                engine.abort(stream.request_id)
            raise _as_api_error(error) from None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            await stream.aclose()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The choices' outputs, merged in the order of arrival.

        Raises:
            ApiError: 400 when a choice cannot follow its grammar; 503 when the engine ended, aborted a choice because the
                grace time is over, or could not choose a token because the logits are not finite.
        """
        arrived: asyncio.Queue[tuple[int, RequestOutput | EngineDead]] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(index, arrived)) for index in range(len(self._streams))]
        left = len(pumps)
        try:
            while left:
                index, item = await arrived.get()
                if isinstance(item, EngineDead):
                    raise _as_api_error(item)
                if item.finish_reason == "abort":
                    raise aborted()
                if item.error is not None:
                    raise (
                        bad_request(item.error, code="grammar_failed")
                        if item.grammar_failed
                        else ApiError(503, item.error, code="model_failed")
                    )
                left -= item.finished
                yield index, item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int, arrived: asyncio.Queue[tuple[int, RequestOutput | EngineDead]]) -> None:
        last: float | None = None
        try:
            async for output in self._streams[index]:
                now = time.monotonic()
                if output.token_ids:
                    if last is None:
                        self._metrics.ttft.observe(now - self._began)
                    else:
                        self._metrics.itl.observe((now - last) / len(output.token_ids))
                    last = now
                if output.finished:
                    self._metrics.e2e.observe(now - self._began)
                arrived.put_nowait((index, output))
        except EngineDead as error:
            arrived.put_nowait((index, error))


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after_s)})
    if isinstance(error, Draining):
        return draining()
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), code="engine_failed")
    return bad_request(str(error), code="invalid_value")


async def gather(generation: Generation) -> list[list[RequestOutput]]:
    """All outputs of each choice of an entered generation."""
    found: dict[int, list[RequestOutput]] = {}
    async with contextlib.aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            found.setdefault(index, []).append(output)
    return [found[index] for index in sorted(found)]
