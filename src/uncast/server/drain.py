"""The end of a server: running requests and the answers on their way to clients get the grace time, then both are ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from uvicorn import Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from uncast.server.state import ServerState

FLUSH_S = 5.0
_POLL_S = 0.02


async def drain(state: ServerState, server: Server, say: Callable[[str], None]) -> int:
    """Refuses new requests and waits `state.config.grace_s` seconds for the running ones and for clients to take their answers.

    What is late then ends: a request with 503, a stream with an error event and `[DONE]`. Clients have `FLUSH_S` seconds to
    take that; connections of those that do not are closed.

    Returns:
        The exit code: 0, or 1 if a request was aborted, an answer was late, or the engine failed.
    """
    state.closing.set()
    engine, grace = state.served.engine, state.config.grace_s
    say(f"shutting down: {engine.active} running requests have {grace:g} s")
    deadline = time.monotonic() + grace
    aborted = await engine.drain(grace)
    if not aborted:
        await _until_taken(server, deadline)
    late = 0 if aborted else len(_untaken(server))
    state.expired.set()
    await _until_taken(server, time.monotonic() + FLUSH_S)
    cut = _untaken(server)
    for connection in cut:
        connection.transport.abort()
    if aborted:
        say(f"{aborted} requests did not finish in {grace:g} s and were aborted")
    if late:
        say(f"{late} answers were not complete and read by their clients in {grace:g} s")
    if cut:
        say(f"{len(cut)} answers were cut off: their clients did not read them within {FLUSH_S:g} more seconds")
    if engine.failure is not None:
        say(engine.failure)
    return 1 if aborted or late or cut or engine.failure is not None else 0


async def _until_taken(server: Server, deadline: float) -> None:
    while _untaken(server) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


def _untaken(server: Server) -> list[H11Protocol]:
    """Connections with a request whose answer has not been handed to the operating system whole."""
    found = []
    for connection in server.server_state.connections:
        assert isinstance(connection, H11Protocol)
        cycle = connection.cycle
        unanswered = cycle is not None and not cycle.response_complete
        if unanswered or connection.transport.get_write_buffer_size():
            found.append(connection)
    return found
