"""The life of a server: warming, clients that leave, draining, what ends it."""

from __future__ import annotations

import gzip
import io
import json
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import MODEL, LiveServer, ServerProcess, live_server, make_engine, post, request, wait_until
from uncast.cli.main import main
from uncast.server.profiler import _compress
from uncast.server.state import Served, ServerConfig, ServerState

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "the latent", "max_tokens": 4000, "ignore_eos": True}
METRIC = re.compile(r"^(\w+(?:\{[^}]*\})?) ([-+.\deInfNa]+)$", re.M)


def metrics(url: str) -> dict[str, float]:
    response = request("GET", url + "/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {name: float(value) for name, value in METRIC.findall(response.text)}


def test_before_the_model_is_loaded_only_the_probes_answer(folder: Path) -> None:
    state = ServerState(ServerConfig(MODEL))
    live = LiveServer(state)
    try:
        assert request("GET", live.url + "/health").json() == {"status": "ok"}
        ready = request("GET", live.url + "/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "warming"})
        assert (
            request("GET", live.url + "/metrics").status_code
            == request("GET", live.url + "/openapi.json").status_code
            == 200
        )
        for response in (post(live.url + COMPLETE, LONG), request("GET", live.url + "/v1/models")):
            assert response.status_code == 503 and response.json()["error"]["code"] == "warming"
            assert response.headers["retry-after"]
        engine = make_engine(folder)
        engine.start()
        state.served = Served.of(engine)
        assert request("GET", live.url + "/ready").json() == {"status": "ready"}
        assert post(live.url + COMPLETE, {"prompt": "a"}).status_code == 200
    finally:
        live.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_failed_is_unhealthy_and_ends_open_answers(long_folder: Path) -> None:
    engine = make_engine(long_folder)
    with live_server(long_folder, engine) as live, httpx.Client(base_url=live.url, timeout=30) as client:
        with client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            engine.engine.step = _explode  # type: ignore[method-assign]
            rest = [line for line in lines if line]
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
    with socket.create_connection(live.url.removeprefix("http://").split(":")) as sock:  # type: ignore[arg-type]
        raw = json.dumps(body).encode()
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode())
        sock.sendall(f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_until(
            lambda: live.stats().running == 2 and live.stats().completion_tokens_total > before.completion_tokens_total
        )
    after = live.wait_idle()
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
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]  # type: ignore[arg-type]
        for sock in socks:
            sock.sendall(head.encode() + raw)
        wait_until(lambda: live.engine.active == 20)
        unfinished = stack.enter_context(socket.create_connection(address))  # type: ignore[arg-type]
        unfinished.sendall(head.encode() + raw[:10])
    after = live.wait_idle()
    assert after.requests_total == before.requests_total + 20 and after.waiting == 0


def test_many_clients_at_once_get_what_they_get_alone(live: LiveServer) -> None:
    bodies = [{"prompt": [7 + i] * (5 + 9 * i), "max_tokens": 20, "temperature": 0, "logprobs": 0} for i in range(12)]

    def logprobs(body: dict[str, Any]) -> list[float]:
        answer = post(live.url + COMPLETE, body)
        return list(answer.json()["choices"][0]["logprobs"]["token_logprobs"])

    alone = [logprobs(body) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(logprobs, bodies))
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
            post(live.url + COMPLETE, {"prompt": "a", "max_tokens": 8})
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


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(long_folder: Path) -> None:
    body = {"prompt": "the latent", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    options = ("--grace-seconds", "60", "--max-running", "8", "--kv-pool-tokens", "4096")
    with ServerProcess(long_folder, *options) as server, ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(post, server.url + COMPLETE, body) for _ in range(3)]
        streams = [pool.submit(_stream, server.url, body) for _ in range(3)]
        wait_until(lambda: metrics(server.url)["uncast_requests_running"] == 6)
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get("/ready").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503)
            assert client.get("/ready").json() == {"status": "draining"} and client.get("/health").status_code == 200
            refused = post(server.url + COMPLETE, body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        answers = [future.result() for future in whole]
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [150] * 3
        assert [future.result()[-1] for future in streams] == ["data: [DONE]"] * 3
        assert not any('"error"' in line for future in streams for line in future.result())
        assert server.wait() == 0
        assert "Traceback" not in server.output and "6 running requests have 60 s" in server.output


def _stream(url: str, body: dict[str, Any]) -> list[str]:
    with httpx.stream("POST", url + COMPLETE, json={**body, "stream": True}, timeout=60) as response:
        return [line for line in response.iter_lines() if line]


def test_a_signal_while_the_model_is_loaded_ends_in_order(folder: Path) -> None:
    with ServerProcess(folder, wait_ready=False) as server:
        wait_until(lambda: request("GET", server.url + "/health").status_code == 200)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and "Traceback" not in server.output


def test_after_the_grace_time_requests_are_aborted(long_folder: Path) -> None:
    with (
        ServerProcess(long_folder, "--grace-seconds", "0.3", "--api-key", "k") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        headers = {"Authorization": "Bearer k"}
        whole = pool.submit(post, server.url + COMPLETE, LONG, headers=headers)
        wait_until(lambda: metrics(server.url)["uncast_requests_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        answer = whole.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted"
        assert server.wait() == 1
        assert "1 requests did not finish in 0.3 s and were aborted" in server.output
        assert "Traceback" not in server.output


def test_a_second_signal_stops_at_once_and_a_taken_port_is_one_sentence(long_folder: Path) -> None:
    with ServerProcess(long_folder, "--grace-seconds", "600") as server:
        port = server.url.rpartition(":")[2]
        code, errors = serve_here(long_folder, "--port", port)
        assert code == 1 and errors == f"uncast: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
        reader = threading.Thread(target=_ignore_errors, args=(server.url,), daemon=True)
        reader.start()
        wait_until(lambda: metrics(server.url)["uncast_requests_running"] == 1)
        server.process.send_signal(signal.SIGINT)
        server.line("(shutting down): 1 running")
        server.process.send_signal(signal.SIGINT)
        assert server.wait(5) == 128 + signal.SIGINT
        assert "stopped at once" in server.output and "Traceback" not in server.output


def _ignore_errors(url: str) -> None:
    with pytest.raises(httpx.HTTPError):
        _stream(url, LONG)


def serve_here(folder: Path, *options: str) -> tuple[int, str]:
    """The exit code and stderr of `uncast serve` in this process, with options that cannot work."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = main(["serve", "--model", str(folder), "--port", "0", *options])
    return code, errors.getvalue()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--model", "/nowhere"], 2, "/nowhere is not a folder with a model in it"),
        (["--port", "70000"], 2, "port is 70000: allowed are 0 to 65535"),
        (["--host", "256.1.1.1"], 1, "cannot listen on 256.1.1.1 port 0"),
        (["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1 port 0"),
        (["--profile-dir", "/proc/traces"], 1, "cannot write to /proc/traces"),
        (["--max-queue", "0"], 2, "max_queue is 0: at least 1 is needed"),
        (["--max-running", "0"], 2, "max_running is 0: at least 1 is needed"),
        (["--max-body-bytes", "0"], 2, "max_body_bytes is 0: at least 1 is needed"),
        (["--grace-seconds", "-1"], 2, "grace_seconds is -1.0: allowed is 0 or more"),
        (["--grace-seconds", "nan"], 2, "grace_seconds is nan: allowed is 0 or more"),
        (["--api-key", ""], 2, "the API key must be printable ASCII and not empty"),
        (["--kv-pool-tokens", "0"], 2, "kv_pool_tokens is 0: at least 1 is needed"),
        (["--kv-pool-tokens", "99999999999999"], 2, "KV pool"),
        (["--page-size", "3"], 2, "page_size is 3: allowed are powers of two"),
        (["--attention-backend", "fast"], 2, "unknown attention backend 'fast'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_sentence(folder: Path, options: list[str], code: int, sentence: str) -> None:
    found, errors = serve_here(folder, *options)
    assert found == code
    assert sentence in errors and errors.count("\n") == 1 and errors.startswith("uncast: ")


def test_the_key_and_the_defaults_come_from_the_environment_and_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uncast.cli import serve as command

    seen: list[ServerConfig] = []

    async def record(state: ServerState, sock: socket.socket, load: Any, say: Any) -> int:
        seen.append(state.config)
        sock.close()
        return 0

    monkeypatch.setattr(command, "serve", record)
    monkeypatch.setenv("UNCAST_API_KEY", "from the environment")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    (tmp_path / "generation_config.json").write_text(json.dumps(sampled))
    assert main(["serve", "--model", str(tmp_path), "--port", "0"]) == 0
    assert main(["serve", "--model", str(folder), "--port", "0", "--api-key", "given"]) == 0
    assert seen[0].api_key == "from the environment" and seen[1].api_key == "given"
    assert seen[0].sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    assert seen[1].sampling_defaults == {} and seen[1].model_name == folder.name
