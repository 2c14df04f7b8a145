"""Tensors of a Hugging Face safetensors folder by name, read one at a time from memory-mapped shards.

Everything returned is a copy: a mapping's pages count as the process's memory as long as a tensor points into it. After
`RELEASE_BYTES` of reading the mappings are dropped, so that loading holds little more than its result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from uncast.checkpoints import packed
from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint, check_shard, read_json
from uncast.checkpoints.quantization import read_quantization
from uncast.quant.packed import Packed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
RELEASE_BYTES = 8 << 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsSource:
    """Named tensors of a checkpoint folder.

    Attributes:
        quantization: what the folder's files declare.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Opens every shard's header.

        Raises:
            CheckpointError: no safetensors file, a missing or damaged shard, or an unsupported quantisation.
        """
        self.folder = folder
        self.quantization = read_quantization(folder, config)
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._read_bytes = 0
        for path, names in self._shards().items():
            present = set(self._handle(path).keys())
            for name in names if names is not None else present:
                if name not in present:
                    raise DamagedCheckpoint(f"{path} does not hold {name}, which {INDEX_FILE} says it does")
                self._file_of[name] = path
            self._open.clear()  # with many shards, one mapping at a time

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` as `dtype`; packed weights are multiplied out.

        Raises:
            CheckpointError: missing, of another shape, of an unsupported dtype, or with a missing or wrong scale.
        """
        self._path(name)
        return self.fill(name, torch.empty(shape, dtype=dtype))

    def fill(self, name: str, out: torch.Tensor) -> torch.Tensor:
        """As `get`, into a tensor of the right shape; returns it."""
        stored = self.packed(name, tuple(out.shape))
        if stored is not None:
            return out.copy_(stored.dequantize(out.dtype))
        tensor = self.read(name)
        if tensor.shape != out.shape:
            where = f"{name} in {self.folder}"
            raise DamagedCheckpoint(f"{where} has shape {list(tensor.shape)}: {list(out.shape)} is needed")
        if tensor.dtype not in _FLOATS:
            raise DamagedCheckpoint(
                f"{name} in {self.folder} is {tensor.dtype}: BF16, FP16, FP32 and FP8 e4m3 are read, and NVFP4 with its scales"
            )
        return out.copy_(tensor)

    def packed(self, name: str, shape: tuple[int, ...]) -> Packed | None:
        """The weight `name` of logical `shape` as it is stored, None if that is not packed; raises as `get`."""
        return packed.read(self, name, shape)

    def scalar(self, name: str) -> float | None:
        """A one-element tensor as a float, None if absent.

        Raises:
            CheckpointError: it is not one positive, finite number.
        """
        if name not in self:
            return None
        tensor = self.read(name)
        value = float(tensor.to(torch.float32).reshape(-1)[0]) if tensor.numel() == 1 else float("nan")
        if not 0.0 < value < float("inf"):
            raise DamagedCheckpoint(f"{name} in {self.folder} is not one positive finite number")
        return value

    def dtype(self, name: str) -> str:
        """The stored type in safetensors' names ("U8", "F8_E4M3", "BF16", ...)."""
        return str(self._handle(self._path(name)).get_slice(name).get_dtype())

    def stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape as stored, without reading the values."""
        part = self._handle(self._path(name)).get_slice(name)
        return str(part.get_dtype()), tuple(part.get_shape())

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored; it points into the mapping until `RELEASE_BYTES` more are read, so copy what is kept."""
        path = self._path(name)
        if self._read_bytes > RELEASE_BYTES:
            self._open.clear()
            self._read_bytes = 0
        try:
            tensor: torch.Tensor = self._handle(path).get_tensor(name)
        except (SafetensorError, ValueError) as error:
            raise DamagedCheckpoint(f"cannot read {name} from {path}: {error}") from None
        self._read_bytes += tensor.nbytes
        return tensor

    def _path(self, name: str) -> Path:
        if name not in self._file_of:
            raise DamagedCheckpoint(f"{self.folder} has no tensor {name}")
        return self._file_of[name]

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            check_shard(path)
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise DamagedCheckpoint(f"cannot open {path}: {error}") from None
        return self._open[path]

    def _shards(self) -> dict[Path, list[str] | None]:
        """Shard files and, where an index lists them, the tensors each must hold."""
        index = self.folder / INDEX_FILE
        if not os.path.lexists(index):
            single = self.folder / SINGLE_FILE
            if not os.path.lexists(single):
                raise CheckpointError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
            return {single: None}
        weight_map = read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(f, str) for f in weight_map.values())
        ):
            raise DamagedCheckpoint(f"{index} has no weight_map of tensor names to files")
        shards: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            names = shards.setdefault(self.folder / file, [])
            assert names is not None
            names.append(name)
        return shards
