"""The unpacking assembly, carried out instruction by instruction. A failure means that a GPU would read other weights.

Triton's interpreter cannot run assembly, so this is what a machine without a GPU can know of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from uncast.kernels.packed_matmul import FP8_ASM, NVFP4_ASM
from uncast.numerics import e2m1, e4m3


def bf16(bits: int) -> float:
    """The value of 16 bits, subnormals included."""
    sign = -1.0 if bits & 0x8000 else 1.0
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    return sign * (mantissa * 2.0**-133 if exponent == 0 else (128 + mantissa) * 2.0 ** (exponent - 134))


def bits_of(value: float) -> int:
    """The 16 bits of a value that bf16 holds exactly."""
    bits = (
        torch.tensor(value, dtype=torch.float64).to(torch.float32).to(torch.bfloat16).view(torch.int16).item() & 0xFFFF
    )
    assert bf16(bits) == value, f"{value} is not a bf16 value"
    return bits


def prmt(a: int, b: int, selector: int) -> int:
    pool = [(x >> (8 * i)) & 0xFF for x in (a, b) for i in range(4)]
    return sum(pool[(selector >> (4 * i)) & 7] << (8 * i) for i in range(4))


def fma_bf16x2(a: int, b: int, c: int) -> int:
    halves = [bf16((a >> s) & 0xFFFF) * bf16((b >> s) & 0xFFFF) + bf16((c >> s) & 0xFFFF) for s in (0, 16)]
    return bits_of(halves[0]) | bits_of(halves[1]) << 16


def run(assembly: str, outputs: int, inputs: Sequence[int]) -> list[int]:
    """The output registers $0.. of an `asm` text whose input registers follow them."""
    values = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in assembly.strip(" {}").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        op, rest = line.strip().split(maxsplit=1)
        target, *sources = re.split(r",\s*", rest.strip())
        args = [value(source) for source in sources]
        kind = op.split(".")[0]
        if kind == "mov":
            result = args[0]
        elif kind == "prmt":
            result = prmt(*args)
        elif kind == "shl":
            result = (args[0] << args[1]) & 0xFFFFFFFF
        elif kind == "shr":
            result = args[0] >> args[1]
        elif kind in ("and", "or"):
            result = args[0] & args[1] if kind == "and" else args[0] | args[1]
        else:
            assert op == "fma.rn.bf16x2", op
            result = fma_bf16x2(*args)
        values[target] = result
    return [values[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("scale", [0x01, 0x07, 0x08, 0x38, 0x55, 0x7E])
def test_nvfp4_planes_are_code_times_scale(scale: int) -> None:
    """All codes in all places, smallest and largest e4m3 scales; results are 2^-7 of the values."""
    factor = e4m3.value_of(scale) * 2.0**119
    scales = bits_of(factor) * 0x10001
    for shift in range(16):
        nibbles = [[(i + shift) % 16 for i in range(8)], [(15 - i + shift) % 16 for i in range(8)]]
        words = [sum(code << (4 * i) for i, code in enumerate(word)) for word in nibbles]
        for i, register in enumerate(run(NVFP4_ASM.value, 8, [*words, scales])):
            for half in (0, 1):
                expected = e2m1.value_of(nibbles[half][i]) * e4m3.value_of(scale) * 2.0**-7
                assert bf16((register >> (16 * half)) & 0xFFFF) == expected
                assert math.copysign(1, bf16((register >> (16 * half)) & 0xFFFF)) == math.copysign(1, expected)


def test_fp8_planes_are_the_codes_values() -> None:
    codes = [c for c in range(256) if c & 0x7F != e4m3.NAN_CODE]
    for start in range(0, len(codes) - 8, 3):
        parts = codes[start : start + 4], codes[start + 4 : start + 8]
        words = [sum(code << (8 * i) for i, code in enumerate(part)) for part in parts]
        for i, register in enumerate(run(FP8_ASM.value, 4, words)):
            for half in (0, 1):
                assert bf16((register >> (16 * half)) & 0xFFFF) == e4m3.value_of(parts[half][i])
