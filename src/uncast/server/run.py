"""A server's life: take an address, load and warm up, open the port, serve, and on SIGTERM or SIGINT drain and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from typing import NoReturn

import uvicorn

from uncast.engine.async_engine import AsyncEngine
from uncast.server.app import create_app
from uncast.server.drain import drain
from uncast.server.errors import ApiError
from uncast.server.start import StartClock
from uncast.server.state import Served, ServerConfig, ServerState

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSE_S = 5
_KEEP_ALIVE_S = 30
_BACKLOG = 1024


class ListenError(OSError):
    """The address cannot be listened on; one sentence."""


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, on which nobody listens yet: who connects is refused. Port 0 takes a free one.

    Raises:
        ListenError: the port is taken, not allowed, or the host has no such address.
    """
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise _listen_error(host, port, error) from None
    sock.setblocking(False)
    return sock


def _listen_error(host: str, port: int, error: Exception) -> ListenError:
    return ListenError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}")


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `serve`, which must finish running requests before the listener closes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def run(
    config: ServerConfig,
    sock: socket.socket,
    load: Callable[[], AsyncEngine],
    say: Callable[[str], None],
    clock: StartClock,
) -> int:
    """Loads in a thread, then serves on `sock`; see `serve`. A signal before that ends the process with 0.

    Args:
        load: gives an engine that is warmed up and not started; marks its phases on the clock.

    Raises:
        Whatever `load` raises. ListenError: another process listens at the address by now.
    """
    signalled = _watch_signals(say)
    loading = asyncio.create_task(_in_thread(load))
    await _first_of(loading, asyncio.create_task(signalled.wait()))
    if not loading.done():
        _exit_now(0)  # the interpreter cannot end in order while a thread still loads tensors
    engine = loading.result()
    return await serve(ServerState(config, Served.of(engine, config), clock), sock, say, signalled)


async def serve(
    state: ServerState, sock: socket.socket, say: Callable[[str], None], signalled: asyncio.Event | None = None
) -> int:
    """Starts the engine, opens the port and serves until a signal.

    The first signal drains (see `uncast.server.drain`): new requests get 503, running ones and their answers have
    `state.config.grace_s` seconds, then they are ended. A second one ends the process at once.

    Args:
        signalled: set by the first signal; None watches signals from here on.

    Returns:
        The exit code: 0, or 1 if the drain had to end something.

    Raises:
        ListenError: another process listens at the address by now.
    """
    signalled = _watch_signals(say) if signalled is None else signalled
    server = _Uvicorn(
        uvicorn.Config(
            create_app(state),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _listen_error(host, port, error) from None
    engine = state.served.engine
    engine.start()
    http = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        if state.start.seconds:
            say(state.start.describe())
        say(f"ready: {_describe(state, url_of(sock))}")
        await signalled.wait()
        code = await drain(state, server, say)
    finally:
        server.should_exit = True
        await http
        await engine.stop()
    try:
        await asyncio.to_thread(state.profiler.close)
    except ApiError as error:
        say(error.message)
    return code


async def _in_thread(load: Callable[[], AsyncEngine]) -> AsyncEngine:
    """Loads in a daemon thread: an exit need not wait for it."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[AsyncEngine] = loop.create_future()

    def finish(engine: AsyncEngine | None, error: BaseException | None) -> None:
        if loaded.done():
            return
        if engine is not None:
            loaded.set_result(engine)
        elif error is not None:
            loaded.set_exception(error)

    def work() -> None:
        engine, failure = None, None
        try:
            engine = load()
        except BaseException as error:  # raised again by `run`
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ended meanwhile
            loop.call_soon_threadsafe(finish, engine, failure)

    threading.Thread(target=work, name="uncast-load", daemon=True).start()
    return await loaded


def _watch_signals(say: Callable[[str], None]) -> asyncio.Event:
    """An event that the first signal sets; the second one ends the process."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if signalled.is_set():
            say("stopped at once by a second signal")
            _exit_now(128 + number)
        signalled.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    return signalled


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _first_of(*tasks: asyncio.Task[object]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _describe(state: ServerState, url: str) -> str:
    served, runner = state.served, state.served.engine.engine.runner
    return (
        f"{state.config.model_name} on {url}, context {served.context:,}, KV pool of {served.pool_rows:,} tokens in "
        f"{runner.pool.layout.name}, attention {runner.attention_backend}"
    )
