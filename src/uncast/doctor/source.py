"""Bytes of a trace file, plain or gzipped, whole or cut off, in blocks."""

from __future__ import annotations

import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from uncast.doctor.errors import TraceError

BLOCK = 4 << 20
_GZIP = b"\x1f\x8b"
_OTHERS = {
    b"SQLite format 3": "an SQLite database (an Nsight Systems export?)",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"\x7fELF": "a program",
}

Progress = Callable[[int, int], None]
"""Called with bytes of the file read so far and bytes in all."""


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"


class ByteSource:
    """Iterates over a trace's bytes; afterwards `damage` says why it ended early, if it did.

    Raises:
        TraceError: the file is missing, empty, no regular file, or of a known other kind.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path, self.progress, self.damage = path, progress, ""
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
                raise TraceError(
                    f"{path} is {_kind(status.st_mode)}: a regular file is needed, so save the trace first"
                )
            self.total = status.st_size
            with path.open("rb") as file:
                self._head = file.read(16)
        except OSError as error:
            if str(path) == "-":
                raise TraceError(
                    "- (standard input) is no file: a regular file is needed, so save the trace first"
                ) from None
            raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
        if self.total == 0:
            raise TraceError(f"{path} is empty")
        for magic, what in _OTHERS.items():
            if self._head.startswith(magic):
                raise TraceError(f"{path} is no PyTorch profiler trace but {what}")

    def __iter__(self) -> Iterator[bytes]:
        blocks = self._file()
        return self._unzip(blocks) if self._head.startswith(_GZIP) else blocks

    def _file(self) -> Iterator[bytes]:
        read = 0
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                read += len(block)
                if self.progress is not None:
                    self.progress(read, self.total)
                yield block

    def _unzip(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        machine = zlib.decompressobj(wbits=31)
        started = False
        for block in blocks:
            pending = block
            while pending:
                if machine.eof:
                    if not pending.startswith(_GZIP[: len(pending)]):
                        return  # padding after the last member
                    machine = zlib.decompressobj(wbits=31)
                try:
                    out = machine.decompress(pending, BLOCK)
                except zlib.error as error:
                    self.damage = f"the gzip data is damaged ({error})"
                    return
                pending = machine.unconsumed_tail or machine.unused_data
                started = True
                if out:
                    yield out
        if started and not machine.eof:
            self.damage = "the gzip data ends early"
            yield machine.flush()
