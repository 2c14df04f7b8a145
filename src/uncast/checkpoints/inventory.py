"""What a checkpoint holds, from the headers of its files alone: no tensor's data is read.

A folder with nothing but `config.json` has an inventory, too: the tensors that its configuration implies, in the formats that
its quantisation settings name.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint, check_shard, read_json
from uncast.checkpoints.gguf_file import GgufTensor
from uncast.checkpoints.source import INDEX_FILE

ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip
"""Bits of one element by safetensors' names."""
_FLOAT_NAMES = {"F64": "FP64", "F32": "FP32", "F16": "FP16", "BF16": "BF16", "F8_E5M2": "FP8 e5m2"}
_LAYER, _BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$"), re.compile(r"blk\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: its name, dtype in safetensors' spelling, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Module:
    """A weight with its scales.

    Attributes:
        layer: None outside the layers.
        part: "embedding", "LM head", "norms", "attention", "indexer", "dense MLP", "router", "experts", "shared experts",
            "MTP" (any tensor of a layer past the last one) or "other".
        format: "BF16", "FP8 blocks", "NVFP4", ... in words.
        parameters: numbers that the weight stands for, packed ones unpacked; scales are none.
        nbytes: of everything that is stored for it.
    """

    name: str
    layer: int | None
    part: str
    format: str
    parameters: int
    nbytes: int


def read_headers(folder: Path) -> list[Tensor]:
    """Every tensor of a folder's safetensors files; empty if there is no such file.

    Raises:
        CheckpointError: a shard is missing or damaged, or has a dtype whose size is not known.
    """
    tensors = []
    for path in _shards(folder):
        check_shard(path)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    tensors.append(Tensor(name, str(part.get_dtype()), tuple(part.get_shape())))
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedCheckpoint(f"cannot open {path}: {error}") from None
    for tensor in tensors:
        if tensor.dtype not in ITEM_BITS:
            raise CheckpointError(f"{tensor.name} in {folder} is {tensor.dtype}: the size of that dtype is not known")
    return tensors


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not os.path.lexists(index):
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise DamagedCheckpoint(f"{index} has no weight_map of tensor names to files")
    return [folder / file for file in sorted(set(weight_map.values()))]


def modules(tensors: Iterable[Tensor], num_layers: int) -> list[Module]:
    """Weights with their scales, in the order of their names.

    Args:
        num_layers: decoder layers; those past them are multi-token prediction.
    """
    grouped: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        base, _, suffix = tensor.name.rpartition(".")
        grouped[base][suffix] = tensor
    found = []
    for name in sorted(grouped):
        parts = grouped[name]
        layer, part = place(name, num_layers)
        words, parameters = _format(parts)
        found.append(Module(name, layer, part, words, parameters, sum(tensor.nbytes for tensor in parts.values())))
    return found


def place(module: str, num_layers: int) -> tuple[int | None, str]:
    """A module's layer and part, by Hugging Face's names (a prefix such as `language_model.` does not matter)."""
    match = _LAYER.search(module)
    if match is None:
        tail = module.rpartition(".")[2]
        return None, {"embed_tokens": "embedding", "lm_head": "LM head", "norm": "norms"}.get(tail, "other")
    layer, rest = int(match[1]), match[2]
    if layer >= num_layers:
        return layer, "MTP"
    for prefix, part in (
        ("self_attn.indexer", "indexer"),
        ("self_attn", "attention"),
        ("mlp.experts", "experts"),
        ("mlp.shared_experts", "shared experts"),
    ):
        if rest.startswith(prefix):
            return layer, part
    if rest == "mlp.gate":
        return layer, "router"
    if rest.startswith("mlp."):
        return layer, "dense MLP"
    return layer, "norms" if "norm" in rest else "other"


def gguf_modules(tensors: Mapping[str, GgufTensor], num_layers: int) -> list[Module]:
    """The same of a GGUF file; a module's format is its block type."""
    found = []
    for name, tensor in sorted(tensors.items()):
        module = name.rpartition(".")[0]
        layer, part = gguf_place(module, num_layers)
        found.append(Module(module, layer, part, tensor.type_name, math.prod(tensor.shape), tensor.nbytes))
    return found


def gguf_place(module: str, num_layers: int) -> tuple[int | None, str]:
    """A module's layer and part, by GGUF's names."""
    match = _BLOCK.match(module)
    if match is None:
        return None, {"token_embd": "embedding", "output": "LM head", "output_norm": "norms"}.get(module, "other")
    layer, rest = int(match[1]), match[2]
    if layer >= num_layers or rest.startswith("nextn."):
        return layer, "MTP"
    if rest in ("attn_norm", "ffn_norm"):
        return layer, "norms"
    if rest in ("ffn_gate_inp", "exp_probs_b"):
        return layer, "router"
    for start, part in (("indexer.", "indexer"), ("attn_", "attention")):
        if rest.startswith(start):
            return layer, part
    for end, part in (("_exps", "experts"), ("_shexp", "shared experts")):
        if rest.endswith(end):
            return layer, part
    return layer, "dense MLP" if rest.startswith("ffn_") else "other"


def _format(parts: Mapping[str, Tensor]) -> tuple[str, int]:
    """A module's format in words, and its parameters."""
    packed, weight = parts.get("weight_packed"), parts.get("weight")
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    if packed is not None:
        if packed.dtype == "I32":
            return "INT4 packed", 8 * packed.elements
        by_two = "weight_global_scale" in parts
        return ("NVFP4" if by_two else "MXFP4"), 2 * packed.elements
    if weight is None:
        stored = max(parts.values(), key=lambda tensor: tensor.nbytes)
        only_scales = all(suffix.endswith("_scale") for suffix in parts)
        return ("KV scale" if only_scales else _plain(stored.dtype)), 0 if only_scales else _elements(parts)
    if weight.dtype == "U8" and scale is not None:
        return ("NVFP4" if scale.dtype == "F8_E4M3" else "MXFP4"), 2 * weight.elements
    if weight.dtype == "F8_E4M3":
        if "weight_scale_inv" in parts:
            return "FP8 blocks", weight.elements
        per = "without a scale" if scale is None else "per tensor" if scale.elements == 1 else "per channel"
        return f"FP8 {per}", weight.elements
    return _plain(weight.dtype), _elements(parts)


def _plain(dtype: str) -> str:
    return _FLOAT_NAMES.get(dtype, dtype)


def _elements(parts: Mapping[str, Tensor]) -> int:
    return sum(tensor.elements for suffix, tensor in parts.items() if not suffix.endswith("_scale"))
