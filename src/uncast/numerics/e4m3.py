"""FP8 e4m3 (the OCP "fn" variant): 1 sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, NaN is 0x7f and 0xff.

Finite codes: |value| = m * 2^-9 for exponent 0 (subnormal, m = 0..7), else (8 + m) * 2^(e - 10); the largest is 448.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
NAN_CODE = 0x7F

_FP16_SCALE = 256.0  # e4m3 bits moved into fp16's fields read as value * 2^-8 (exponent biases 7 and 15)


def value_of(code: int) -> float:
    """The value of one code by the format's definition, independent of any library's conversion."""
    if not 0 <= code <= 255:
        raise ValueError(f"an e4m3 code is 0 to 255, not {code}")
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def table() -> torch.Tensor:
    """float64 [256], the value of each code."""
    return torch.tensor([value_of(c) for c in range(256)], dtype=torch.float64)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, same shape) of x, rounded to nearest even from float32, saturating at +-448; NaN stays NaN."""
    clamped = x.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: torch.Tensor, *, out: torch.Tensor | None = None, bits: torch.Tensor | None = None) -> torch.Tensor:
    """float32 values (same shape) of uint8 codes, exact, NaN codes as NaN.

    The e4m3 fields are moved into fp16's by integer operations, which torch vectorises on a CPU (its own float8 conversion
    is scalar, 60 times slower); fp16 then holds value * 2^-8 exactly, subnormals included.

    Args:
        codes: uint8, any shape and strides.
        out: float32 of the same shape to write into.
        bits: int16 scratch of the same shape.
    """
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device) if out is None else out
    bits = torch.empty(codes.shape, dtype=torch.int16, device=codes.device) if bits is None else bits
    bits.copy_(codes.view(torch.int8))  # sign-extended: after the shift, bits 15 and 14 are the sign
    bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values.copy_(bits.view(torch.float16)).mul_(_FP16_SCALE)
    if values.numel():
        low, high = torch.aminmax(values)
        if float(high) > E4M3_MAX or float(low) < -E4M3_MAX:  # NaN's fields read as 480
            values.masked_fill_(values.abs() > E4M3_MAX, float("nan"))
    return values
