"""torch's profiler over all threads, from /start_profile to /stop_profile."""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from uncast.server.errors import ApiError


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
            profile = torch.profiler.profile(
                activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
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
            try:
                profile.export_chrome_trace(str(self._path))
            except (OSError, RuntimeError) as error:
                self._path.unlink(missing_ok=True)
                raise ApiError(500, f"the trace {self._path} cannot be written: {error}", code="profile_lost") from None
            return self._path

    def close(self) -> None:
        """Ends and writes a trace that still runs; raises as `stop` does."""
        if self._running is not None:
            self.stop()
