"""What a named kernel variant is (`variants` lists and compiles them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHIPS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities that kernels are compiled for."""
MAX_SPILL_BYTES = 512
"""Of one thread, unless a variant says otherwise. The largest are below 400 B (wgmma, fp8_ds_mla, 64 rows);
the portable kernels stay below 150 B."""

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""In names of variants, and Triton's names of the types."""


@dataclass(frozen=True)
class Variant:
    """One kernel with fixed compile-time arguments; `types`: Triton types of its run-time arguments by name."""

    name: str
    kernel: Any
    types: dict[str, str]
    constexprs: dict[str, object]
    chips: tuple[int, ...]
    num_warps: int = 4
    num_stages: int = 3
    max_spill: int = MAX_SPILL_BYTES


_INT_POINTERS = {"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "sched", "cache_words"}
_FLOATS = {"sm_scale", "sm_scale_log2", "ckv_scale", "kpe_scale", "out_scale"}
_FLOAT_POINTERS = {
    "lse",
    "partial_o",
    "partial_lse",
    "partial_scale",
    "ckv_scale_ptr",
    "kpe_scale_ptr",
    "out_scale_ptr",
    "scale_base",
    "words_ptr",
}


def types_of(kernel: Any, constexprs: dict[str, object], **given: str) -> dict[str, str]:
    """Types of the run-time arguments of `kernel`: `given`, else by the names that all kernels share, else int32."""
    known = (
        dict.fromkeys(_INT_POINTERS, "*i32") | dict.fromkeys(_FLOATS, "fp32") | dict.fromkeys(_FLOAT_POINTERS, "*fp32")
    )
    known |= given
    return {n: known.get(n, "i32") for n in kernel.arg_names if n not in constexprs and n != "num_warps"}


def wgmma_spill(layout: str, rows: int) -> int:
    """Rows of 64 with fp8_ds_mla spill up to 272 B with Triton 3.6 and 728 B with 3.9."""
    return 768 if (layout, rows) == ("fp8_ds_mla", 64) else MAX_SPILL_BYTES
