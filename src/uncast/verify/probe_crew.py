"""A probe's child processes: one does the work, another takes its place when it crashes or takes too long."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from uncast.attention import registry
from uncast.verify.probe_claims import claims, claims_row, refused_row
from uncast.verify.probe_grid import Filters
from uncast.verify.probe_worker import shorten, worker_main

START_SECONDS = 180.0
COMPILE_SECONDS = 300.0
"""More for the first case of a worker on a GPU: a library may build its kernels with a compiler then."""
END_SECONDS = 60.0
"""For a process that has ended or was killed to be gone."""
CLAIMS_SECONDS = 60.0
"""For a backend to say what it claims of one layout."""
MAX_DEATHS = 3
_PLACES = {
    **dict.fromkeys(("survey", "claims"), "capability()"), "plan": "plan()", **dict.fromkeys(("run", "time"), "run()"),
    "graph": "a CUDA graph",
}  # fmt: skip


class WorkerDied(Exception):
    """The worker crashed or was stopped; the message is the rest of a sentence that begins with the backend's name."""


class Worker:
    """A child process that survives neither a crash nor a time limit, and its replacement after either."""

    def __init__(self, log: Path) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([worker_main.__module__])
        self._log = log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker_main, args=(theirs, registry.paths(), str(log)), daemon=True)  # type: ignore[attr-defined]
        # Ctrl-C is for this process: one that still imports would print a traceback (`worker_main` allows it again). The
        # tracker is started before, since its start ends with Ctrl-C allowed.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._phase = "start"
        self._wait(START_SECONDS)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def ask(self, task: str, payload: Any, seconds: float) -> Any:
        """The answer to a message.

        Raises:
            WorkerDied: no answer within `seconds`, or a crash; the process is gone then.
        """
        self._phase = task
        try:
            self._pipe.send((task, payload))
        except OSError:
            raise WorkerDied(self._obituary()) from None
        return self._wait(seconds)

    def _wait(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                kind, payload = self._pipe.recv()
                if kind != "phase":
                    return payload
                self._phase = payload
        except (EOFError, OSError):
            raise WorkerDied(self._obituary()) from None
        self.stop()
        raise WorkerDied(f"does not come back from {self._place()} within {seconds:g} s")

    def _place(self) -> str:
        """Where the worker was, as a user knows it."""
        return _PLACES.get(self._phase, "its start")

    def _obituary(self) -> str:
        self._process.join(END_SECONDS)
        self.stop()
        code = self._process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        words = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {words[-1]}" if words else ""
        return f"ends its process with {how} in {self._place()}{last}"

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(END_SECONDS)
        self._pipe.close()


class Deaths:
    """How often the processes of one backend and layout ended, whoever of its crews counts."""

    def __init__(self) -> None:
        self._count, self._lock = 0, threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1

    @property
    def too_many(self) -> bool:
        return self._count >= MAX_DEATHS


class Crew:
    """Gives a live worker for each question.

    Args:
        log: where its workers print.
        seconds: time limit of an answer.
        first_seconds: added to it for the first answer of each worker.
    """

    def __init__(self, log: Path, seconds: float, deaths: Deaths | None = None, first_seconds: float = 0.0) -> None:
        self.log, self.seconds, self.first_seconds = log, seconds, first_seconds
        self.deaths = deaths or Deaths()
        self._worker: Worker | None = None
        self._closed = False

    def ask(self, task: str, payload: Any) -> Any:
        """The answer.

        Raises:
            WorkerDied: there is none; the next question goes to a new worker.
        """
        seconds = self.seconds
        try:
            if self._worker is None or not self._worker.alive:
                if self._closed:
                    raise WorkerDied("is not run any more")
                self._worker = Worker(self.log)
                seconds += self.first_seconds
            return self._worker.ask(task, payload, seconds)
        except WorkerDied:
            self.deaths.add()
            self._worker = None
            raise

    def replace(self) -> None:
        """The next question goes to a new worker; this one's end counts as a death."""
        self.deaths.add()
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    def close(self) -> None:
        """Ends the worker, from any thread; no new one is started."""
        self._closed = True
        if self._worker is not None:
            self._worker.stop()


def claims_here(filters: Filters) -> list[dict[str, Any]]:
    """`claims`, of backends from elsewhere asked in a worker: one that crashes or hangs is a refused row."""
    with tempfile.TemporaryDirectory(prefix="uncast-probe-") as folder:
        crew, died = Crew(Path(folder) / "worker.log", CLAIMS_SECONDS), dict[str, str]()

        def row_of(backend: str, kv_layout: str) -> dict[str, Any]:
            if registry.is_own(backend):
                return claims_row(backend, kv_layout)
            try:
                if backend not in died:
                    row: dict[str, Any] = crew.ask("claims", (backend, kv_layout))
                    return row
            except WorkerDied as death:
                died[backend] = shorten(f"{backend} {death}")
            return refused_row(backend, kv_layout, died[backend])

        try:
            return claims(filters, row_of)
        finally:
            crew.close()
