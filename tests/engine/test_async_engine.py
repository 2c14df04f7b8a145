"""The engine behind asyncio: streams, back pressure, aborts, draining, failure.

Where an outcome depends on how far the engine's thread has come, the test lets it take its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine

import pytest

from tests.engine.stepped import LIMIT_S, SteppedEngine
from tests.engine.workload import PAGE, alone, make_engine, random_requests, tokens_of
from uncast.engine.async_engine import AsyncEngine, Draining, EngineDead, OutputStream, QueueFull
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.request import Request, RequestError, RequestOutput
from uncast.engine.runner import ModelRunner
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder


@contextlib.asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[AsyncEngine]:
    served = AsyncEngine(engine)
    served.start()
    try:
        yield served
    finally:
        if isinstance(engine, SteppedEngine):
            engine.allow()
        await served.stop()


def run(scenario: Coroutine[None, None, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(limited())


def small(
    model: MLADecoder, tokenizer: Tokenizer, *, max_running: int = 4, max_waiting: int = 50, deterministic: bool = False
) -> SteppedEngine:
    runner = ModelRunner(model, num_pages=20, page_size=PAGE, deterministic=deterministic)
    limits = EngineConfig(max_running=max_running, max_waiting=max_waiting, max_step_tokens=32)
    return SteppedEngine(runner, tokenizer, limits)


async def collect(stream: OutputStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def settled(engine: AsyncEngine) -> None:
    while engine.active:
        await asyncio.sleep(0.005)


def test_streams_carry_their_own_requests_outputs(model: MLADecoder, tokenizer: Tokenizer) -> None:
    """Deterministic mode: which requests share a step depends on the threads."""
    requests = random_requests(random.Random(7), 10, new=8)
    single = make_engine(model, tokenizer, pages=20, prefix_cache=False, deterministic=True)
    expected = {request.request_id: alone(single, request) for request in requests}

    async def scenario() -> None:
        core = small(model, tokenizer, deterministic=True)
        core.allow()
        async with running(core) as engine:
            results = await asyncio.gather(*(collect(engine.submit(request)) for request in requests))
            for request, outputs in zip(requests, results, strict=True):
                assert tokens_of(outputs) == tokens_of(expected[request.request_id])
                assert {o.request_id for o in outputs} == {request.request_id} and outputs[-1].finish_reason == "length"
            await engine.check_integrity()
            assert engine.stats().requests_total == 10 and engine.active == 0

    run(scenario())


def test_a_full_queue_is_refused_with_a_hint_and_recovers(model: MLADecoder, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        core = small(model, tokenizer, max_running=1, max_waiting=3)
        async with running(core) as engine:
            streams = [engine.submit(Request([1], max_tokens=30)) for _ in range(3)]
            with pytest.raises(QueueFull, match="3 requests are waiting and no more are accepted: retry in") as caught:
                engine.submit(Request([1], max_tokens=30))
            assert 1 <= caught.value.retry_after_s <= 60
            core.allow(1)
            assert not (await anext(streams[0])).finished
            streams.append(engine.submit(Request([1], max_tokens=30)))
            with pytest.raises(QueueFull):
                engine.submit(Request([1], max_tokens=30))
            core.allow()
            results = await asyncio.gather(*map(collect, streams))
            assert all(outputs[-1].finish_reason == "length" for outputs in results)
            assert (await collect(engine.submit(Request([1], max_tokens=2))))[-1].finished

    run(scenario())


def test_closing_a_stream_aborts_its_request(model: MLADecoder, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        core = small(model, tokenizer, max_running=1)
        async with running(core) as engine:
            first, waiting = (engine.submit(Request([k], max_tokens=140)) for k in range(2))
            core.allow(1)
            async with contextlib.aclosing(first) as outputs:
                async for _ in outputs:
                    break
            await waiting.aclose()
            await waiting.aclose()
            core.allow()
            await settled(engine)
            stats = engine.stats()
            assert stats.finished_total["abort"] == 2 and stats.running == stats.waiting == 0
            assert [output async for output in first] == []
            finished = engine.submit(Request([1], max_tokens=1))
            await collect(finished)
            await finished.aclose()
            assert engine.stats().finished_total["abort"] == 2

    run(scenario())


def test_errors_are_raised_by_submit_itself(model: MLADecoder, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        core = small(model, tokenizer)
        engine = AsyncEngine(core)
        with pytest.raises(EngineDead, match="the engine was not started"):
            engine.submit(Request([1]))
        engine.start()
        with pytest.raises(RuntimeError, match="started before"):
            engine.start()
        with pytest.raises(RequestError, match="exceed the KV pool of 160 tokens"):
            engine.submit(Request([1], max_tokens=160))
        stream = engine.submit(Request([1], request_id="mine"))
        with pytest.raises(RequestError, match="'mine' is in use"):
            engine.submit(Request([1], request_id="mine"))
        core.allow()
        await collect(stream)
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineDead, match="the engine was stopped"):
            engine.submit(Request([1]))

    run(scenario())


@pytest.mark.parametrize(("grace_s", "reason"), [(LIMIT_S, "length"), (0.0, "abort")])
def test_draining_finishes_or_aborts_and_refuses(
    model: MLADecoder, tokenizer: Tokenizer, grace_s: float, reason: str
) -> None:
    async def scenario() -> None:
        core = small(model, tokenizer)
        core.allow(5)
        async with running(core) as engine:
            streams = [asyncio.ensure_future(collect(engine.submit(Request([k], max_tokens=40)))) for k in range(6)]
            while core.stats().steps_total < 5:
                await asyncio.sleep(0.005)
            draining = asyncio.ensure_future(engine.drain(grace_s))
            await asyncio.sleep(0)
            with pytest.raises(Draining, match="shutting down"):
                engine.submit(Request([1]))
            assert engine.stats().draining
            core.allow()
            assert await draining == (0 if reason == "length" else 6)
            assert [(await stream)[-1].finish_reason for stream in streams] == [reason] * 6
            await engine.check_integrity()

    run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_step_reaches_every_stream(model: MLADecoder, tokenizer: Tokenizer) -> None:
    class Broken(SteppedEngine):
        def step(self) -> list[RequestOutput]:
            if self._steps == 3:
                raise RuntimeError("the device is gone")
            return super().step()

    async def scenario() -> None:
        runner = ModelRunner(model, num_pages=20, page_size=PAGE)
        core = Broken(runner, tokenizer)
        engine = AsyncEngine(core)
        engine.start()
        streams = [engine.submit(Request([k], max_tokens=50)) for k in range(3)]
        core.allow()
        for stream in streams:
            with pytest.raises(EngineDead, match="the engine failed: RuntimeError: the device is gone"):
                await collect(stream)
        assert engine.failure is not None and await engine.drain(10) == 0
        with pytest.raises(EngineDead, match="the device is gone"):
            engine.submit(Request([1]))
        with pytest.raises(EngineDead, match="the device is gone"):
            await engine.check_integrity()
        await engine.stop()

    run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_page_is_found_when_the_engine_becomes_idle(model: MLADecoder, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        core = small(model, tokenizer)
        engine = AsyncEngine(core)
        engine.start()
        core.runner.pool.allocate(1)
        core.allow()
        await collect(engine.submit(Request([1], max_tokens=1)))
        while engine.failure is None:
            await asyncio.sleep(0.005)
        assert "has refcount 1 but 0 owners" in engine.failure
        await engine.stop()

    run(scenario())


def test_a_client_whose_event_loop_is_gone_is_aborted(model: MLADecoder, tokenizer: Tokenizer) -> None:
    core = small(model, tokenizer)
    engine = AsyncEngine(core)
    engine.start()

    async def leave() -> None:
        engine.submit(Request([1], max_tokens=150))

    asyncio.run(leave())
    core.allow()

    async def rest() -> None:
        await settled(engine)
        assert engine.stats().finished_total == {"stop": 0, "length": 0, "abort": 1, "error": 0}
        await engine.stop()

    run(rest())
