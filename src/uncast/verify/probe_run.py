"""The parent of a probe: workers of several backends and layouts side by side, the cache, the report."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from uncast.attention import registry
from uncast.attention.select import misses_default
from uncast.attention.verified import VARIANTS, learn, machine, read_rows
from uncast.latent.layouts import row_layout
from uncast.verify.probe_crew import COMPILE_SECONDS, MAX_DEATHS, START_SECONDS, Crew, Deaths, WorkerDied
from uncast.verify.probe_grid import SPARSE_MODES, Filters, ProbeKey, keys, layouts
from uncast.verify.probe_kept import keep
from uncast.verify.probe_time import describe
from uncast.verify.probe_worker import shorten

MAX_JOBS = 16
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
class _Group:
    """Keys of one backend and layout, in blocks for one worker each, and who is at work on them.

    A block is of one dtype and number of heads: its keys share compiled kernels.
    """

    keys: list[ProbeKey]
    deaths: Deaths = field(default_factory=Deaths)
    workers: int = 0
    done: int = 0
    blocks: deque[list[ProbeKey]] = field(init=False)

    def __post_init__(self) -> None:
        blocks = itertools.groupby(
            self.keys, key=lambda key: (key.q_data_type, key.num_heads, key.mode in SPARSE_MODES)
        )
        self.blocks = deque(list(block) for _, block in blocks)

    @property
    def urgency(self) -> tuple[bool, bool, float]:
        """The next free worker goes where this is largest: casts in front of a backend come last, a library that may have to
        be built is begun first and gets a second worker when it is, and the rest by blocks per worker."""
        name = self.keys[0].backend
        cast = ":" in name
        own = cast or registry.backend_class(name).requires in ("", "triton")
        share = len(self.blocks) / (self.workers + 1)
        return not cast, not own and not self.workers, share if own or self.done or not self.workers else 0.0


class _Session:
    """What the threads of one probe share."""

    def __init__(self, folder: Path, device: str, seconds: float, report: Report, on_row: OnRow | None) -> None:
        self.folder, self.device, self.seconds, self.report, self.on_row = folder, device, seconds, report, on_row
        self.rows: dict[ProbeKey, dict[str, Any]] = {}
        self.known: dict[ProbeKey, dict[str, Any]] = {}
        self.groups: list[_Group] = []
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

    def work(self) -> None:
        """One thread: a group's worker until no block of it is left, then another's."""
        while (group := self._join()) is not None:
            crew, rows = self.crew(group.deaths), list[dict[str, Any]]()
            try:
                while (block := self._take(group)) is not None:
                    for key in block:
                        row = self.known.get(key) or _probe(crew, key)
                        if self._stopped:
                            return
                        self.add(key, row)
                        rows.append(row)
                        group.done += 1
            finally:
                crew.close()
                with self._lock:
                    group.workers -= 1
                    _remember(
                        self.device, [row for row in rows if row is not self.known.get(ProbeKey.of(row))], self.report
                    )

    def _join(self) -> _Group | None:
        with self._lock:
            waiting = [group for group in self.groups if group.blocks]
            if not waiting:
                return None
            group = max(waiting, key=lambda group: group.urgency)
            group.workers += 1
            return group

    def _take(self, group: _Group) -> list[ProbeKey] | None:
        with self._lock:
            return group.blocks.popleft() if group.blocks else None

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
            session.groups = [_Group(group) for group in _survey(filters, arch, session)]
        session.total = sum(len(group.keys) for group in session.groups) + len(report.rows)
        for row in report.rows:
            session.tell(row)
        threads = jobs or default_jobs()
        with _clock(report, "running"), ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(session.work) for _ in range(threads)]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                session.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        with _clock(report, "timing"):
            _measure(session)
    report.rows += [session.rows[key] for group in session.groups for key in group.keys]
    learn(report.rows)
    return report


@contextmanager
def _clock(report: Report, part: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    report.seconds[part] = round(time.monotonic() - start, 1)


def _survey(filters: Filters, arch: int, session: _Session) -> list[list[ProbeKey]]:
    """Claimed keys by backend and layout. Asked in a worker: importing a library can crash, too."""
    groups, report = [], session.report
    crew = session.crew(seconds=max(session.seconds, START_SECONDS))
    try:
        for backend in filters.backends or registry.names():
            died = ""
            for kv_layout in layouts(filters):
                asked = keys(backend, kv_layout, session.device, arch, filters)
                for key in asked:
                    key.spec(VARIANTS[0]).check()
                if died:
                    report.rows.append(asked[0].row("skipped", shorten(f"{backend} is not asked again: it {died}")))
                    continue
                try:
                    reasons, fault = crew.ask("survey", asked)
                except WorkerDied as death:
                    died = str(death)
                    reasons, fault = [], shorten(f"{backend} {death}")
                if fault:
                    report.rows.append(asked[0].row("failed", fault))
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
        if row["status"] == "verified" and _auto_may_take(key):
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


def _auto_may_take(key: ProbeKey) -> bool:
    if key.backend not in registry.AUTO_ORDER[key.device]:
        return False
    return not misses_default(registry.backend_class(key.backend), row_layout(key.kv_layout))


def _remember(device: str, rows: list[dict[str, Any]], report: Report) -> None:
    note = keep(device, rows)
    if note and note not in report.notes:
        report.notes.append(note)
