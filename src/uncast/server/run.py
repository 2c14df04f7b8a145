"""A server's life: listen, load and warm up, serve, and on SIGTERM or SIGINT drain and end."""

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
from uncast.engine.request import GenerationError, Request
from uncast.server.app import create_app
from uncast.server.drain import drain
from uncast.server.errors import ApiError
from uncast.server.state import Served, ServerState

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSE_S = 5
_KEEP_ALIVE_S = 30


class ListenError(OSError):
    """The address cannot be listened on; one sentence."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ListenError: the port is taken, not allowed, or the host has no such address.
    """
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except (OSError, UnicodeError, OverflowError) as error:
        if sock is not None:
            sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"cannot listen on {host} port {port}: {reason}") from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `serve`, which must finish running requests before the listener closes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    state: ServerState, sock: socket.socket, load: Callable[[], AsyncEngine], say: Callable[[str], None]
) -> int:
    """Serves on `sock` until a signal. `load` makes the engine in a thread, while /ready says "warming".

    The first signal drains (see `uncast.server.drain`): new requests get 503, running ones and their answers have
    `state.config.grace_s` seconds, then they are ended. A second one ends the process at once.

    A signal before the model is loaded ends the process with 0.

    Returns:
        The exit code: 0, or 1 if the drain had to end something.

    Raises:
        Whatever `load` raises.
    """
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
    signalled = _watch_signals(say)
    http = asyncio.create_task(server.serve(sockets=[sock]))
    code = 0
    try:
        loading = asyncio.create_task(_warm_up(state, load))
        await _first_of(loading, asyncio.create_task(signalled.wait()))
        if loading.done():
            loading.result()
            say(f"ready: {_describe(state)}")
            await signalled.wait()
        code = await drain(state, server, say)
    finally:
        server.should_exit = True
        await http
        if state.served is not None:
            await state.served.engine.stop()
    try:
        await asyncio.to_thread(state.profiler.close)
    except ApiError as error:
        say(error.message)
    if state.served is None:
        _exit_now(code)  # the interpreter cannot end in order while a thread still loads tensors
    return code


async def _warm_up(state: ServerState, load: Callable[[], AsyncEngine]) -> None:
    """Loads in a daemon thread (an exit need not wait for it) and runs a first short request."""
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
        except BaseException as error:  # raised again by `serve`
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ended meanwhile
            loop.call_soon_threadsafe(finish, engine, failure)

    threading.Thread(target=work, name="uncast-load", daemon=True).start()
    engine = await loaded
    engine.start()
    served = Served.of(engine, state.config)
    async for output in engine.submit(Request(prompt=[0], max_tokens=min(2, served.max_total - 1), ignore_eos=True)):
        if output.error is not None:
            raise GenerationError(output.error)
    state.served = served


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


def _describe(state: ServerState) -> str:
    assert state.served is not None
    runner = state.served.engine.engine.runner
    return (
        f"{state.config.model_name}, context {state.served.context:,}, KV pool of {state.served.pool_rows:,} tokens in "
        f"{runner.pool.layout.name}, attention {runner.attention_backend}"
    )
