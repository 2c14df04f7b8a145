"""Weights that stay packed (NVFP4, FP8 blocks), and their matrix products."""

from uncast.quant.packed import DequantCache, Fp8Blocks, Nvfp4, Packed, Weight, concat_rows

__all__ = ["DequantCache", "Fp8Blocks", "Nvfp4", "Packed", "Weight", "concat_rows"]
