"""A GGUF file (or the parts of a split one): metadata, and tensors read in pieces and dequantised by the `gguf` package.

The package's reader maps the file for names, types and places; values are read with ordinary reads, a piece at a time, since a
mapping's pages would count as the process's memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint, check_regular, check_shard

SUFFIX = ".gguf"
PIECE_BYTES = 1 << 20
"""Packed bytes that are dequantised at once; the float32 values of 4-bit blocks are eight times as large."""
_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
_BROKEN = (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, OSError)


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        shape: numpy's order (rows before columns).
        kind: the package's block type.
        nbytes: of the blocks, from `offset` on.
    """

    path: Path
    shape: tuple[int, ...]
    kind: Any
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        return str(self.kind.name)


class GgufFile:
    """An opened file.

    Attributes:
        path: the first part.
        tensors: by name, of all parts.
    """

    def __init__(self, path: Path) -> None:
        """Raises:
        CheckpointError: no `gguf` package. DamagedCheckpoint: a part is missing, cut off or no GGUF file.
        """
        self.path = path
        self.tensors: dict[str, GgufTensor] = {}
        self._fields: dict[str, Any] = {}
        for index, part in enumerate(_parts(path)):
            (check_shard if index else check_regular)(part)
            reader = _open(part)
            if index == 0:
                self._fields = dict(reader.fields)
            for tensor in reader.tensors:
                shape = tuple(int(side) for side in reversed(tensor.shape.tolist()))
                place = int(tensor.data_offset), int(tensor.n_bytes)
                self.tensors[str(tensor.name)] = GgufTensor(part, shape, tensor.tensor_type, *place)

    def value(self, key: str) -> Any:
        """A metadata value as Python's own type, None if there is none."""
        field = self._fields.get(key)
        try:
            return None if field is None else field.contents()
        except _BROKEN as error:
            raise DamagedCheckpoint(f"{self.path} has a metadata field {key} that cannot be read: {error}") from None

    def fill(self, name: str, out: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """The tensor, or number `index` of its leading dimension, into `out` of the same shape; returns it.

        Raises:
            DamagedCheckpoint: no such tensor, another shape, a type that the package cannot dequantise, or values out of reach.
        """
        found = self._tensor(name)
        shape = found.shape if index is None else found.shape[1:]
        if index is not None and not 0 <= index < found.shape[0]:
            raise DamagedCheckpoint(f"{name} in {found.path} has {found.shape[0]} matrices: number {index} is needed")
        if shape != tuple(out.shape):
            raise DamagedCheckpoint(f"{name} in {found.path} has shape {list(shape)}: {list(out.shape)} is needed")
        count = found.nbytes if index is None else found.nbytes // found.shape[0]
        start = found.offset + (0 if index is None else index * count)
        self._read(name, found, start, count, out.view(-1, out.shape[-1]))
        return out

    def _read(self, name: str, found: GgufTensor, start: int, count: int, rows: torch.Tensor) -> None:
        from gguf.quants import dequantize

        row_bytes = count // rows.shape[0]
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        with found.path.open("rb") as file:
            for first in range(0, rows.shape[0], step):
                piece = rows[first : first + step]
                file.seek(start + first * row_bytes)
                raw = np.fromfile(file, dtype=np.uint8, count=piece.shape[0] * row_bytes)
                try:
                    values = dequantize(raw.reshape(piece.shape[0], row_bytes), found.kind)
                    piece.copy_(torch.from_numpy(values.reshape(piece.shape)))
                except NotImplementedError:
                    raise DamagedCheckpoint(
                        f"{name} in {found.path} is {found.type_name}: the gguf package cannot dequantise that type"
                    ) from None
                except (ValueError, RuntimeError) as error:
                    raise DamagedCheckpoint(f"cannot read {name} from {found.path}: {error}") from None

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise DamagedCheckpoint(f"{self.path} has no tensor {name}")
        return self.tensors[name]


def gguf_path(path: Path) -> Path | None:
    """The (first) GGUF file that `path` means: the file itself, or the only one of a folder without config.json; None if none.

    Raises:
        CheckpointError: a folder with several models.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = [file for file in sorted(path.glob(f"*{SUFFIX}")) if _first_of_its_kind(file)]
    if len(files) > 1:
        raise CheckpointError(f"{path} has {len(files)} GGUF models: give one of them, such as {files[0]}")
    return files[0] if files else None


def companion_folder(path: Path) -> Path:
    """Where tokenizer.json and its like are: beside a GGUF file, or in the folder itself."""
    return path.parent if path.suffix == SUFFIX and not path.is_dir() else path


def _first_of_its_kind(file: Path) -> bool:
    match = _SPLIT.match(file.name)
    return match is None or int(match[2]) == 1


def _parts(path: Path) -> Sequence[Path]:
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}{SUFFIX}") for number in range(1, count + 1)]


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise CheckpointError(f"reading {path} needs the gguf package: pip install 'uncast[torch,gguf]'") from None
    try:
        reader = GGUFReader(path)
    except _BROKEN as error:
        raise DamagedCheckpoint(f"{path} is not a whole GGUF file: {error}") from None
    if reader.byte_order == "S":
        raise CheckpointError(f"{path} has the other byte order than this machine")
    return reader
