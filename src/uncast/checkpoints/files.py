"""Reading a checkpoint's small files: regular files of a sane size, as text or as a JSON object."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 256 << 20
"""Of a file read whole; the largest tokenizer.json known is a tenth of it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; one sentence that names the file or tensor."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint of a supported kind whose contents are wrong: a broken shard, a missing tensor or scale, a wrong shape."""


def check_regular(path: Path) -> None:
    """Raises `CheckpointError` unless `path` is a regular file that can be opened (a pipe would block, a device never end)."""
    _open(path).close()


def check_shard(path: Path) -> None:
    """The same of a file that another one of the checkpoint calls for: raises `DamagedCheckpoint`."""
    try:
        check_regular(path)
    except CheckpointError as error:
        raise DamagedCheckpoint(str(error)) from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        CheckpointError: no such file, not a regular one, larger than `MAX_BYTES`, or not UTF-8.
    """
    try:
        with _open(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise CheckpointError(f"cannot read {path}: it is larger than {MAX_BYTES >> 20} MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: byte {error.start} is wrong") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: as `read_text`; or not JSON, or not an object.
    """
    try:
        value = json.loads(read_text(path))
    except RecursionError:
        raise CheckpointError(f"{path} is not JSON: it is nested too deeply") from None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds JSON of type {type(value).__name__}, not an object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`; an empty object where nothing has that name."""
    return read_json(path) if os.path.lexists(path) else {}


def _open(path: Path) -> BinaryIO:
    """The file, opened for reading. Opening does not wait for a writer of a pipe, and only a regular file comes back."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file"
        raise CheckpointError(f"cannot read {path}: {kind}")
    return os.fdopen(handle, "rb")
