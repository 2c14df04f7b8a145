"""Profiling a running server, against servers that answer as SGLang, vLLM and uncast do; live tokens from metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.synthetic import decode
from uncast.doctor import http, live
from uncast.doctor.errors import LiveError
from uncast.doctor.metrics import live_tokens, parse_live_tokens

SGLANG = (
    '# HELP x\nsglang:num_used_tokens{model_name="m"} 3000.0\nsglang:num_used_tokens{model_name="m",dp="1"} 1096.0\n'
)
VLLM = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",x="a\\"b"} 1.0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} NaN\n'
)


class FakeServer:
    """Answers /v1/models, /start_profile, /stop_profile, /v1/completions and /metrics; remembers what it was asked."""

    def __init__(self, kind: str, folder: Path, *, enabled: bool = True) -> None:
        self.kind, self.folder, self.enabled = kind, folder, enabled
        self.asked: list[tuple[str, Any]] = []

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((path, body))
        if path == "/v1/models":
            return 200, {"data": [{"id": "glm", "owned_by": self.kind}]}
        if path == "/metrics":
            return 200, SGLANG
        if path == "/start_profile":
            if not self.enabled:
                return (409, {"error": {"code": "no_profile_dir"}}) if self.kind == "uncast" else (404, "Not Found")
            if self.kind == "sglang":
                threading.Timer(0.2, self.write, [Path(body["output_dir"])]).start()
            return 200, {"status": "started"}
        if path == "/stop_profile":
            return 200, {"path": str(self.write(self.folder))}
        return 200, {"choices": [{"text": "x"}]}

    def write(self, folder: Path) -> Path:
        """The trace appears whole, however long its writer is held up."""
        whole = decode(layers=6, cast_us=500.0).write(folder / "unfinished.gz")
        return whole.rename(folder / "1-TP-0.trace.json.gz")


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length)
            status, body = fake.answer(self.path, json.loads(data) if data else None)
            payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def quick_and_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SETTLE_S", 0.1)
    monkeypatch.setattr(http, "TIMEOUT_S", 600.0)
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize("kind", ["sglang", "vllm", "uncast"])
def test_each_server_is_profiled_and_diagnosed(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from uncast.cli.main import main

    fake = FakeServer(kind, tmp_path)
    with serving(fake) as url:
        folder = [] if kind == "uncast" else ["--profile-dir", str(tmp_path)]
        assert main(["doctor", "--url", url, "--steps", "5", "--json", *folder]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["kind"] == "pool_cast"
    asked = dict(fake.asked)
    assert asked["/v1/completions"]["max_tokens"] >= 5
    if kind == "sglang":
        assert asked["/start_profile"].items() >= {
            "num_steps": 5, "record_shapes": True, "with_stack": True, "output_dir": str(tmp_path)
        }.items()  # fmt: skip
    else:
        assert asked["/start_profile"] is None and "/stop_profile" in asked


@pytest.mark.parametrize(("kind", "flag"), [("vllm", "--profiler-config"), ("uncast", "--profile-dir")])
def test_a_server_without_profiling_gets_the_flags(kind: str, flag: str, tmp_path: Path) -> None:
    sentence = f"was started without profiling: .*{flag}"
    with serving(FakeServer(kind, tmp_path, enabled=False)) as url, pytest.raises(LiveError, match=sentence):
        live.profile(live.Request(url, profile_dir=tmp_path), lambda text: None)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_folder_is_asked_for(kind: str, tmp_path: Path) -> None:
    with (
        serving(FakeServer(kind, tmp_path)) as url,
        pytest.raises(LiveError, match=r"profile-dir|folder it was started with"),
    ):
        live.profile(live.Request(url), lambda text: None)


def test_profiles_without_stacks(tmp_path: Path) -> None:
    fake = FakeServer("sglang", tmp_path)
    with serving(fake) as url:
        live.profile(live.Request(url, profile_dir=tmp_path, stacks=False), lambda text: None)
    assert dict(fake.asked)["/start_profile"]["with_stack"] is False
    with (
        serving(FakeServer("vllm", tmp_path)) as url,
        pytest.raises(LiveError, match='"torch_profiler_with_stack": false'),
    ):
        live.profile(live.Request(url, profile_dir=tmp_path, stacks=False), lambda text: None)


def test_no_load(tmp_path: Path) -> None:
    fake = FakeServer("uncast", tmp_path)
    with serving(fake) as url:
        live.profile(live.Request(url, load=False), lambda text: None)
    assert "/v1/completions" not in dict(fake.asked)


def test_other_servers_and_folders_that_stay_empty(tmp_path: Path) -> None:
    with serving(FakeServer("somebody", tmp_path)) as url, pytest.raises(LiveError, match="a server of somebody"):
        live.identify(url)
    fake = FakeServer("sglang", tmp_path)
    fake.write = lambda folder: folder  # type: ignore[method-assign]
    with serving(fake) as url, pytest.raises(LiveError, match="no trace appeared"):
        live.profile(live.Request(url, profile_dir=tmp_path, wait_s=0.5), lambda text: None)


def test_live_tokens_from_metrics(tmp_path: Path) -> None:
    with serving(FakeServer("sglang", tmp_path)) as url:
        assert live_tokens(url) == live_tokens(url + "/metrics") == 4096
    assert parse_live_tokens(VLLM, "here") == 4000
    with pytest.raises(LiveError, match="tells no live tokens"):
        parse_live_tokens("python_info 1\n", "here")
