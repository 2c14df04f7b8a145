"""Power-of-two scales (ue8m0: an 8-bit exponent, no mantissa), held here as the float32 of the same value."""

from __future__ import annotations

import torch


def ceil_pow2(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(x)) of positive normal float32 values, exact (by the bits, not by a logarithm), up to 2^127."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
