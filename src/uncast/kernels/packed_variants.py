"""The named variants of products with packed weights, for `variants`."""

from __future__ import annotations

from collections.abc import Iterator

from uncast.kernels import packed_matmul
from uncast.kernels.variant import CHIPS, Variant, types_of

WIDE_CHIPS = tuple(c for c in CHIPS if c // 10 in packed_matmul.WIDE_CHIPS)


def packed_variants() -> Iterator[Variant]:
    """Products of GLM-5's experts (6144 x 2048, 256) and of a lone matrix, columns split."""
    for name, format_ in (("nvfp4", packed_matmul.NVFP4.value), ("fp8", packed_matmul.FP8.value)):
        planes = packed_matmul.PLANES[format_]
        for rows in (16, 32, 64):
            for label, args in (
                ("gated", {"columns": 6144, "experts": 256, "gated": True, "gather": 8, "out_planes": planes}),
                ("down", {"columns": 2048, "experts": 256, "scatter": True}),
                ("split", {"columns": 7168, "experts": 1, "splits": 4}),
            ):
                if rows == 16 or label == "gated":
                    given = packed_matmul.constexprs(format_, rows=rows, **args)  # type: ignore[arg-type]
                    types = types_of(
                        packed_matmul.packed_matmul_kernel, given, x="*bf16", words="*i32", pairs="*i64", ends="*i32",
                        scales="*u8" if name == "nvfp4" else "*fp32", global_scale="*fp32", weights="*fp32",
                        out="*fp32" if label == "split" else "*bf16",
                    )  # fmt: skip
                    yield Variant(
                        f"packed_{name}_{label}_rows{rows}", packed_matmul.packed_matmul_kernel, types, given,
                        CHIPS if rows < 64 else WIDE_CHIPS, packed_matmul.NUM_WARPS, packed_matmul.num_stages(rows),
                    )  # fmt: skip
