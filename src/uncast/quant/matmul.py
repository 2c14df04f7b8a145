"""x @ w^T for dense and packed w: by torch where it is dense (few rows as a whole tile, see `uncast.kernels.row_tile`), by our
kernel on a GPU, else dequantised on use."""

from __future__ import annotations

import importlib.util

import torch

from uncast.kernels.row_tile import tile_linear, whole_tile
from uncast.quant.packed import Nvfp4, Packed, Weight

KERNEL_DTYPE = torch.bfloat16
KERNEL_COLUMNS = 128
"""Columns must be a multiple of it; so must an FP8 block's."""
MAX_KERNEL_ROWS = 256
"""Rows of x from which on one matrix is dequantised first: the product is bound by arithmetic then."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def kernel_serves(x: torch.Tensor, weight: Packed) -> bool:
    """Whether our kernel takes this product: a GPU, Triton, BF16 activations, columns in whole tiles."""
    if x.device.type != "cuda" or x.dtype != KERNEL_DTYPE or not _HAS_TRITON or weight.shape[-1] % KERNEL_COLUMNS:
        return False
    return isinstance(weight, Nvfp4) or (weight.block[1] % KERNEL_COLUMNS == 0 and weight.block[0] % 64 == 0)


def grouped_serves(x: torch.Tensor, *stacks: Weight) -> bool:
    """Whether `grouped.moe` takes these stacks of experts: dense ones go to torch's grouped product, packed ones to ours."""
    if x.device.type != "cuda" or x.dtype != KERNEL_DTYPE or not _HAS_TRITON:
        return False
    return all(isinstance(w, torch.Tensor) or kernel_serves(x, w) for w in stacks)


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [n, columns] @ weight [rows, columns]^T, in x's dtype."""
    if isinstance(weight, torch.Tensor):
        return tile_linear(x, weight)
    if 0 < x.shape[0] <= MAX_KERNEL_ROWS and kernel_serves(x, weight):
        from uncast.quant.grouped import packed_linear  # needs Triton

        return packed_linear(x, weight)
    return tile_linear(x, weight.dense(x.dtype))


def linear_wide(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [n, columns] @ weight [rows, columns]^T in float32: from the accumulator on a GPU, else rounded to x's dtype before."""
    if x.dtype == torch.float32 or x.device.type != "cuda":
        return linear(x, weight).to(torch.float32)
    if isinstance(weight, Packed):
        if 0 < x.shape[0] <= MAX_KERNEL_ROWS and kernel_serves(x, weight):
            from uncast.quant.grouped import packed_linear  # needs Triton

            return packed_linear(x, weight, torch.float32)
        weight = weight.dense(x.dtype)
    return torch.mm(whole_tile(x), weight.T, out_dtype=torch.float32)[: x.shape[0]]
