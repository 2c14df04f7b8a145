"""`uncast serve` as a process: signals under load, and what it says when it cannot work."""

from __future__ import annotations

import io
import json
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import LIMIT_S, ServerProcess, metrics, post, wait_until
from uncast.cli.main import main
from uncast.server.state import ServerConfig

COMPLETE = "/v1/completions"
LONG = {"prompt": "the latent", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Where a server's steps are held by a file."""
    return tmp_path / "gate"


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(long_folder: Path, gate: Path) -> None:
    body = {"prompt": "the latent", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    options = ("--grace-seconds", "600", "--max-running", "8", "--kv-pool-tokens", "4096")
    with ServerProcess(long_folder, *options, gate=gate) as server, ThreadPoolExecutor(8) as pool:
        server.hold(6)
        whole = [pool.submit(post, server.url + COMPLETE, body) for _ in range(3)]
        streams = [pool.submit(_stream, server.url, body) for _ in range(3)]
        wait_until(lambda: metrics(server.url)["uncast_requests_running"] == 6)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            assert client.get("/ready").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503)
            assert client.get("/ready").json() == {"status": "draining"} and client.get("/health").status_code == 200
            refused = post(server.url + COMPLETE, body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        server.release()
        answers = [future.result() for future in whole]
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [150] * 3
        assert [future.result()[-1] for future in streams] == ["data: [DONE]"] * 3
        assert not any('"error"' in line for future in streams for line in future.result())
        assert server.wait() == 0
        assert "Traceback" not in server.output and "6 running requests have 600 s" in server.output


@pytest.mark.parametrize(("options", "steps"), [((), 1), (("--max-step-tokens", "16", "--max-running", "8"), 3)])
def test_long_prompts_take_as_many_steps_as_the_option_says(
    long_folder: Path, options: tuple[str, ...], steps: int
) -> None:
    with ServerProcess(long_folder, *options) as server:
        before = metrics(server.url)["uncast_steps_total"]
        answer = post(server.url + COMPLETE, {"prompt": list(range(5, 45)), "max_tokens": 1, "ignore_eos": True})
        assert answer.json()["usage"]["prompt_tokens"] == 40
        assert metrics(server.url)["uncast_steps_total"] - before == steps


def _stream(url: str, body: dict[str, Any]) -> list[str]:
    with httpx.stream("POST", url + COMPLETE, json={**body, "stream": True}, timeout=LIMIT_S) as response:
        return [line for line in response.iter_lines() if line]


def test_after_the_grace_time_requests_are_aborted(long_folder: Path, gate: Path) -> None:
    options = ("--grace-seconds", "0.3", "--api-key", "k")
    with ServerProcess(long_folder, *options, gate=gate) as server, ThreadPoolExecutor(2) as pool:
        server.hold(1)
        headers = {"Authorization": "Bearer k"}
        whole = pool.submit(post, server.url + COMPLETE, LONG, headers=headers)
        wait_until(lambda: metrics(server.url)["uncast_requests_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        answer = whole.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted"
        assert server.wait() == 1
        assert "1 requests did not finish in 0.3 s and were aborted" in server.output
        assert "Traceback" not in server.output


def test_a_second_signal_stops_at_once_and_a_taken_port_is_one_sentence(long_folder: Path, gate: Path) -> None:
    with ServerProcess(long_folder, "--grace-seconds", "600", gate=gate) as server:
        server.hold(1)
        port = server.url.rpartition(":")[2]
        code, errors = serve_here(long_folder, "--port", port)
        assert code == 1 and errors == f"uncast: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
        reader = threading.Thread(target=_ignore_errors, args=(server.url,), daemon=True)
        reader.start()
        wait_until(lambda: metrics(server.url)["uncast_requests_running"] == 1)
        server.process.send_signal(signal.SIGINT)
        server.line("(shutting down): 1 running")
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
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
        (["--host", "a..b"], 1, "cannot listen on a..b port 0"),
        (["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1 port 0"),
        (["--profile-dir", "/proc/traces"], 1, "cannot write to /proc/traces"),
        (["--max-queue", "0"], 2, "max_queue is 0: at least 1 is needed"),
        (["--max-running", "0"], 2, "max_running is 0: at least 1 is needed"),
        (["--max-step-tokens", "63"], 2, "max_step_tokens is 63: it must be at least max_running, 64"),
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


def test_a_host_without_an_address_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, port: int, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    code, errors = serve_here(folder, "--host", "nowhere")
    assert code == 1 and errors == "uncast: cannot listen on nowhere port 0: Name or service not known\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--page-size", "3"], "page_size is 3"),
        (["--page-size", "256"], "page_size is 256"),
        (["--kv-pool-tokens", "0"], "kv_pool_tokens is 0"),
        (["--attention-backend", "fast"], "unknown attention backend"),
        (["--attention-backend", "pool_cast:fast"], "'fast' is none of them"),
        (["--max-running", "0"], "max_running is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_are_checked_before_anything_listens(
    folder: Path, options: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uncast.cli import serve as command

    listened: list[str] = []
    monkeypatch.setattr(command, "bind", lambda host, port: listened.append(host))
    code, errors = serve_here(folder, *options)
    assert code == 2 and sentence in errors and errors.count("\n") == 1 and not listened


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    assert "example: uncast serve" in capsys.readouterr().out


@pytest.mark.parametrize(("missing", "hint"), [("uvicorn", "uncast[torch,server]"), ("torch", "uncast[torch]")])
def test_a_missing_extra_is_named(
    missing: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("uncast.cli.serve", "uncast.server"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["serve"]) == 1
    errors = capsys.readouterr().err
    assert hint in errors and errors.count("\n") == 1


def test_the_key_and_the_defaults_come_from_the_environment_and_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uncast.cli import serve as command

    seen: list[ServerConfig] = []

    async def record(config: ServerConfig, sock: socket.socket, load: Any, say: Any, clock: Any) -> int:
        seen.append(config)
        sock.close()
        return 0

    monkeypatch.setattr(command, "run_server", record)
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


def test_a_broken_model_or_setting_ends_the_start_with_one_sentence(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    own = tmp_path / "own"
    shutil.copytree(folder, own)

    def start(*options: str) -> tuple[int, str]:
        code = main(["serve", "--model", str(own), "--port", "0", *options])
        return code, capfd.readouterr().err

    code, err = start("--kv-pool-tokens", "1" + "0" * 15)
    assert code == 2 and "tokens does not fit into memory" in err and err.count("\n") == 1
    (own / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 0}))
    code, err = start()
    assert code == 2 and "top_p = 0: a positive number up to 1 is needed" in err and err.count("\n") == 1
    (own / "generation_config.json").unlink()
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, own / "model.safetensors")
    code, err = start("--kv-pool-tokens", "256")
    assert code == 1 and err.startswith("uncast: warm-up: a prompt of ") and err.count("\n") == 1
    assert "failed: the model's logits are not finite" in err
