"""FP4 e2m1: 1 sign, 2 exponent bits (bias 1), 1 mantissa bit; no infinity, no NaN.

Two codes a byte, the even element in the low nibble. Codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3.
"""

from __future__ import annotations

import functools

import torch

E2M1_MAX = 6.0


def value_of(code: int) -> float:
    """The value of one code by the format's definition."""
    if not 0 <= code <= 15:
        raise ValueError(f"an e2m1 code is 0 to 15, not {code}")
    sign, exponent, mantissa = (-1.0 if code & 8 else 1.0), (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1.0 + 0.5 * mantissa) * 2.0 ** (exponent - 1))


def table() -> torch.Tensor:
    """float64 [16], the value of each code."""
    return torch.tensor([value_of(c) for c in range(16)], dtype=torch.float64)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, same shape) of x, rounded to nearest even, saturating at +-6.

    Raises:
        ValueError: a NaN, which the format does not have.
    """
    if bool(x.isnan().any()):
        raise ValueError("e2m1 has no NaN")
    size = x.to(torch.float32).abs()
    # Halfway points between neighbours; a tie goes to the even code, so odd codes' upper bounds are exclusive.
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    code = torch.bucketize(size, bounds)  # ties down: right for the bounds above an even code
    odd_ties = (size == 0.75) | (size == 1.75) | (size == 3.5)
    code = code + odd_ties.to(code.dtype)
    return (code + 8 * torch.signbit(x).to(code.dtype)).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n / 2] of codes uint8 [..., n], n even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., 2 n] of packed uint8 [..., n]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def decode(packed: torch.Tensor) -> torch.Tensor:
    """float32 [..., 2 n] of packed uint8 [..., n]: a table lookup by byte, two values at a time."""
    pairs = _pairs(packed.device)
    return pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """float32 [256, 2], the two values of each byte."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    return table().to(torch.float32)[unpack(bytes_[:, None]).to(torch.int64)].to(device)
