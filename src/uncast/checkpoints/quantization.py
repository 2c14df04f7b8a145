"""What a folder's files say about its quantisation: method, excluded modules, block size, FP8 cache.

Three spellings are read: `config.json`'s `quantization_config` of FP8 blocks (DeepSeek), of compressed-tensors
(`nvfp4-pack-quantized`) and of modelopt (NVFP4), and modelopt's older `hf_quant_config.json`. How a tensor is read is decided
by how it is stored: lists are known to misname modules. What they are good for is to notice that the two disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from uncast.checkpoints.files import CheckpointError, read_json_if_there
from uncast.models.fields import MAX_INT, Fields

MODELOPT_FILE = "hf_quant_config.json"
DEFAULT_BLOCK = (128, 128)
GROUP_SIZE = 16
_MODELOPT_METHODS = ("modelopt", "modelopt_fp4")
_NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_CT_FORMAT = "nvfp4-pack-quantized"
_SUPPORTED = f"fp8 with 128x128 blocks, modelopt's NVFP4 and compressed-tensors' {_CT_FORMAT} are"


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's declared quantisation.

    Attributes:
        kind: "none", "fp8" or "nvfp4": how linear layers that are not excluded are stored.
        excluded: module names or globs that are not quantised; "re:..." is a regular expression.
        block: rows and columns of an FP8 block.
        fp8_cache: the checkpoint asks for an FP8 KV cache.
    """

    kind: str = "none"
    excluded: tuple[str, ...] = ()
    block: tuple[int, int] = DEFAULT_BLOCK
    fp8_cache: bool = False

    def excludes(self, module: str) -> bool:
        """Whether the module (a name without `.weight`) is on the list. A glob must match the whole name: `model.layers.1.*` is
        not layer 10, but `model.layers.1*` is."""
        for pattern in self.excluded:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], module):
                    return True
            elif pattern == module or fnmatchcase(module, pattern):
                return True
        return False


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization:
    """From config.json's `quantization_config`, else from hf_quant_config.json, else none.

    Raises:
        CheckpointError: a method that is not supported, or a senseless value.
    """
    fields = Fields(config, "config.json", CheckpointError)
    if "quantization_config" in fields:
        where = "config.json's quantization_config"
        return _from_config(Fields(fields.mapping("quantization_config"), where, CheckpointError))
    path = folder / MODELOPT_FILE
    raw = read_json_if_there(path)
    if not raw:
        return Quantization()
    outer = Fields(raw, str(path), CheckpointError)
    inner = Fields(outer.mapping("quantization"), f"{path}'s quantization", CheckpointError)
    return _nvfp4(inner, "exclude_modules", "group_size", inner.raw.get("kv_cache_quant_algo"))


def _from_config(fields: Fields) -> Quantization:
    method = fields.text("quant_method", "modelopt" if "quant_algo" in fields else None)
    if method == "fp8":
        sides = fields.integers("weight_block_size", low=1, high=MAX_INT, count=2)
        excluded = _names(fields, "modules_to_not_convert")
        return Quantization("fp8", excluded, (sides[0], sides[1]) if sides else DEFAULT_BLOCK)
    if method in _MODELOPT_METHODS:
        return _nvfp4(fields, "ignore", "group_size", fields.raw.get("kv_cache_scheme"))
    if method == "compressed-tensors":
        form = fields.text("format")
        if form != _CT_FORMAT:
            raise CheckpointError(f"compressed-tensors format {form!r} is not supported: {_CT_FORMAT} is")
        return Quantization("nvfp4", _names(fields, "ignore"), fp8_cache=_is_fp8(fields.raw.get("kv_cache_scheme")))
    raise CheckpointError(f"quantization method {method!r} is not supported: {_SUPPORTED}")


def _nvfp4(fields: Fields, excluded: str, group: str, cache: object) -> Quantization:
    algorithm = fields.text("quant_algo")
    if algorithm not in _NVFP4_ALGORITHMS:
        raise CheckpointError(
            f"modelopt's quant_algo {algorithm!r} is not supported: {' and '.join(_NVFP4_ALGORITHMS)} are"
        )
    fields.require(group, GROUP_SIZE)
    return Quantization("nvfp4", _names(fields, excluded), fp8_cache=_is_fp8(cache))


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    names = fields.raw.get(name)
    if names is None:
        return ()
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(n, str) for n in names):
        raise fields.fault(name, "a list of module names is needed")
    for pattern in names:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise CheckpointError(f"{fields.where} has {name} with {pattern!r}: {error}") from None
    return tuple(names)


def _is_fp8(scheme: object) -> bool:
    """modelopt's older files say "FP8", newer ones and compressed-tensors give bits and type."""
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float"
    return scheme == "FP8"
