"""Random packed weights: every code, scales over their whole range, both signs."""

from __future__ import annotations

import torch

from uncast.numerics import e4m3
from uncast.quant.packed import Fp8Blocks, Nvfp4


def random_nvfp4(*shape: int) -> Nvfp4:
    """Codes at random; block scales from subnormal to large."""
    *lead, rows, columns = shape
    codes = torch.randint(0, 256, (*lead, rows, columns // 2), dtype=torch.uint8)
    scales = e4m3.encode(torch.exp2(torch.rand(*lead, rows, columns // 16) * 17 - 9))
    return Nvfp4(codes, scales, 1e-3 * (1 + torch.rand(*lead, rows)))


def random_fp8(*shape: int) -> Fp8Blocks:
    """Codes at random but NaN; a scale for each block of 128 x 128."""
    *lead, rows, columns = shape
    codes = torch.randint(0, 127, shape, dtype=torch.uint8) | (torch.randint(0, 2, shape, dtype=torch.uint8) << 7)
    return Fp8Blocks(codes, torch.rand(*lead, -(-rows // 128), -(-columns // 128)) * 1e-3 + 1e-4)
