"""The life of a server: clients that leave, a failed engine, metrics, profiles."""

from __future__ import annotations

import gzip
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.hold import at, hold
from tests.server.live import LIMIT_S, LiveServer, live_server, make_engine, metrics, post, request, wait_until
from uncast.server.profiler import _compress

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "the latent", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_failed_is_unhealthy_and_ends_open_answers(long_folder: Path) -> None:
    engine = make_engine(long_folder)
    with live_server(long_folder, engine) as live, httpx.Client(base_url=live.url, timeout=LIMIT_S) as client:
        held = hold(engine.engine, lambda: at(engine.engine, 1))
        with held, client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as stream:
            wait_until(lambda: live.stats().running == 1)
            engine.engine.step = _explode  # type: ignore[method-assign]
            rest = [line for line in stream.iter_lines() if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert rest[-1] == "data: [DONE]"
        assert client.get("/health").status_code == client.get("/ready").status_code == 503
        response = client.post(COMPLETE, json=LONG)
        assert response.status_code == 503 and "RuntimeError: boom" in response.json()["error"]["message"]


def _explode() -> Any:
    raise RuntimeError("boom")


@pytest.fixture(scope="module")
def live(long_folder: Path) -> Any:
    with live_server(long_folder, make_engine(long_folder, max_running=8)) as live:
        yield live


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_a_client_that_leaves_frees_its_pages(live: LiveServer, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "stream": stream, "n": 2}
    body |= {"prompt": "the latent"} if path == COMPLETE else {"messages": [{"role": "user", "content": "a"}]}
    before = live.wait_idle()
    gone = f'uncast_http_responses_total{{route="{path}",status="499"}}'
    gone_before = metrics(live.url).get(gone, 0)
    held = hold(live.engine.engine, lambda: at(live.engine.engine, 2))
    with held, socket.create_connection(live.url.removeprefix("http://").split(":")) as sock:  # type: ignore[arg-type]
        raw = json.dumps(body).encode()
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode())
        sock.sendall(f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_until(lambda: live.stats().completion_tokens_total == before.completion_tokens_total + 2)
        sock.close()
        after = live.wait_idle()
    assert after.completion_tokens_total == before.completion_tokens_total + 2
    assert after.finished_total["abort"] == before.finished_total["abort"] + 2
    if not stream:
        wait_until(lambda: metrics(live.url).get(gone, 0) == gone_before + 1)


def test_a_client_that_leaves_while_it_waits_or_sends_costs_nothing(live: LiveServer) -> None:
    address = live.url.removeprefix("http://").split(":")
    before = live.wait_idle()
    raw = json.dumps({**LONG, "max_tokens": 300}).encode()
    head = (
        f"POST {COMPLETE} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with ExitStack() as stack, hold(live.engine.engine, lambda: at(live.engine.engine, 8)):
        socks = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]  # type: ignore[arg-type]
        for sock in socks:
            sock.sendall(head.encode() + raw)
        wait_until(lambda: live.engine.active == 20 and live.stats().running == 8)
        unfinished = stack.enter_context(socket.create_connection(address))  # type: ignore[arg-type]
        unfinished.sendall(head.encode() + raw[:10])
        stack.close()
        after = live.wait_idle()
    assert after.requests_total == before.requests_total + 20 and after.waiting == 0


def test_many_clients_at_once_get_what_they_get_alone(live: LiveServer) -> None:
    """The tokens are given by a bias, the log-probabilities are the model's own: rounding, which goes with the batch and the
    processor, moves them by about 1e-5 and chooses nothing."""
    bodies: list[dict[str, Any]] = [
        {"prompt": [(7 + i + 3 * j) % 282 for j in range(5 + 9 * i)], "logit_bias": {str(100 + i): 100}}
        for i in range(12)
    ]
    bodies = [{**body, "max_tokens": 20, "temperature": 0, "logprobs": 0, "ignore_eos": True} for body in bodies]

    def logprobs(body: dict[str, Any]) -> list[float]:
        answer = post(live.url + COMPLETE, body)
        return list(answer.json()["choices"][0]["logprobs"]["token_logprobs"])

    alone = [logprobs(body) for body in bodies]
    before = live.stats()
    wanted = before.requests_total + len(bodies)
    held = hold(live.engine.engine, lambda: live.stats().requests_total < wanted)
    with held, ThreadPoolExecutor(12) as pool:
        together = list(pool.map(logprobs, bodies))
    assert live.stats().steps_total < before.steps_total + 120, "one after the other takes 240 steps"
    for one, other in zip(alone, together, strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    live.wait_idle()


def test_metrics_tell_what_happened(live: LiveServer) -> None:
    live.wait_idle()
    before = metrics(live.url)
    prompt = "is read as it is stored, said the cache " * 10
    for _ in range(2):
        usage = post(live.url + COMPLETE, {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}).json()["usage"]
    live.wait_idle()
    after = metrics(live.url)
    gain = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gain["uncast_requests_total"] == gain['uncast_requests_finished_total{reason="length"}'] == 2
    assert gain["uncast_completion_tokens_total"] == 10
    assert gain["uncast_prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert gain["uncast_prefix_hit_tokens_total"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert gain["uncast_kv_cache_bytes_needed_total"] == gain["uncast_kv_cache_bytes_read_total"] > 0
    assert gain["uncast_kv_cache_copy_bytes_written_total"] == 0
    assert gain["uncast_time_to_first_token_seconds_count"] == gain["uncast_request_seconds_count"] == 2
    assert gain["uncast_inter_token_latency_seconds_count"] == 8
    assert gain['uncast_http_responses_total{route="/v1/completions",status="200"}'] == 2
    assert after["uncast_kv_pool_pages"] == 256 and after["uncast_kv_pool_use"] == 0
    assert after["uncast_requests_waiting"] == after["uncast_requests_running"] == 0
    for name in (
        "preemptions_total",
        "swap_bytes_total",
        "step_seconds_total",
        "kv_pool_pages_free",
        "requests_swapped",
    ):
        assert f"uncast_{name}" in after


def test_a_profile_is_a_trace_of_the_steps(folder: Path, tmp_path: Path) -> None:
    with live_server(folder, profile_dir=tmp_path) as live:
        paths = set()
        for _ in range(2):
            path = Path(request("POST", live.url + "/start_profile").json()["path"])
            again = request("POST", live.url + "/start_profile")
            assert again.status_code == 409 and str(path) in again.json()["error"]["message"]
            post(live.url + COMPLETE, {"prompt": "a", "max_tokens": 8, "ignore_eos": True})
            stopped = request("POST", live.url + "/stop_profile")
            assert stopped.json() == {"status": "written", "path": str(path)}
            assert request("POST", live.url + "/stop_profile").status_code == 409
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            assert sum(event.get("name") == "aten::linear" for event in events) > 8
            paths.add(path)
        assert len(paths) == 2
        open_at_the_end = Path(request("POST", live.url + "/start_profile").json()["path"])
        live.state.profiler.close()
        assert {*paths, open_at_the_end} == set(tmp_path.iterdir())
        for path in (*paths, open_at_the_end):
            path.unlink()
        request("POST", live.url + "/start_profile")
        tmp_path.rmdir()
        lost = request("POST", live.url + "/stop_profile")
        assert lost.status_code == 500 and "cannot be written" in lost.json()["error"]["message"]
        assert post(live.url + COMPLETE, {"prompt": "a"}).status_code == 200


def test_a_trace_without_its_end_is_not_kept(tmp_path: Path) -> None:
    """Kineto writes as much as the disk takes and reports nothing."""
    (tmp_path / "plain").write_text('{"traceEvents": [{"name": "aten::li')
    with pytest.raises(OSError, match="its end is missing; is the disk full"):
        _compress(tmp_path / "plain", tmp_path / "trace.gz")
    assert not (tmp_path / "trace.gz").exists()
