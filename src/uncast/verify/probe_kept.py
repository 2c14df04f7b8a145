"""What a probe keeps for later processes: rows added to the file of `uncast.attention.verified`, beside other probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from uncast.attention import registry
from uncast.attention.verified import cache_path, read_rows, write_rows
from uncast.verify.probe_grid import ProbeKey

LOCK_SECONDS = 30.0


def keep(device: str, rows: list[dict[str, Any]]) -> str:
    """Adds rows of this package's own backends to the file: the versions it is keyed by do not cover other code.

    Returns:
        Why they are not kept, in a sentence; "" if they are.
    """
    rows = [row for row in rows if registry.is_own(row["backend"])]
    if not rows:
        return ""
    path = cache_path(device)
    try:
        with _locked(path):
            merged = {ProbeKey.of(row): row for row in [*read_rows(device), *rows]}
            write_rows(device, list(merged.values()))
    except OSError as error:
        return f"results are not kept: {path} cannot be written ({error.strerror or error})"
    return ""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other probes from replacing the file between a look at it and its replacement, where the folder can be locked."""
    lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)
    with suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
