"""The parent of a probe: workers of several backends and layouts side by side, the cache, the report."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from uncast.attention import registry
from uncast.attention.verified import VARIANTS, cache_path, learn, machine, read_rows, write_rows
from uncast.verify.probe_crew import COMPILE_SECONDS, MAX_DEATHS, START_SECONDS, Crew, Deaths, WorkerDied
from uncast.verify.probe_grid import Filters, ProbeKey, keys, layouts
from uncast.verify.probe_time import describe
from uncast.verify.probe_worker import shorten

MAX_JOBS = 16
CHUNK = 32
"""Keys that one worker goes through: a backend and layout with more of them gets several workers."""
OnRow = Callable[[dict[str, Any], int, int], None]
"""Told each row, how many are done and how many there are."""


@dataclass
class Report:
    """Rows (of `ProbeKey.row`), refusals counted by (backend, layout, reason), sentences about the probe itself, and seconds of
    its parts: "asking", "running", "timing"."""

    machine: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    refusals: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    cached: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class _Chunk:
    """Keys of one backend and layout for one worker, and the deaths that its chunks share."""

    keys: list[ProbeKey]
    deaths: Deaths
    index: int

    @property
    def order(self) -> tuple[bool, int]:
        """Casts in front of a backend last; of libraries that may have to be built, every first chunk before the second."""
        name = self.keys[0].backend
        if ":" in name:
            return True, 0
        own = registry.backend_class(name).requires in ("", "triton")
        return False, 0 if own else self.index


class _Session:
    """What the threads of one probe share."""

    def __init__(self, folder: Path, device: str, seconds: float, report: Report, on_row: OnRow | None) -> None:
        self.folder, self.device, self.seconds, self.report, self.on_row = folder, device, seconds, report, on_row
        self.rows: dict[ProbeKey, dict[str, Any]] = {}
        self.known: dict[ProbeKey, dict[str, Any]] = {}
        self.total = 0
        self._crews: list[Crew] = []
        self._lock, self._numbers, self._stopped = threading.RLock(), itertools.count(), False

    def crew(self, deaths: Deaths | None = None, seconds: float | None = None) -> Crew:
        with self._lock:
            first = COMPILE_SECONDS if self.device == "cuda" else 0.0
            log = self.folder / f"worker-{next(self._numbers)}.log"
            self._crews.append(Crew(log, seconds or self.seconds, deaths, first))
            return self._crews[-1]

    def add(self, key: ProbeKey, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows[key] = row
            self.report.cached += row is self.known.get(key)
            self.tell(row)

    def tell(self, row: dict[str, Any]) -> None:
        if self.on_row is not None:
            self.on_row(row, len(self.rows) + len(self.report.rows), self.total)

    def run(self, chunk: _Chunk) -> None:
        """Rows of a chunk; kept on disk when it is done."""
        crew, rows = self.crew(chunk.deaths), []
        try:
            for key in chunk.keys:
                row = self.known.get(key) or _probe(crew, key)
                if self._stopped:
                    return
                self.add(key, row)
                rows.append(row)
        finally:
            crew.close()
            with self._lock:
                _remember(
                    self.device, [row for row in rows if row is not self.known.get(ProbeKey.of(row))], self.report
                )

    def stop(self) -> None:
        """Ends all workers, so that their threads end."""
        self._stopped = True
        with self._lock:
            for crew in self._crews:
                crew.close()


def device_here() -> tuple[str, int]:
    """("cuda", compute capability as major * 10 + minor), or ("cpu", 0)."""
    if not torch.cuda.is_available():
        return "cpu", 0
    major, minor = torch.cuda.get_device_capability()
    return "cuda", major * 10 + minor


def default_jobs() -> int:
    """Workers side by side: one a core that this process may use, at most `MAX_JOBS`."""
    return min(MAX_JOBS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run_probe(
    filters: Filters,
    *,
    device: str,
    arch: int,
    seconds: float = 60.0,
    fresh: bool = False,
    jobs: int | None = None,
    on_row: OnRow | None = None,
) -> Report:
    """Runs what the backends claim for `device` and keeps verified rows for later processes.

    Args:
        seconds: time limit of one case.
        fresh: also run what a probe of the same versions has verified before.
        jobs: workers side by side; see `default_jobs`. Times are measured afterwards, by one.
        on_row: see `OnRow`.

    Raises:
        ProblemError, LayoutError: a filter names what cannot exist.
    """
    report = Report(machine(device))
    with tempfile.TemporaryDirectory(prefix="uncast-probe-") as folder:
        session = _Session(Path(folder), device, seconds, report, on_row)
        if not fresh:
            session.known = {ProbeKey.of(row): row for row in read_rows(device) if row["status"] == "verified"}
        with _clock(report, "asking"):
            groups = _survey(filters, arch, session)
        session.total = sum(len(group) for group in groups) + len(report.rows)
        for row in report.rows:
            session.tell(row)
        chunks = sorted((chunk for group in groups for chunk in _chunks(group)), key=lambda chunk: chunk.order)
        with _clock(report, "running"), ThreadPoolExecutor(jobs or default_jobs()) as pool:
            futures = [pool.submit(session.run, chunk) for chunk in chunks]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                session.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        with _clock(report, "timing"):
            _measure(session)
    report.rows += [session.rows[key] for group in groups for key in group]
    learn(report.rows)
    return report


@contextmanager
def _clock(report: Report, part: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    report.seconds[part] = round(time.monotonic() - start, 1)


def _chunks(group: list[ProbeKey]) -> list[_Chunk]:
    deaths = Deaths()
    return [_Chunk(group[at : at + CHUNK], deaths, at // CHUNK) for at in range(0, len(group), CHUNK)]


def _survey(filters: Filters, arch: int, session: _Session) -> list[list[ProbeKey]]:
    """Claimed keys by backend and layout. Asked in a worker: importing a library can crash, too."""
    groups, report = [], session.report
    crew = session.crew(seconds=max(session.seconds, START_SECONDS))
    try:
        for backend in filters.backends or registry.names():
            for kv_layout in layouts(filters):
                asked = keys(backend, kv_layout, session.device, arch, filters)
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


def _probe(crew: Crew, key: ProbeKey) -> dict[str, Any]:
    if crew.deaths.too_many:
        return key.row("skipped", f"{key.backend} is not run here: its process ended {MAX_DEATHS} times before")
    row: dict[str, Any]
    try:
        row, usable = crew.ask("probe", key)
    except WorkerDied as death:
        return key.row("failed", shorten(f"{key.backend} {death}"))
    if not usable:
        crew.replace()
    return row


def _measure(session: _Session) -> None:
    """Times of verified rows, where `auto` has a choice between two or more; one after the other, with nothing beside them.

    A backend that fails in it has failed on a larger batch than the probe's: its row says so.
    """
    rivals: dict[ProbeKey, list[ProbeKey]] = {}
    for key, row in session.rows.items():
        if row["status"] == "verified" and key.backend in registry.AUTO_ORDER[session.device]:
            rivals.setdefault(replace(key, backend=""), []).append(key)
    wanted = [
        key
        for names in rivals.values()
        if len(names) > 1 and any(session.rows[key]["run_us"] is None for key in names)
        for key in names
    ]
    crew, measured = session.crew(), []
    try:
        for key in wanted:
            row = dict(session.rows[key])
            try:
                row["run_us"], reason = crew.ask("time", (key, row["variants"][0]))
            except WorkerDied as death:
                reason = shorten(f"{key.backend} {death}")
            if reason:
                row |= {"status": "failed", "reason": f"{reason} ({describe(session.device)})", "variants": []}
            session.rows[key] = row
            measured.append(row)
    finally:
        crew.close()
        _remember(session.device, measured, session.report)


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
