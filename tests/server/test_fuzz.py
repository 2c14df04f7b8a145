"""A bounded run of `tests/server/fuzz.py`, and the same under a pool so small that requests are preempted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.server import fuzz
from tests.server.hold import hold
from tests.server.live import LIMIT_S, LiveServer, live_server, make_engine


def test_no_body_breaks_the_server(folder: Path) -> None:
    engine = make_engine(folder, max_waiting=1024)
    with live_server(folder, engine, max_body_bytes=100_000) as live:
        report = asyncio.run(fuzz.run(live.url, range(250), limit_s=LIMIT_S))
        assert not report.faults, report.faults[:5]
        assert sum(report.statuses.values()) == len(report.last) == 250
        # Without those of clients that leave, which may be fast enough or not.
        staying = [status for seed, status in report.last.items() if fuzz.attempt(seed).leave_s is None]
        assert staying.count(200) > 50 and staying.count(400) > 50
        assert staying.count(413) > 0 and staying.count(415) > 0
        stats = live.wait_idle()
        assert stats.waiting == 0 and stats.running == 0
        valid = [seed for seed, status in report.last.items() if status == 200][:50]
        with hold(engine.engine):  # so that nobody has an answer before leaving
            left = asyncio.run(fuzz.run(live.url, valid, everyone_leaves=True))
            assert not left.faults and left.statuses == {0: 50}
        live.wait_idle()


HOG = {"max_tokens": 80, "ignore_eos": True}
"""One request of a crowd that outgrows the pool: four of them need 24 pages."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def hog(client: httpx.AsyncClient, number: int) -> None:
    """Gets a long text twice; whatever became of it meanwhile, it is whole."""
    texts = 0
    while texts < 2:
        answer = await client.post("/v1/completions", json={**HOG, "prompt": [5 + number] * 3})
        assert answer.status_code in (200, 429)
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == HOG["max_tokens"]
            texts += 1
        await asyncio.sleep(0.01)


async def fuzz_in_a_crowd(live: LiveServer, seeds: range) -> tuple[fuzz.Report, int]:
    """The fuzzer's report, and how many preemptions there had been when it began.

    It begins while a request is preempted and the queue is full, and nothing goes on before it has been refused for that.
    """
    report = fuzz.Report()

    def crowded() -> bool:
        stats = live.stats()
        return stats.preemptions_total > 0 or stats.requests_total < 4

    async with httpx.AsyncClient(base_url=live.url, timeout=LIMIT_S, verify=False) as client:
        with hold(live.engine.engine, crowded):
            tasks = [asyncio.create_task(hog(client, number)) for number in range(4)]
            await until(lambda: live.stats().preemptions_total > 0)
            before = live.stats().preemptions_total
            few = {"prompt": "a", "max_tokens": 2}
            tasks += [asyncio.create_task(client.post("/v1/completions", json=few)) for _ in range(5)]
            await until(lambda: live.stats().waiting == 5)
            run = fuzz.run(live.url, seeds, clients=12, limit_s=LIMIT_S, patient=True, report=report)
            fuzzing = asyncio.create_task(run)
            await until(lambda: report.statuses[429] > 0)
        await asyncio.gather(fuzzing, *tasks)
    return report, before


def test_nor_one_whose_pool_and_queue_are_nearly_full(folder: Path) -> None:
    engine = make_engine(folder, pool_tokens=208, page_size=16, max_running=8, max_waiting=5)
    with live_server(folder, engine) as live:
        report, before = asyncio.run(fuzz_in_a_crowd(live, range(10_000, 10_100)))
        assert not report.faults, report.faults[:5]
        assert len(report.last) == 100 and 429 not in report.last.values()
        assert report.statuses[429] > 0 and report.statuses[200] > 20
        # Three of the four first hogs go on after the first preemption, and need 15 of the 13 pages before they end.
        assert live.wait_idle().preemptions_total > before


def test_the_checks_find_faults(folder: Path) -> None:
    """The fuzzer reports a server that answers with what it must not."""
    broken = {"error": {"message": "Traceback (most recent call last)"}}
    for response, words in (
        (httpx.Response(500, text="oops"), "status 500"),
        (httpx.Response(503, text="oops"), "status 503"),
        (httpx.Response(400, json=broken), "a traceback"),
        (httpx.Response(400, json={"error": {"message": "a"}}), "not an error in OpenAI's format"),
        (httpx.Response(200, json={"choices": []}), "no choices"),
    ):
        assert words in str(fuzz.check(response, draining=False))
    assert fuzz.check(httpx.Response(200, json={"choices": [1]}), draining=False) is None
