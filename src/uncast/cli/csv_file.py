"""The file of `--csv`: looked at before a measurement, written after it."""

from __future__ import annotations

import csv
import os
import stat
from pathlib import Path


def check_writable(path: Path | None) -> None:
    """Finds out before the work whether `path` could be written, without touching it; None is no file.

    Raises:
        ValueError: it could not.
    """
    if path is None:
        return
    try:
        folder = stat.S_ISDIR(os.stat(path).st_mode)
        target = path
    except FileNotFoundError:
        folder, target = False, path.parent
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ValueError(f"cannot write {str(path)!r}: {_why(error)}") from None
    if folder:
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    if not target.exists():
        raise ValueError(f"cannot write {str(path)!r}: there is no folder {str(target)!r}")
    if not os.access(target, os.W_OK):
        raise ValueError(f"cannot write {str(path)!r}: permission denied")


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """Writes rows (at least one) with a header.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ValueError(f"cannot write {str(path)!r}: {_why(error)}") from None


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
