"""A bounded run of `tests/server/fuzz.py`, and the same under a pool so small that requests are preempted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.server import fuzz
from tests.server.live import live_server, make_engine


def test_no_body_breaks_the_server(folder: Path) -> None:
    with live_server(folder, make_engine(folder, max_waiting=64), max_body_bytes=100_000) as live:
        report = asyncio.run(fuzz.run(live.url, range(250)))
        assert not report.faults, report.faults[:5]
        assert sum(report.statuses.values()) == 250
        assert report.statuses[200] > 50 and report.statuses[400] > 50 and report.statuses[0] > 3
        assert report.statuses[413] > 0 and report.statuses[415] > 0
        stats = live.wait_idle()
        assert stats.waiting == 0 and stats.running == 0


def test_nor_one_whose_pool_and_queue_are_nearly_full(folder: Path) -> None:
    engine = make_engine(folder, pool_tokens=208, page_size=16, max_running=8, max_waiting=5)
    with live_server(folder, engine) as live:
        report = asyncio.run(fuzz.run(live.url, range(10_000, 10_200), clients=12))
        assert not report.faults, report.faults[:5]
        assert report.statuses[429] > 0 and report.statuses[200] > 3
        assert live.wait_idle().preemptions_total > 0


def test_the_checks_find_faults(folder: Path) -> None:
    """The fuzzer reports a server that answers with what it must not."""
    import httpx

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
