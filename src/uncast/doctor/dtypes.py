"""Spellings of dtypes in profiler traces and kernel names -> short names and bytes."""

from __future__ import annotations

_SPELLINGS = {
    "c10::bfloat16": "bf16", "bfloat16": "bf16", "__nv_bfloat16": "bf16", "__hip_bfloat16": "bf16",
    "c10::half": "fp16", "half": "fp16", "__half": "fp16", "float16": "fp16",
    "float": "fp32", "float32": "fp32", "double": "fp64", "float64": "fp64",
    "c10::float8_e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3",
    "c10::float8_e4m3fnuz": "fp8_e4m3fnuz", "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "c10::float8_e5m2": "fp8_e5m2", "float8_e5m2": "fp8_e5m2",
    "c10::float8_e5m2fnuz": "fp8_e5m2fnuz", "c10::float8_e8m0fnu": "fp8_e8m0",
    "c10::float4_e2m1fn_x2": "fp4x2",
    "int": "int32", "int32": "int32", "long": "int64", "long int": "int64", "int64": "int64", "long long": "int64",
    "short": "int16", "short int": "int16", "int16": "int16", "unsigned char": "uint8", "uint8": "uint8",
    "byte": "uint8", "signed char": "int8", "char": "int8", "int8": "int8",
    "unsigned int": "uint32", "unsigned short": "uint16", "unsigned long": "uint64", "bool": "bool",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_BYTES = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int32": 4, "int64": 8, "int16": 2, "uint8": 1, "int8": 1, "bool": 1,
    "uint32": 4, "uint16": 2, "uint64": 8, "complex64": 8, "complex128": 16, "fp4x2": 1,
}  # fmt: skip


def short_name(spelling: str) -> str | None:
    """The short name of a dtype as a trace or a kernel name spells it; None for scalars, lists and unknown types."""
    return _SPELLINGS.get(spelling.strip().lower())


def size_of(name: str) -> int:
    """Bytes of one element of a short name; every 8-bit float is 1."""
    return 1 if is_fp8(name) else _BYTES[name]


def is_fp8(name: str | None) -> bool:
    return name is not None and name.startswith("fp8_")
