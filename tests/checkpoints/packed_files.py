"""Rewrites a folder that transformers wrote as quantisers write it: FP8 blocks, NVFP4 of modelopt and of compressed-tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from uncast.numerics import e2m1, e4m3
from uncast.quant.packed import Nvfp4

WEIGHTS = "model.safetensors"

GLM_5 = ["*self_attn*", "lm_head", "model.layers.4*"]
"""Dense MLPs, routed and shared experts are NVFP4."""
GLM_52 = ["*self_attn*", "*shared_experts*", "model.layers.0*", "lm_head", "model.embed_tokens"]
"""Routed experts of all layers but the first dense ones are."""
V32 = ["*q_a_proj*", "*q_b_proj*", "*kv_a_proj*", "*kv_b_proj*", "*indexer*", "lm_head"]
"""MLPs, experts and o_proj are."""


def quantize(weight: torch.Tensor) -> Nvfp4:
    """NVFP4 of a float32 matrix as modelopt scales it: global = amax / (6 * 448), e4m3 scale = block amax / 6 / global."""
    blocks = weight.view(weight.shape[0], -1, 16)
    factor = weight.abs().max() / (6.0 * 448.0)
    scales = e4m3.encode((blocks.abs().amax(-1) / (6.0 * factor)).clamp(2.0**-9, 448.0))
    codes = e2m1.encode((blocks / (e4m3.decode(scales) * factor)[..., None]).flatten(1))
    return Nvfp4(e2m1.pack(codes), scales, factor.expand(weight.shape[0]).clone())


Quantiser = Callable[[torch.Tensor], Nvfp4]


def linears(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Modules that are linear layers: matrices but the embedding and the router."""
    return [
        name.removesuffix(".weight")
        for name, t in tensors.items()
        if t.dim() == 2 and "embed" not in name and not name.endswith("mlp.gate.weight")
    ]


def to_modelopt(
    folder: Path, excluded: list[str], *, in_config: bool = True, cache: bool = True, make: Quantiser = quantize
) -> dict[str, torch.Tensor]:
    """modelopt's files; returns the values that the quantised matrices now stand for.

    `in_config`: settings in config.json, as newer versions write them; otherwise in hf_quant_config.json.
    """
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    if in_config:
        settings: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": excluded,
        }
        edit_config(folder, quantization_config=settings | ({"kv_cache_scheme": fp8} if cache else {}))
    else:
        inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": excluded}
        inner["kv_cache_quant_algo"] = "FP8" if cache else None
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": inner})
        )

    def write(module: str, q: Nvfp4) -> dict[str, torch.Tensor]:
        return {
            f"{module}.weight": q.codes, f"{module}.weight_scale": q.scales.view(torch.float8_e4m3fn),
            f"{module}.weight_scale_2": q.global_scale[0].clone(), f"{module}.input_scale": torch.tensor(0.5),
        }  # fmt: skip

    return _rewrite(folder, excluded, write, make)


def to_compressed_tensors(folder: Path, excluded: list[str]) -> dict[str, torch.Tensor]:
    """compressed-tensors' files: the global scale is the reciprocal."""
    settings = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": excluded}
    edit_config(folder, quantization_config=settings)

    def write(module: str, q: Nvfp4) -> dict[str, torch.Tensor]:
        return {
            f"{module}.weight_packed": q.codes, f"{module}.weight_scale": q.scales.view(torch.float8_e4m3fn),
            f"{module}.weight_global_scale": 1.0 / q.global_scale[:1],
        }  # fmt: skip

    return _rewrite(folder, excluded, write, quantize)


def _rewrite(
    folder: Path, excluded: list[str], write: Callable[[str, Nvfp4], dict[str, torch.Tensor]], make: Quantiser
) -> dict[str, torch.Tensor]:
    tensors, meant = load_file(folder / WEIGHTS), {}
    for module in linears(tensors):
        if not any(_matches(module, pattern) for pattern in excluded):
            packed = make(tensors.pop(f"{module}.weight").float())
            meant[f"{module}.weight"] = packed.dequantize(torch.float32)
            tensors.update(write(module, packed))
    save_file(tensors, folder / WEIGHTS)
    return meant


def _matches(module: str, pattern: str) -> bool:
    return bool(re.match(pattern[3:], module)) if pattern.startswith("re:") else fnmatchcase(module, pattern)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces or adds tensors; None removes one, which must be there."""
    tensors = load_file(folder / WEIGHTS)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / WEIGHTS)


def to_fp8_blocks(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrites every attention and MLP matrix as FP8 128x128 blocks; returns the values they now stand for."""
    tensors, meant = load_file(folder / WEIGHTS), {}
    for name in list(tensors):
        weight = tensors[name]
        if weight.dim() != 2 or "embed" in name or "lm_head" in name or "gate.weight" in name:
            continue
        rows, columns = weight.shape
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        codes, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scales[i, j] = weight[block].abs().max() / 448
                codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
                values[block] = codes[block].float() * scales[i, j]
        tensors[name], tensors[f"{name}_scale_inv"], meant[name] = codes, scales, values
    save_file(tensors, folder / WEIGHTS)
    edit_config(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    return meant
