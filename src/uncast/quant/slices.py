"""Rows and columns of a weight, packed if it is packed and its blocks allow: what one rank of a group holds of a matrix."""

from __future__ import annotations

from dataclasses import replace

import torch

from uncast.quant.packed import NVFP4_GROUP, Fp8Blocks, Nvfp4, Weight


def take_rows(weight: Weight, start: int, stop: int, dtype: torch.dtype) -> Weight:
    """Rows start..stop, a copy. FP8 blocks that a bound would cut are multiplied out to `dtype` instead."""
    if isinstance(weight, Nvfp4):
        return replace(
            weight,
            codes=weight.codes[start:stop].clone(),
            scales=weight.scales[start:stop].clone(),
            global_scale=weight.global_scale[start:stop].clone(),
        )
    if isinstance(weight, Fp8Blocks):
        block = weight.block[0]
        if start % block or (stop % block and stop != weight.shape[0]):
            return weight.dequantize(dtype)[start:stop].clone()
        scales = weight.scales[start // block : -(-stop // block)].clone()
        return replace(weight, codes=weight.codes[start:stop].clone(), scales=scales)
    return weight[start:stop].clone()


def take_columns(weight: Weight, start: int, stop: int, dtype: torch.dtype) -> Weight:
    """Columns start..stop, a contiguous copy. Groups or blocks that a bound would cut are multiplied out to `dtype` instead."""
    if isinstance(weight, Nvfp4):
        if start % NVFP4_GROUP or stop % NVFP4_GROUP:
            return weight.dequantize(dtype)[:, start:stop].clone()
        return replace(
            weight,
            codes=weight.codes[:, start // 2 : stop // 2].contiguous().clone(),
            scales=weight.scales[:, start // NVFP4_GROUP : stop // NVFP4_GROUP].contiguous().clone(),
        )
    if isinstance(weight, Fp8Blocks):
        block = weight.block[1]
        if start % block or (stop % block and stop != weight.shape[1]):
            return weight.dequantize(dtype)[:, start:stop].clone()
        scales = weight.scales[:, start // block : -(-stop // block)].contiguous().clone()
        return replace(weight, codes=weight.codes[:, start:stop].contiguous().clone(), scales=scales)
    return weight[:, start:stop].contiguous().clone()
