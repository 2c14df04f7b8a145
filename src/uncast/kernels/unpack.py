"""Unpack: four e4m3 codes in one 32-bit register -> two registers of fp16 pairs, exact for all 254 finite codes.

A tile of FP8 rows lies in shared memory as uint16 channel pairs; `ldmatrix` brings, per register,

    key fragment (k along channels)              value fragment (`ldmatrix.trans`, k along tokens)
    byte 0..3 = channels 4i, 4i+1, 4i+2, 4i+3    byte 0, 1 = channels 2c, 2c+1 of token t; byte 2, 3 = the same of t + 1

and one unpack yields two fp16 operands that are already in the MMA's register layout:

                     NATIVE (`cvt`, sm_89 and newer)              integer (sm_80, sm_86: no e4m3 type reaches the compiler)
    keys, first      channels 4i, 4i+1                            channels 4i, 4i+2
    keys, second     channels 4i+2, 4i+3                          channels 4i+1, 4i+3
    values           even channel (t, t+1), odd channel (t, t+1)  the same
    values mean      value                                        value * 2^-8 (`INTEGER_FACTOR` restores it)
    NaN codes        NaN                                          NaN

Queries are stored in shared memory in the order of the keys, so no byte permutation is spent on keys.
The integer path moves e4m3's exponent and mantissa into fp16's fields: fp16 has the bias 15 instead of 7, hence 2^-8, and
e4m3's subnormals stay exact as fp16 normals or subnormals. Source of the formulas: the OCP FP8 specification and IEEE 754.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INTEGER_FACTOR = 256.0
"""Multiply results of the integer path with it, once per use of an unpacked operand."""
NATIVE_ARCH = 89
"""First compute capability with `cvt.rn.f16x2.e4m3x2`."""

CVT_KEYS = gl.constexpr("""{
.reg .b16 lo, hi;
mov.b32 {lo, hi}, $2;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
}""")
CVT_VALUES = gl.constexpr("""{
.reg .b32 e;
.reg .b16 lo, hi;
prmt.b32 e, $2, 0, 0x3120;
mov.b32 {lo, hi}, e;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
}""")
# t: magnitudes; n: bit 7 of a byte is set only for a NaN code; w: magnitudes with that bit, which lands in fp16's exponent.
INTEGER = gl.constexpr("""{
.reg .b32 t, n, w, a, s;
and.b32 t, $2, 0x7f7f7f7f;
add.u32 n, t, 0x01010101;
and.b32 n, n, 0x80808080;
or.b32 w, n, t;
shl.b32 a, w, 7;
and.b32 a, a, 0x7f807f80;
shl.b32 s, $2, 8;
and.b32 s, s, 0x80008000;
or.b32 $0, a, s;
shr.u32 a, w, 1;
and.b32 a, a, 0x7f807f80;
and.b32 s, $2, 0x80008000;
or.b32 $1, a, s;
}""")


def is_native(arch: int) -> bool:
    """Whether compute capability `arch` (major * 10 + minor) converts e4m3 in hardware."""
    return arch >= NATIVE_ARCH


@gluon.jit
def _unpack(x, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, "=&r,=&r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def unpack_keys(x, NATIVE: gl.constexpr):
    """int16 channel pairs, pairs of them along k -> two fp16 operands of the same shape; orders and factor above."""
    if NATIVE:
        first, second = _unpack(x, CVT_KEYS)
    else:
        first, second = _unpack(x, INTEGER)
    return first, second


@gluon.jit
def unpack_values(x, NATIVE: gl.constexpr):
    """int16 channel pairs, pairs of tokens along k -> fp16 operands of the even and of the odd channels."""
    if NATIVE:
        even, odd = _unpack(x, CVT_VALUES)
    else:
        even, odd = _unpack(x, INTEGER)
    return even, odd


@gluon.jit
def split_queries(x, ROWS: gl.constexpr, WIDTH: gl.constexpr, NATIVE: gl.constexpr):
    """[ROWS, WIDTH] channels -> the two [ROWS, WIDTH // 2] operands that meet `unpack_keys`' two."""
    y = x.reshape([ROWS, WIDTH // 4, 2, 2])
    if NATIVE:
        y = y.permute((0, 1, 3, 2))
    first, second = gl.split(y)
    return first.reshape([ROWS, WIDTH // 2]), second.reshape([ROWS, WIDTH // 2])


SCALED_KEYS = gl.constexpr("""{
.reg .b16 lo, hi;
mov.b32 {lo, hi}, $2;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}""")
SCALED_VALUES = gl.constexpr("""{
.reg .b32 e;
.reg .b16 lo, hi;
prmt.b32 e, $2, 0, 0x3120;
mov.b32 {lo, hi}, e;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}""")


@gluon.jit
def _unpack_scaled(x, scale, ASM: gl.constexpr):
    scale, x = gl.broadcast(scale, x)
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,r,r", [x, scale], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def unpack_keys_scaled(x, scale):
    """`unpack_keys` (native) times `scale`, fp16 and constant along k: one more instruction per operand register."""
    return _unpack_scaled(x, scale, SCALED_KEYS)


@gluon.jit
def unpack_values_scaled(x, scale):
    """`unpack_values` (native) times `scale`, fp16, one per token."""
    return _unpack_scaled(x, scale, SCALED_VALUES)


@triton.jit
def decode_codes(x, NATIVE: tl.constexpr):
    """uint8 codes -> fp16 of the same shape, for kernels in plain Triton; the same two paths and the same factor."""
    if NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    size = x.to(tl.int16) & 0x7F
    sign = (x.to(tl.int16) & 0x80) << 8
    return (((size | ((size + 1) & 0x80)) << 7) | sign).to(tl.float16, bitcast=True)
