"""Triton's file cache with a lock: of the processes on a host that want the same kernel, one compiles it and the others wait.

    rank 0    looks: not there    lock    compiles, stores    unlock
    rank 1    looks: not there    waits .....................       looks again: there

The lock is the kernel's own, and nobody who holds one waits for anything else, so that ranks which meet in collectives cannot
block each other. It is the operating system's: it ends with the process that holds it. Triton takes this class from the
variable TRITON_CACHE_MANAGER, see `uncast.cache_folder`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from filelock import FileLock
from triton.runtime.cache import FileCacheManager

WAIT_S = 300.0
"""A process that waits longer for another's kernel compiles it, too."""
_GROUP = "__grp__"

Found = TypeVar("Found")
_held: set[str] = set()
_counts = {"compiled": 0, "found": 0}


def counts() -> dict[str, int]:
    """Kernels that this process has "compiled", and "found" compiled."""
    return dict(_counts)


class CompileOnce(FileCacheManager):
    """Files of one kernel. A look that finds nothing takes its lock; storing what was looked for gives it back, and so does the
    end of this object, which a failed compilation brings about."""

    _lock: FileLock | None = None

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._locks = not (override or dump)
        self._wanted = ""

    def get_group(self, filename: str) -> Any:
        group = self._find(super().get_group, filename, _GROUP + filename)
        _counts["found"] += group is not None
        return group

    def get_file(self, filename: str) -> Any:
        return self._find(super().get_file, filename, filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary)
        _counts["compiled"] += self._locks and filename.startswith(_GROUP)
        if filename == self._wanted:
            self._unlock()
        return path

    def _find(self, look: Callable[[str], Found | None], filename: str, wanted: str) -> Found | None:
        found = look(filename)
        if found is None and self._lock_for(wanted):
            found = look(filename)
            if found is not None:
                self._unlock()
        return found

    def _lock_for(self, wanted: str) -> bool:
        """Whether the lock was free or became so; not where this process has it, or where nothing can be locked."""
        path = os.path.join(self.cache_dir, "compile.lock")
        if not self._locks or path in _held:
            return False
        lock = FileLock(path, timeout=WAIT_S, thread_local=False)
        try:
            lock.acquire()
        except (OSError, NotImplementedError):  # too late (a TimeoutError), a folder that is only read, no locks there
            return False
        _held.add(path)
        self._lock, self._wanted = lock, wanted
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            _held.discard(self._lock.lock_file)
            self._lock.release()
            self._lock = None

    def __del__(self) -> None:
        self._unlock()
