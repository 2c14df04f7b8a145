"""The parent of a probe: one worker process per backend and layout, a time limit per case, the cache, the report."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from uncast.attention import registry
from uncast.attention.verified import VARIANTS, cache_path, learn, machine, read_rows, write_rows
from uncast.verify.probe_grid import Filters, ProbeKey, keys, layouts
from uncast.verify.probe_worker import shorten, worker_main

START_SECONDS = 180.0
MAX_DEATHS = 3
OnRow = Callable[[dict[str, Any], int, int], None]
"""Told each row, how many are done and how many there are."""


class WorkerDied(Exception):
    """The worker crashed or was stopped; the message is the rest of a sentence that begins with the backend's name."""


@dataclass
class Report:
    """Rows (of `ProbeKey.row`), refusals counted by (backend, layout, reason), and sentences about the probe itself."""

    machine: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    refusals: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    cached: int = 0


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
        self._process.start()
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
        known = {"plan": "plan()", "run": "run()", "graph": "a CUDA graph", "survey": "capability()"}
        return known.get(self._phase, "its start")

    def _obituary(self) -> str:
        self._process.join(10)
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
        self._process.join(10)
        self._pipe.close()


class _Crew:
    """Gives a live worker for each question and counts deaths."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.log, self.seconds, self.deaths = folder / "worker.log", seconds, 0
        self._worker: Worker | None = None

    def ask(self, task: str, payload: Any) -> Any:
        try:
            if self._worker is None or not self._worker.alive:
                self._worker = Worker(self.log)
            return self._worker.ask(task, payload, self.seconds)
        except WorkerDied:
            self.deaths += 1
            self._worker = None
            raise

    def replace(self) -> None:
        """The next question goes to a new worker; this one's end counts as a death."""
        self.deaths += 1
        self.close()
        self._worker = None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()


def device_here() -> tuple[str, int]:
    """("cuda", compute capability as major * 10 + minor), or ("cpu", 0)."""
    if not torch.cuda.is_available():
        return "cpu", 0
    major, minor = torch.cuda.get_device_capability()
    return "cuda", major * 10 + minor


def run_probe(
    filters: Filters, *, device: str, arch: int, seconds: float = 60.0, fresh: bool = False, on_row: OnRow | None = None
) -> Report:
    """Runs what the backends claim for `device` and keeps verified rows for later processes.

    Args:
        seconds: time limit of one case.
        fresh: also run what a probe of the same versions has verified before.
        on_row: see `OnRow`.

    Raises:
        ProblemError, LayoutError: a filter names what cannot exist.
    """
    report = Report(machine(device))
    known = {} if fresh else {ProbeKey.of(row): row for row in read_rows(device) if row["status"] == "verified"}
    with tempfile.TemporaryDirectory(prefix="uncast-probe-") as folder:
        groups = _survey(filters, device, arch, Path(folder), seconds, report)
        total, done = sum(len(group) for group in groups) + len(report.rows), 0
        for row in report.rows:
            done += 1
            _tell(on_row, row, done, total)
        for group in groups:
            crew, rows = _Crew(Path(folder), seconds), []
            try:
                for key in group:
                    row = known.get(key) or _probe(crew, key)
                    report.cached += key in known
                    rows.append(row)
                    done += 1
                    _tell(on_row, row, done, total)
            finally:
                crew.close()
                report.rows += rows
                _remember(device, [row for row in rows if row is not known.get(ProbeKey.of(row))], report)
    learn(report.rows)
    return report


def _tell(on_row: OnRow | None, row: dict[str, Any], done: int, total: int) -> None:
    if on_row is not None:
        on_row(row, done, total)


def _survey(
    filters: Filters, device: str, arch: int, folder: Path, seconds: float, report: Report
) -> list[list[ProbeKey]]:
    """Claimed keys by backend and layout. Asked in a worker: importing a library can crash, too."""
    groups, crew = [], _Crew(folder, max(seconds, START_SECONDS))
    try:
        for backend in filters.backends or registry.names():
            for kv_layout in layouts(filters):
                asked = keys(backend, kv_layout, device, arch, filters)
                for key in asked:
                    key.spec(VARIANTS[0]).check()
                try:
                    reasons = crew.ask("survey", asked)
                except WorkerDied as death:
                    report.rows.append(asked[0].row("failed", shorten(f"{backend} {death}")))
                    continue
                report.refusals.update((backend, kv_layout, reason) for reason in reasons if reason is not None)
                claimed = [key for key, reason in zip(asked, reasons, strict=True) if reason is None]
                if claimed:
                    groups.append(claimed)
    finally:
        crew.close()
    return groups


def _probe(crew: _Crew, key: ProbeKey) -> dict[str, Any]:
    if crew.deaths >= MAX_DEATHS:
        return key.row("skipped", f"{key.backend} is not run here: its process ended {MAX_DEATHS} times before")
    row: dict[str, Any]
    try:
        row, usable = crew.ask("probe", key)
    except WorkerDied as death:
        return key.row("failed", shorten(f"{key.backend} {death}"))
    if not usable:
        crew.replace()
    return row


def _remember(device: str, rows: list[dict[str, Any]], report: Report) -> None:
    """Adds rows of this package's own backends to the file: the versions it is keyed by do not cover other code."""
    own = {name for name, path in registry.paths().items() if path.startswith("uncast.")}
    rows = [row for row in rows if set(row["backend"].split(":")) <= own | {"gather_cast", "pool_cast"}]
    if not rows:
        return
    merged = {ProbeKey.of(row): row for row in [*read_rows(device), *rows]}
    try:
        write_rows(device, list(merged.values()))
    except OSError as error:
        note = f"results are not kept: {cache_path(device)} cannot be written ({error.strerror or error})"
        if note not in report.notes:
            report.notes.append(note)
