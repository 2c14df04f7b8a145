"""torch's profiler over all threads, from /start_profile to /stop_profile."""

from __future__ import annotations

import gzip
import importlib
import itertools
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from uncast.server.errors import ApiError

_OPTIONS = ("profile_all_threads", "trace_only")
"""Of torch's profiler, where it has them: record the engine's thread, too; make no Python objects of events."""


class Profiler:
    """One trace at a time, a gzipped Chrome trace that `uncast doctor` reads. Methods block; `start` belongs in the
    thread that imported torch (Kineto wants it), the others in any."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._running: Any = None
        self._path = Path()

    @property
    def possible(self) -> bool:
        """Whether there is a folder for traces."""
        return self._folder is not None

    @staticmethod
    def prepare() -> None:
        """Imports what torch's profiler would import at its first start: seconds of work that may be done in any thread."""
        if hasattr(torch, "_inductor"):
            importlib.import_module("torch._inductor.config")

    def start(self) -> Path:
        """Starts a trace; returns the file that `stop` will write.

        Raises:
            ApiError: 409 without a folder, or when a trace is running or being written.
        """
        if self._folder is None:
            raise ApiError(409, "the server was started without --profile-dir", code="no_profile_dir")
        if not self._lock.acquire(blocking=False):
            raise ApiError(409, f"a trace is being written: {self._path}", code="already_profiling")
        try:
            if self._running is not None:
                raise ApiError(409, f"a trace is running: {self._path}", code="already_profiling")
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            stamp = time.strftime("%Y%m%d-%H%M%S")
            self._path = self._folder / f"uncast-{stamp}-{os.getpid()}-{next(self._numbers)}.pt.trace.json.gz"
            options: dict[str, Any] = {
                name: True for name in _OPTIONS if name in (_ExperimentalConfig.__init__.__doc__ or "")
            }
            profile = torch.profiler.profile(
                activities=activities, record_shapes=True, experimental_config=_ExperimentalConfig(**options)
            )
            profile.start()
            self._running = profile
            return self._path
        finally:
            self._lock.release()

    def stop(self) -> Path:
        """Ends the trace and writes it.

        Raises:
            ApiError: 409 when none is running; 500 when the file cannot be written.
        """
        with self._lock:
            if self._running is None:
                raise ApiError(409, "no trace is running: POST /start_profile first", code="not_profiling")
            profile, self._running = self._running, None
            profile.stop()
            plain = self._path.with_suffix(".partial")
            try:
                profile.export_chrome_trace(str(plain))
                _compress(plain, self._path)
            except (OSError, RuntimeError) as error:
                self._path.unlink(missing_ok=True)
                raise ApiError(500, f"the trace {self._path} cannot be written: {error}", code="profile_lost") from None
            finally:
                plain.unlink(missing_ok=True)
            return self._path

    def close(self) -> None:
        """Ends and writes a trace that still runs; raises as `stop` does."""
        if self._running is not None:
            self.stop()


def _compress(plain: Path, target: Path) -> None:
    """Gzips in large blocks (torch's own export to .gz goes line by line, a hundred times slower).

    Raises:
        OSError: a file cannot be read or written, or `plain` is not whole; Kineto does not report a full disk.
    """
    with plain.open("rb") as source:
        source.seek(max(0, plain.stat().st_size - 16))
        if not source.read().rstrip().endswith(b"}"):
            raise OSError("its end is missing; is the disk full?")
        source.seek(0)
        with gzip.open(target, "wb", compresslevel=3) as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
