"""SIGTERM while clients read their answers slowly or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.live import LIMIT_S, MODEL, make_engine, post, wait_until
from uncast.server import drain
from uncast.server.run import bind, serve, url_of
from uncast.server.state import Served, ServerConfig, ServerState

BODY = {"prompt": "the latent", "max_tokens": 300, "ignore_eos": True, "logprobs": 5, "n": 2, "seed": 1}


class SlowClient:
    """Sends one request over a connection with small buffers, and reads only when told to."""

    def __init__(self, address: tuple[str, int], body: dict[str, object]) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(address)
        raw = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
        )
        self.socket.sendall(head.encode() + b"\r\n\r\n" + raw)

    def wait_answer(self) -> None:
        """Waits until an answer has begun to arrive, and reads nothing of it."""
        assert self.socket.recv(1, socket.MSG_PEEK)

    def read_all(self) -> str:
        parts = []
        while part := self.socket.recv(1 << 16):
            parts.append(part)
        return b"".join(parts).decode(errors="replace")  # an answer that is cut off may end within a character


def serve_while(
    state: ServerState, sock: socket.socket, said: list[str], act: Callable[[Callable[[], None]], None]
) -> int:
    """The exit code of `serve`. From "ready" on `act` runs in a thread; it is given what sends the one signal. Its error ends
    the server and is raised here."""
    sent, over = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def terminate() -> None:
        assert not sent.is_set(), "a second signal would end the process"
        sent.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def run() -> None:
        try:
            wait_until(lambda: over.is_set() or any("ready" in line for line in said))
            act(terminate)
        except BaseException as error:
            errors.append(error)
        finally:
            if not sent.is_set() and not over.is_set():
                terminate()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        code = asyncio.run(serve(state, sock, said.append))
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
    return code


def drained(
    folder: Path, *, stream: bool, grace_s: float, read_on: str | None, capfd: pytest.CaptureFixture[str]
) -> tuple[int, list[str], str]:
    """Exit code, what the server said, and what the client got. The signal comes when the text is complete in the engine and
    the client has read nothing; the client reads on when the server says `read_on` (None: after the end)."""
    sock = bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    address = sock.getsockname()
    said: list[str] = []
    got: list[str] = []
    state = ServerState(ServerConfig(MODEL, grace_s=grace_s), Served.of(make_engine(folder)))

    def act(terminate: Callable[[], None]) -> None:
        client = SlowClient(address, {**BODY, "stream": stream})
        engine = state.served.engine
        wait_until(lambda: engine.stats().finished_total["length"] == 2 and engine.active == 0)
        client.wait_answer()
        terminate()
        if read_on == "expired":
            wait_until(state.expired.is_set)
        elif read_on == "draining":
            wait_until(lambda: state.draining)
        else:
            wait_until(lambda: any("cut off" in line for line in said))
        got.append(client.read_all())

    code = serve_while(state, sock, said, act)
    logged = capfd.readouterr().err
    assert "Traceback" not in logged and "CancelledError" not in logged
    return code, said, got[0]


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_a_slow_reader_gets_its_whole_answer_within_the_grace_time(
    long_folder: Path, stream: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said, got = drained(long_folder, stream=stream, grace_s=600, read_on="draining", capfd=capfd)
    assert code == 0 and len([line for line in said if "answers" in line]) == 0
    assert '"error"' not in got and got.count('"length"') == 2
    assert ("data: [DONE]" in got) == stream


def test_after_the_grace_time_a_slow_stream_ends_with_an_error_event(
    long_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "FLUSH_S", 600.0)
    code, said, got = drained(long_folder, stream=True, grace_s=0.5, read_on="expired", capfd=capfd)
    assert code == 1 and "1 answers were not complete and read by their clients in 0.5 s" in said
    assert not any("cut off" in line for line in said)
    events = [line.removeprefix("data: ") for line in got.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "aborted"
    assert all(json.loads(event) for event in events[:-1]) and sum('"error"' in event for event in events) == 1


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_a_client_that_reads_nothing_is_cut_off_and_the_exit_code_says_so(
    long_folder: Path, stream: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "FLUSH_S", 0.3)
    code, said, got = drained(long_folder, stream=stream, grace_s=0.3, read_on=None, capfd=capfd)
    assert code == 1 and any(line.startswith("1 answers were cut off") for line in said)
    assert got.startswith("HTTP/1.1 200") and "[DONE]" not in got


def test_a_body_that_is_still_arriving_is_refused_at_once(long_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    said: list[str] = []
    got: list[bytes] = []
    state = ServerState(ServerConfig(MODEL, grace_s=600), Served.of(make_engine(long_folder)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"

    def act(terminate: Callable[[], None]) -> None:
        with socket.create_connection(address, timeout=LIMIT_S) as client:
            client.sendall(head.encode())
            got.append(client.recv(100))
            client.sendall(b'{"prompt": ')
            terminate()
            while part := client.recv(1 << 16):
                got.append(part)

    assert serve_while(state, sock, said, act) == 0
    assert got[0].startswith(b"HTTP/1.1 100")
    assert b"".join(got[1:]).startswith(b"HTTP/1.1 503") and b'"code":"draining"' in b"".join(got)
    assert "Traceback" not in capfd.readouterr().err and not any("cut off" in line for line in said)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_failed_is_an_exit_code(long_folder: Path) -> None:
    sock = bind("127.0.0.1", 0)
    url, said = url_of(sock), list[str]()
    state = ServerState(ServerConfig(MODEL), Served.of(make_engine(long_folder)))

    def explode() -> None:
        raise RuntimeError("boom")

    def act(terminate: Callable[[], None]) -> None:
        state.served.engine.engine.step = explode  # type: ignore[method-assign,assignment]
        assert post(url + "/v1/completions", BODY).status_code == 503
        terminate()

    assert serve_while(state, sock, said, act) == 1
    assert "the engine failed: RuntimeError: boom" in said
