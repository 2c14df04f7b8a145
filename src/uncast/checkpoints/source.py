"""Tensors of a Hugging Face safetensors folder by name: BF16/FP16/FP32, or FP8 in 128x128 blocks.

An FP8 weight `X.weight` (e4m3 [rows, columns]) has `X.weight_scale_inv` (fp32 [ceil(rows / 128), ceil(columns / 128)]), which
despite its name is multiplied; the last row and column of blocks may be partial. A tensor's own dtype decides, not a list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from uncast.checkpoints.files import CheckpointError, check_regular, read_json
from uncast.models.fields import MAX_INT, Fields
from uncast.numerics import e4m3

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_BLOCK = (128, 128)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class SafetensorsSource:
    """Named tensors of a checkpoint folder, read one at a time (memory-mapped)."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Opens every shard's header.

        Raises:
            CheckpointError: no safetensors file, a missing or damaged shard, or an unsupported quantisation.
        """
        self.folder = folder
        self.block = _weight_block(config)
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for path, names in self._shards().items():
            handle = self._handle(path)
            present = set(handle.keys())
            for name in names if names is not None else present:
                if name not in present:
                    raise CheckpointError(f"{path} does not hold {name}, which {INDEX_FILE} says it does")
                self._file_of[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` as `dtype`, FP8 blocks multiplied by their scales.

        Raises:
            CheckpointError: missing, of another shape, of an unsupported dtype, or with a missing or wrong scale.
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} in {self.folder} has shape {list(tensor.shape)}: {list(shape)} is needed")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{name} in {self.folder} is {tensor.dtype}: BF16, FP16, FP32 and FP8 e4m3 are read")
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor.to(dtype)
        return self._dequantize(name, tensor).to(dtype)

    def scalar(self, name: str) -> float | None:
        """A one-element tensor as a float, None if absent.

        Raises:
            CheckpointError: it is not one positive, finite number.
        """
        if name not in self:
            return None
        tensor = self._read(name)
        value = float(tensor.to(torch.float32).reshape(-1)[0]) if tensor.numel() == 1 else float("nan")
        if not 0.0 < value < float("inf"):
            raise CheckpointError(f"{name} in {self.folder} is not one positive finite number")
        return value

    def _dequantize(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() != 2:
            raise CheckpointError(f"{name} in {self.folder} is FP8 with {tensor.dim()} dimensions: 2 are supported")
        scale_name = f"{name}_scale_inv"
        if scale_name not in self:
            raise CheckpointError(f"{name} in {self.folder} is FP8 but {scale_name} is missing")
        scale = self._read(scale_name)
        if not scale.dtype.is_floating_point:
            raise CheckpointError(f"{scale_name} in {self.folder} is {scale.dtype}: floating-point numbers are needed")
        scale = scale.to(torch.float32)
        rows, columns = tensor.shape
        blocks = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if tuple(scale.shape) != blocks:
            raise CheckpointError(
                f"{scale_name} in {self.folder} has shape {list(scale.shape)}: a {rows} x {columns} weight needs {list(blocks)}"
            )
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(f"{scale_name} in {self.folder} holds values that are not positive finite numbers")
        block = min(self.block[0], rows), min(self.block[1], columns)
        spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        return e4m3.decode(tensor.view(torch.uint8)).mul_(spread)

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        path = self._file_of[name]
        try:
            tensor: torch.Tensor = self._handle(path).get_tensor(name)
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"cannot read {name} from {path}: {error}") from None
        return tensor

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            check_regular(path)
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"cannot open {path}: {error}") from None
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
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of tensor names to files")
        shards: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            names = shards.setdefault(self.folder / file, [])
            assert names is not None
            names.append(name)
        return shards


def _weight_block(config: Mapping[str, Any]) -> tuple[int, int]:
    fields = Fields(config, "config.json", CheckpointError)
    if "quantization_config" not in fields:
        return DEFAULT_BLOCK
    quantization = Fields(fields.mapping("quantization_config"), "config.json's quantization_config", CheckpointError)
    method = quantization.text("quant_method")
    if method != "fp8":
        raise CheckpointError(f"quantization method {method!r} is not supported: fp8 with 128x128 blocks is")
    sides = quantization.integers("weight_block_size", low=1, high=MAX_INT, count=2)
    return (sides[0], sides[1]) if sides else DEFAULT_BLOCK
