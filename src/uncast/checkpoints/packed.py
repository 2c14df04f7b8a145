"""Packed weights out of a safetensors folder, recognised by how they are stored.

NVFP4, modelopt            X.weight uint8 [rows, columns / 2], X.weight_scale e4m3 [rows, columns / 16], X.weight_scale_2 fp32
                           (multiplied); X.input_scale is for FP4 activations, which are not used here
NVFP4, compressed-tensors  X.weight_packed, X.weight_scale as above, X.weight_global_scale fp32 (divided)
FP8 blocks                 X.weight e4m3 [rows, columns], X.weight_scale_inv fp32 [ceil(rows / 128), ceil(columns / 128)], which
                           despite its name is multiplied; the last row and column of blocks may be partial
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from uncast.checkpoints.files import DamagedCheckpoint
from uncast.numerics import e4m3
from uncast.quant.packed import NVFP4_GROUP, Fp8Blocks, Nvfp4, Packed

if TYPE_CHECKING:
    from uncast.checkpoints.source import SafetensorsSource

_SUFFIX = ".weight"
_FLOAT_SCALES = ("F32", "BF16", "F16", "F64", "F8_E8M0")


def read(source: SafetensorsSource, name: str, shape: tuple[int, ...]) -> Packed | None:
    """The packed weight `name` of logical `shape`, copied; None if it is not stored packed.

    Raises:
        CheckpointError: the tensor is missing, has another shape, or has a missing or wrong scale.
    """
    module = name.removesuffix(_SUFFIX)
    if f"{module}.weight_packed" in source:
        return _nvfp4(source, f"{module}.weight_packed", module, shape, "weight_global_scale", divided=True)
    dtype = source.dtype(name)
    if dtype == "U8" and len(shape) == 2:
        return _nvfp4(source, name, module, shape, "weight_scale_2", divided=False)
    return _fp8(source, name, shape) if dtype == "F8_E4M3" else None


def _nvfp4(
    source: SafetensorsSource, name: str, module: str, shape: tuple[int, ...], global_name: str, *, divided: bool
) -> Nvfp4:
    rows, columns = shape
    for part in ("weight_scale", global_name):
        _must_have(source, name, "NVFP4", f"{module}.{part}")
    _must_be(source, name, ("U8",), (rows, columns // 2), f"an NVFP4 weight of {rows} x {columns} needs")
    scale_name = f"{module}.weight_scale"
    _must_be(source, scale_name, ("F8_E4M3",), (rows, -(-columns // NVFP4_GROUP)), f"{rows} x {columns} weights need")
    if columns % NVFP4_GROUP:
        raise DamagedCheckpoint(
            f"{name} in {source.folder} has {columns} columns: a multiple of {NVFP4_GROUP} is needed"
        )
    scales = source.read(scale_name).view(torch.uint8).clone()
    if bool(((scales & 0x7F) == e4m3.NAN_CODE).any()) or bool(((scales & 0x80) != 0).any()):
        raise DamagedCheckpoint(f"{scale_name} in {source.folder} holds negative values or NaN")
    factor = source.scalar(f"{module}.{global_name}")
    assert factor is not None
    one = torch.tensor(factor, dtype=torch.float32)
    return Nvfp4(source.read(name).clone(), scales, (1.0 / one if divided else one).expand(rows).clone())


def _fp8(source: SafetensorsSource, name: str, shape: tuple[int, ...]) -> Fp8Blocks:
    if len(shape) != 2:
        raise DamagedCheckpoint(f"{name} in {source.folder} is FP8 with {len(shape)} dimensions: 2 are supported")
    _must_be(source, name, ("F8_E4M3",), shape)
    scale_name = f"{name}_scale_inv"
    _must_have(source, name, "FP8", scale_name)
    rows, columns = shape
    block = source.quantization.block
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if source.dtype(scale_name) not in _FLOAT_SCALES:
        kind = source.read(scale_name).dtype
        raise DamagedCheckpoint(f"{scale_name} in {source.folder} is {kind}: floating-point numbers are needed")
    _must_be(source, scale_name, _FLOAT_SCALES, blocks, f"a {rows} x {columns} weight needs")
    scales = source.read(scale_name).to(torch.float32, copy=True)
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise DamagedCheckpoint(f"{scale_name} in {source.folder} holds values that are not positive finite numbers")
    return Fp8Blocks(source.read(name).view(torch.uint8).clone(), scales, block)


def _must_have(source: SafetensorsSource, name: str, what: str, scale_name: str) -> None:
    if scale_name not in source:
        raise DamagedCheckpoint(f"{name} in {source.folder} is {what} but {scale_name} is missing")


def _must_be(
    source: SafetensorsSource, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], needs: str = ""
) -> None:
    """Checks type and shape in the header, before anything is read."""
    dtype, found = source.stored(name)
    where = f"{name} in {source.folder}"
    if dtype not in dtypes:
        raise DamagedCheckpoint(f"{where} is {dtype}: {' or '.join(dtypes)} is needed")
    if found != shape:
        tail = f"{needs} {list(shape)}" if needs else f"{list(shape)} is needed"
        raise DamagedCheckpoint(f"{where} has shape {list(found)}: {tail}")
