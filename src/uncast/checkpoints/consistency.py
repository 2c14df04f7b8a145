"""Whether a folder's headers fit together and fit the configuration, before any value is read: scales and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from uncast.checkpoints.files import DamagedCheckpoint
from uncast.checkpoints.implied import implied_tensors
from uncast.checkpoints.inventory import Tensor
from uncast.checkpoints.quantization import Quantization
from uncast.models.config import ModelConfig
from uncast.quant.packed import NVFP4_GROUP


def check_headers(tensors: Iterable[Tensor], config: ModelConfig, declared: Quantization, folder: Path) -> None:
    """Checks what the decoder's own tensors are stored as; tensors of other names, and other formats, are left alone.

    A folder that uses other names throughout is left alone, too.

    Raises:
        DamagedCheckpoint: an NVFP4 or FP8-block weight without one of its scales, a tensor of another shape than the
            configuration gives it, or none at all.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    held = {name.rpartition(".")[0] for name in stored}
    implied = implied_tensors(config, Quantization())
    ours = any(wanted.name in stored for wanted in implied)
    for wanted in implied:
        module = wanted.name.removesuffix(".weight")
        packed = stored.get(f"{module}.weight_packed")
        found = stored.get(wanted.name) if packed is None else packed
        if found is None:
            if ours and wanted.name.rpartition(".")[0] not in held:
                raise DamagedCheckpoint(f"{folder} has no tensor {wanted.name}")
            continue
        scales = _nvfp4(found, module, wanted.shape, packed is not None, stored) | _fp8(found, wanted.shape, declared)
        codes = (*wanted.shape[:-1], wanted.shape[-1] // 2) if _is_nvfp4(found, module, stored) else wanted.shape
        if found.dtype == "I32":
            continue  # INT4, eight columns a word
        _must_have(found, codes, folder)
        for name, shape in scales.items():
            if name not in stored:
                raise DamagedCheckpoint(f"{found.name} in {folder} is packed but {name} is missing")
            if shape is not None:
                _must_have(stored[name], shape, folder)


def _is_nvfp4(found: Tensor, module: str, stored: dict[str, Tensor]) -> bool:
    """Codes in bytes; MXFP4, which has one uint8 scale for 32 columns and no second one, is another format."""
    scale = stored.get(f"{module}.weight_scale")
    return found.dtype == "U8" and (scale is None or scale.dtype == "F8_E4M3")


def _nvfp4(
    found: Tensor, module: str, shape: tuple[int, ...], by_division: bool, stored: dict[str, Tensor]
) -> dict[str, tuple[int, ...] | None]:
    """Scales that must be there, and their shapes; None for a single number."""
    if not _is_nvfp4(found, module, stored):
        return {}
    second = f"{module}.{'weight_global_scale' if by_division else 'weight_scale_2'}"
    return {f"{module}.weight_scale": (*shape[:-1], shape[-1] // NVFP4_GROUP), second: None}


def _fp8(found: Tensor, shape: tuple[int, ...], declared: Quantization) -> dict[str, tuple[int, ...] | None]:
    if found.dtype != "F8_E4M3" or declared.kind != "fp8":
        return {}
    blocks = tuple(-(-side // block) for side, block in zip(shape, declared.block, strict=True))
    return {f"{found.name}_scale_inv": blocks}


def _must_have(tensor: Tensor, shape: tuple[int, ...], folder: Path) -> None:
    if tensor.shape != shape:
        raise DamagedCheckpoint(f"{tensor.name} in {folder} has shape {list(tensor.shape)}: {list(shape)} is needed")
