"""Load on a server with a script: what is measured is what the script did, and a broken server is named as what it is.

Figures are of a clock that the script moves; the real one only where it cannot fall short.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import statistics
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("httpx")
import itertools

from tests.bench.serve_fakes import LIMIT_S, Clock, Connection, Handler, delta, fake_server, text, usage

from uncast.bench.serve import Closed, Endpoint, LoadResult, Open, Prompt, ServerError, base_url, discover, measure
from uncast.bench.serve_prompts import token_prompts, warm_up_of, word_prompts, words_for
from uncast.bench.serve_report import Percentiles, figures, serving_row
from uncast.bench.serve_request import EventReader

FIRST_S, GAP_S = 0.08, 0.06


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(handler: Handler, count: int = 1, load: Closed | Open = Closed(1), **options: Any) -> LoadResult:  # noqa: B008
    warm_up, progress = options.pop("warm_up", ()), options.pop("progress", lambda done: None)
    with fake_server(handler) as server:
        endpoint = Endpoint(server.url, "fake", **options)
        result = measure(endpoint, [Prompt("p", 8)] * count, load, warm_up=warm_up, progress=progress)
        result.__dict__["requests"] = server.requests
        return result


def paced(clock: Clock) -> Handler:
    """Four tokens: the first after `FIRST_S`, the others `GAP_S` apart; usage at the end, after another pause."""

    async def handler(c: Connection) -> None:
        await c.begin()
        for index in range(4):
            clock.now += GAP_S if index else FIRST_S
            await clock.events(c, text("ab"))
        clock.now += GAP_S
        await clock.events(c, text("", "length"), usage(7, 4, 3), "[DONE]")
        await c.end()

    return handler


def test_times_are_those_of_the_script(clock: Clock) -> None:
    """The opening and the end of an answer are no tokens."""
    result = run(paced(clock), 3)
    for answer in result.answers:
        assert answer.failure is None and answer.sent == answer.due
        assert answer.ttft_s == pytest.approx(FIRST_S) and answer.itl_s == pytest.approx([GAP_S] * 3)
        assert answer.tpot_s == pytest.approx(GAP_S) and answer.e2e_s == pytest.approx(FIRST_S + 4 * GAP_S)
    found = figures(result)
    assert (found.complete, found.output_tokens, found.prompt_tokens, found.cached_tokens) == (3, 12, 21, 9)
    assert found.tokens_from == "usage" and found.tokens_per_chunk == 1.0
    assert found.ttft == Percentiles.of([FIRST_S]) and found.itl == found.tpot == Percentiles.of([GAP_S])
    assert found.e2e == Percentiles.of([FIRST_S + 4 * GAP_S])
    assert found.output_tokens_per_s == pytest.approx(12 / (3 * (FIRST_S + 4 * GAP_S)), rel=1e-3)
    assert found.requests_per_s == pytest.approx(1 / (FIRST_S + 4 * GAP_S), rel=1e-3)
    assert any("closed loop" in note for note in found.notes()) and any("9 prompt" in note for note in found.notes())


def test_a_time_is_that_of_arrival() -> None:
    """On the real clock, where nothing can be early: the server waits before its first token and between tokens."""

    async def handler(c: Connection) -> None:
        await c.begin()
        for _ in range(2):
            await asyncio.sleep(GAP_S)
            await c.events(text("a"))
        await c.events(text("", "stop"), "[DONE]")
        await c.end()

    (answer,) = run(handler).complete
    assert answer.ttft_s is not None and answer.ttft_s >= GAP_S and len(answer.itl_s) == 1
    assert answer.due <= answer.sent < answer.chunks[0] <= answer.chunks[1] <= answer.end
    assert answer.e2e_s >= 2 * GAP_S


def test_a_role_is_no_token_and_reasoning_is_one(clock: Clock) -> None:
    async def handler(c: Connection) -> None:
        await c.begin()
        await clock.events(c, delta(role="assistant", content=""))
        clock.now += FIRST_S
        await clock.events(c, delta(reasoning_content="so"))
        clock.now += GAP_S
        await clock.events(c, delta(reasoning="vLLM's name"), delta(content="yes"))
        clock.now += GAP_S
        await clock.events(c, delta(tool_calls=[{"index": 0}]))
        await clock.events(c, delta("stop", content=""), "[DONE]")
        await c.end()

    result = run(handler, chat=True)
    (answer,) = result.answers
    assert answer.failure is None and answer.ttft_s == pytest.approx(FIRST_S)
    assert len(answer.chunks) == answer.tokens == 4 and answer.itl_s == pytest.approx([GAP_S, 0, GAP_S])
    assert figures(result).tokens_from == "chunks" and any("no usage" in note for note in figures(result).notes())
    assert result.__dict__["requests"][0]["path"] == "/v1/chat/completions"
    assert result.__dict__["requests"][0]["messages"] == [{"role": "user", "content": "p"}]


def test_several_tokens_in_a_chunk_are_said_and_divided(clock: Clock) -> None:
    async def handler(c: Connection) -> None:
        await c.begin()
        for index in range(3):
            clock.now += GAP_S if index else FIRST_S
            await clock.events(c, text("four tokens"))
        await clock.events(c, {**text("", "stop"), "usage": {"prompt_tokens": 1, "completion_tokens": 9}}, "[DONE]")
        await c.end()

    found = figures(run(handler))
    assert found.tokens_per_chunk == 3.0 and any("3.00 tokens a chunk" in note for note in found.notes())
    assert found.itl.mean == pytest.approx(1e3 * GAP_S) and found.tpot.p50 == pytest.approx(1e3 * GAP_S * 2 / 8)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_in_any_pieces(size: int) -> None:
    raw = ': hi\r\nevent: x\r\ndata: {"a":\r\ndata:  "käse"}\r\n\r\n\n\ndata:[DONE]\n\ndata: unfinished\n'.encode()
    reader = EventReader()
    events = [event for at in range(0, len(raw), size) for event in reader.push(raw[at : at + size])]
    assert events == ['{"a":\n "käse"}', "[DONE]"]


async def http_500(c: Connection) -> None:
    await c.whole({"error": {"message": "the engine\nis gone"}}, 500)


async def hang(c: Connection) -> None:
    await c.begin()
    await c.events(text("a"))
    await asyncio.sleep(LIMIT_S)


async def cut(c: Connection) -> None:
    await c.begin()
    await c.events(text("a"))
    await c.raw(b"ff\r\ndata: {")
    c.close()


async def cut_cleanly(c: Connection) -> None:
    await c.begin()
    await c.events(text("a"))
    await c.end()


async def no_stream(c: Connection) -> None:
    await c.whole({"choices": [{"text": "a", "finish_reason": "stop"}]})


async def no_json(c: Connection) -> None:
    await c.begin()
    await c.events("{never")
    await c.end()


async def other_json(c: Connection) -> None:
    await c.begin()
    await c.events([1], "[DONE]")
    await c.end()


async def error_event(c: Connection) -> None:
    await c.begin()
    await c.events(text("a"), {"error": {"message": "too long"}}, "[DONE]")
    await c.end()


async def hang_up(c: Connection) -> None:
    c.close()


@pytest.mark.parametrize(
    ("handler", "kind", "detail"),
    [
        (http_500, "HTTP 500", "the engine is gone"),
        (hang, "timeout", "within 0.3 s"),
        (cut, "connection lost", "incomplete"),
        (cut_cleanly, "stream cut short", "finish_reason"),
        (no_stream, "no event stream", "application/json"),
        (no_json, "broken event stream", "Expecting"),
        (other_json, "broken event stream", "list"),
        (error_event, "error in the answer", "too long"),
        (hang_up, "connection lost", "disconnected"),
    ],
)
def test_broken_servers_are_counted_by_kind(handler: Handler, kind: str, detail: str) -> None:
    result = run(handler, 3, Closed(3), timeout_s=0.3 if handler is hang else LIMIT_S)
    assert result.failures == {kind: 3} and not result.complete and not result.good
    assert all(detail in answer.detail and "\n" not in answer.detail for answer in result.answers)
    found = figures(result)
    assert found.output_tokens == 0 and math.isnan(found.ttft.p50) and found.json()["ttft_ms"]["p50"] is None
    assert found.row()["failures"] == f"3 {kind}" and not any("tokens" in note for note in found.notes())


def test_a_server_that_dies_is_given_up() -> None:
    """Ten answers, then nobody listens: the rest is not all tried, and what was answered has its figures."""
    with fake_server(cut_cleanly) as server:
        done = 0

        async def handler(c: Connection) -> None:
            nonlocal done
            done += 1
            if done > 10:
                server.refuse()
                c.close()
                return
            await c.begin()
            await c.events(text("a", "stop"), "[DONE]")
            await c.end()

        server.handler = handler
        result = measure(Endpoint(server.url, "fake"), [Prompt("p", 1)] * 500, Closed(4))
    assert len(result.complete) == 10 and set(result.failures) <= {"connection lost", "no connection"}
    assert sum(result.failures.values()) + 10 + result.not_sent == 500 and result.not_sent > 400
    assert figures(result).output_tokens == 10 and not result.good
    with socket.socket() as taken, pytest.raises(ServerError, match="answers no request: no connection"):
        taken.bind(("127.0.0.1", 0))  # nobody listens there, nor can anyone
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        measure(Endpoint(url, "fake"), [Prompt("p", 1)], Closed(1), warm_up=[Prompt("w", 1)])


def test_the_closed_loop_keeps_so_many_requests_and_the_warm_up_does_not_count() -> None:
    """No answer is given before four requests are there; a fifth would have time to come."""
    now = most = 0
    warm_until, four = 0.0, asyncio.Event()

    async def handler(c: Connection) -> None:
        nonlocal now, most, warm_until
        if c.body["prompt"] == "warm":
            warm_until = time.perf_counter()
            await whole_answer(c)
            return
        now += 1
        most = max(most, now)
        if now == 4:
            four.set()
        await four.wait()
        await asyncio.sleep(0.02)
        now -= 1
        await whole_answer(c)

    told: list[int] = []
    result = run(handler, 12, Closed(4), warm_up=[Prompt("warm", 1)] * 3, progress=told.append)
    assert warm_until < result.began, "it is counted"
    assert most == 4 and len(result.complete) == 12 and told == list(range(1, 13))
    sent = [body["prompt"] for body in result.__dict__["requests"]]
    assert sent == ["warm"] * 3 + ["p"] * 12
    assert result.began <= min(answer.due for answer in result.answers)


async def whole_answer(c: Connection) -> None:
    await c.begin()
    await c.events(text("a", "stop"), "[DONE]")
    await c.end()


def test_the_open_loop_sends_at_its_times_whatever_the_server_does(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is answered before the last request is there: a closed loop would wait for ever."""
    clock.sleeps(monkeypatch)
    arrived, last = 0, asyncio.Event()

    async def handler(c: Connection) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 12:
            clock.now += 0.4
            last.set()
        await last.wait()
        await whole_answer(c)

    result = run(handler, 12, Open(20.0))
    arrivals = Open(20.0).arrivals(12, 0)
    assert [a.due - result.began for a in result.answers] == pytest.approx(arrivals)
    assert [a.sent - a.due for a in result.answers] == pytest.approx([0.0] * 12, abs=1e-9)
    assert [a.e2e_s for a in result.answers] == pytest.approx([arrivals[-1] + 0.4 - at for at in arrivals])
    assert "closed" not in " ".join(figures(result).notes())


def test_poisson_arrivals() -> None:
    times = Open(4.0).arrivals(4000, seed=3)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0 and statistics.fmean(gaps) == pytest.approx(0.25, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1), "of an exponential the deviation is the mean"
    assert times == Open(4.0).arrivals(4000, seed=3) != Open(4.0).arrivals(4000, seed=4)
    assert Open(math.inf).arrivals(3, 0) == [0, 0, 0]


def test_answers_without_a_stream() -> None:
    async def handler(c: Connection) -> None:
        assert "stream" not in c.body and c.headers["authorization"] == "Bearer key" and c.body["ignore_eos"] is True
        await asyncio.sleep(GAP_S)
        await c.whole({"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 1, "completion_tokens": 5}})

    result = run(handler, stream=False, api_key="key", extra={"ignore_eos": True})
    found = figures(result)
    assert result.good and found.output_tokens == 5 and math.isnan(found.ttft.p50) and found.e2e.p50 >= 1e3 * GAP_S
    assert run(no_json, stream=False).failures == {"broken answer": 1}


def test_percentiles_and_a_single_value() -> None:
    found = Percentiles.of([index / 1e3 for index in range(1, 102)])
    assert (found.mean, found.p50, found.p90, found.p99) == (51.0, 51.0, 91.0, 100.0)
    assert Percentiles.of([0.002]) == Percentiles(2.0, 2.0, 2.0, 2.0)


def test_a_late_client_says_so() -> None:
    def block(done: int) -> None:
        time.sleep(0.1)

    result = run(whole_answer, 5, progress=block)
    assert max(result.lag_s) > 0.08
    late, punctual = (figures(replace(result, lag_s=lags)).notes() for lags in ([0.1] * 5, [0.001] * 5))
    assert any("this client was 100.0 ms late" in note for note in late) and not any("late" in n for n in punctual)


def test_random_prompts_have_their_length_and_warm_ups_another_beginning() -> None:
    prompts = token_prompts(3, 50, 8, vocab_size=100, seed=1)
    assert all(len(p.content) == 50 and max(p.content) < 100 and p.max_tokens == 8 for p in prompts)  # type: ignore[type-var]
    assert prompts == token_prompts(3, 50, 8, vocab_size=100, seed=1) != token_prompts(3, 50, 8, vocab_size=100, seed=2)
    messages = Prompt([{"role": "user", "content": "p"}], 1)
    for prompt, other in zip(
        [prompts[0], word_prompts(1, 5, 1, seed=0)[0], messages],
        [warm_up_of([p], 1)[0] for p in (prompts[0], word_prompts(1, 5, 1, seed=0)[0], messages)],
        strict=True,
    ):
        assert other.content != prompt.content and other.max_tokens == prompt.max_tokens
    assert len(warm_up_of(prompts, 7)) == 7


def test_words_are_counted_by_the_server() -> None:
    """Its tokenizer makes 3 tokens of a word and its template 10 of its own."""

    async def handler(c: Connection) -> None:
        words = len(c.body["messages"][0]["content"].split())
        await c.whole({"choices": [{}], "usage": {"prompt_tokens": 3 * words + 10, "completion_tokens": 1}})

    with fake_server(handler) as server:
        endpoint = Endpoint(server.url, "fake", chat=True)
        assert words_for(endpoint, 310) == 100
        with pytest.raises(ValueError, match="10 tokens of nothing"):
            words_for(endpoint, 9)


def test_the_server_is_asked_for_its_model() -> None:
    with fake_server(no_stream) as server:
        assert discover(server.url).model == "fake" and discover(server.url).owner == "vllm"
    with pytest.raises(ServerError, match="does not answer"):
        discover("http://127.0.0.1:1")


def test_addresses() -> None:
    assert base_url("http://h:1/v1/") == base_url("http://h:1") == "http://h:1"
    assert base_url("https://h/prefix/v1") == "https://h/prefix"
    for wrong in ("", "h:1", "ftp://h", "http://", "http://[::1", "http://h/?a=1"):
        with pytest.raises(ValueError, match="an address such as"):
            base_url(wrong)


def test_the_row_of_a_closed_loop(clock: Clock) -> None:
    facts = {"server": "s", "version": "1", "kv_cache_dtype": "fp8", "context": 7, "gpu": "g", "versions": "v"}
    result = run(paced(clock), 2, Closed(2))
    row = serving_row(result, **facts)  # type: ignore[arg-type]
    assert list(row) == [
        "server", "version", "model", "kv_cache_dtype", "batch", "context", "ms_per_token", "ttft_ms", "gpu", "versions",
    ]  # fmt: skip
    assert row["batch"] == 2 and row["model"] == "fake"
    assert row["ms_per_token"] == figures(result).tpot.p50 and row["ttft_ms"] == figures(result).ttft.p50
    with pytest.raises(ValueError, match="closed loop without failures"):
        serving_row(run(http_500), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: Closed(0), lambda: Open(0), lambda: Open(-1), lambda: Open(math.nan)])
def test_loads_that_cannot_be(make: Any) -> None:
    with pytest.raises(ValueError, match="is needed"):
        make()


async def packed_wrongly(c: Connection) -> None:
    await c.raw(b"HTTP/1.1 500 x\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc")


async def strange_characters(c: Connection) -> None:
    await c.whole(b'{"error": {"message": "\\ud800 a \\u001b[31m"}}', 500)


@pytest.mark.parametrize(("handler", "kind"), [(packed_wrongly, "broken answer"), (strange_characters, "HTTP 500")])
def test_bodies_that_cannot_be_shown_are_failures_on_one_line(handler: Handler, kind: str) -> None:
    result = run(handler, 2)
    assert result.failures == {kind: 2} and all(answer.detail.isprintable() for answer in result.answers)


def test_the_list_of_models_has_a_time_as_a_whole() -> None:
    """One byte now and then would reset a time between two bytes."""
    over = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with contextlib.suppress(OSError), connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 500000\r\n\r\n")
            while not over.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        try:
            with pytest.raises(ServerError, match=r"within 0.4 s"):
                discover(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.4)
        finally:
            over.set()


def test_a_body_that_is_no_json_is_refused_before_it_is_sent() -> None:
    for wrong in ({"a": float("inf")}, {"a": "\ud800"}):
        with pytest.raises(ValueError, match="extra_body cannot be sent"):
            Endpoint("http://127.0.0.1:1", "m", extra=wrong)
    with pytest.raises(ValueError, match="model cannot be sent"):
        Endpoint("http://127.0.0.1:1", "\udcff")


def test_more_places_than_prompts() -> None:
    assert len(run(whole_answer, 2, Closed(10**12)).complete) == 2


def test_a_long_line_in_small_pieces_is_read_in_linear_time() -> None:
    reader, began = EventReader(), time.thread_time()
    for _ in range(8 << 10):
        assert reader.push(b"a" * (1 << 10)) == []
    assert reader.push(b"\ndata: x\n\n") == ["x"]
    assert time.thread_time() - began < 2.0, "8 MiB: quadratic would be 32 GiB of copies"
    with pytest.raises(ValueError, match="more than"):
        for _ in range(17):
            reader.push(b"a" * (1 << 20))


async def count_of_nothing(c: Connection) -> None:
    await c.whole({"choices": [{"text": "a"}], "usage": {"prompt_tokens": True, "completion_tokens": 10**300}})


async def choices_of_text(c: Connection) -> None:
    await c.whole({"choices": "a"})


def test_whole_answers_of_another_form() -> None:
    (answer,) = run(count_of_nothing, stream=False).complete
    assert answer.prompt_tokens is None and answer.output_tokens is None
    assert run(choices_of_text, stream=False).failures == {"broken answer": 1}
