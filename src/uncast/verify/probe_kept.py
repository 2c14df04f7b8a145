"""What a probe keeps for later processes: rows added to the file of `uncast.attention.verified`, beside other probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from uncast.attention import registry
from uncast.attention.verified import cache_path, read_rows, write_rows
from uncast.verify.probe_grid import ProbeKey

LOCK_SECONDS = 30.0


def keep(device: str, rows: list[dict[str, Any]]) -> str:
    """Adds rows of this package's own backends to the file: the versions it is keyed by do not cover other code.

    Returns:
        Why they are not kept, or not as safely as they should be, in a sentence; "" if all is well.
    """
    rows = [row for row in rows if registry.is_own(row["backend"])]
    if not rows:
        return ""
    path = cache_path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as unlocked:
            merged = {ProbeKey.of(row): row for row in [*read_rows(device), *rows]}
            write_rows(device, list(merged.values()))
    except OSError as error:
        return f"results are not kept: {path} cannot be written ({error.strerror or error})"
    return f"{path} was not locked ({unlocked}): another probe at this time may lose rows" if unlocked else ""


@contextmanager
def _locked(path: Path) -> Iterator[str]:
    """Keeps other probes from replacing the file between a look at it and its replacement, where the folder can be locked;
    gives why not, "" if it is."""
    lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)
    unlocked = ""
    try:
        lock.acquire()
    except Timeout:
        unlocked = f"another process has held it for {LOCK_SECONDS:g} s"
    except (OSError, NotImplementedError) as error:  # a folder that is only read, a file system without locks
        unlocked = str(error)
    try:
        yield unlocked
    finally:
        lock.release()
