"""Row layouts of the latent cache: what the bytes of one token in one layer mean.

This module is the only place that says where a field lies in a row; the writer, every kernel and the oracle ask it.

| name         | bytes at 512/64 | a row                                                                                |
|--------------|-----------------|--------------------------------------------------------------------------------------|
| `fp32`       | 2304            | ckv fp32, kpe fp32                                                                    |
| `bf16`       | 1152            | ckv bf16, kpe bf16                                                                    |
| `fp8_e4m3`   | 576             | ckv e4m3, kpe e4m3; the scales `ckv_scale`, `kpe_scale` live outside, one per layer   |
| `fp8_ds_mla` | 656             | 512 ckv e4m3, 4 fp32 scales (one per 128 channels), 64 kpe bf16; only 512/64          |

`fp8_ds_mla` is the layout of FlashMLA's FP8 sparse kernels and of vLLM's cache dtype of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

LAYOUT_NAMES = ("fp32", "bf16", "fp8_e4m3", "fp8_ds_mla")
DS_MLA_TILE = 128
"""Channels that share one scale in `fp8_ds_mla`."""


class LayoutError(ValueError):
    """A layout that does not exist or does not fit the head dimensions."""


@dataclass(frozen=True)
class RowLayout:
    """Byte offsets of one cache row.

    Attributes:
        name: one of `LAYOUT_NAMES`.
        kv_lora_rank: latent channels (ckv).
        qk_rope_head_dim: rope channels (kpe).
        ckv_dtype, kpe_dtype: storage dtypes as strings: "fp32", "bf16" or "e4m3".
        ckv_offset, scale_offset, kpe_offset: bytes from the start of the row; `scale_offset` is -1 without in-row scales.
        num_tiles: number of in-row fp32 scales.
        row_bytes: bytes of a row; rows are contiguous.
    """

    name: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    ckv_dtype: str
    kpe_dtype: str
    ckv_offset: int
    scale_offset: int
    kpe_offset: int
    num_tiles: int
    row_bytes: int

    @property
    def has_external_scales(self) -> bool:
        """Whether `ckv_scale` and `kpe_scale` apply (only `fp8_e4m3`)."""
        return self.name == "fp8_e4m3"

    @property
    def is_fp8(self) -> bool:
        return self.ckv_dtype == "e4m3"


_ITEM = {"fp32": 4, "bf16": 2, "e4m3": 1}


@cache
def row_layout(name: str, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> RowLayout:
    """The layout `name` for these head dimensions; `auto` picks `fp8_ds_mla` at 512/64 and `bf16` elsewhere.

    Raises:
        LayoutError: unknown name, non-positive dimensions, or `fp8_ds_mla` with dimensions other than 512/64.
    """
    if kv_lora_rank <= 0 or qk_rope_head_dim < 0:
        raise LayoutError(f"kv_lora_rank {kv_lora_rank} and qk_rope_head_dim {qk_rope_head_dim} must be positive")
    if name == "auto":
        name = "fp8_ds_mla" if (kv_lora_rank, qk_rope_head_dim) == (512, 64) else "bf16"
    if name in ("e5m2", "fp8_e5m2"):
        raise LayoutError(
            f"KV cache layout {name!r} is refused: no kernel reads e5m2 rows, whose 2 mantissa bits are too few for a latent; "
            "use fp8_ds_mla or fp8_e4m3"
        )
    if name not in LAYOUT_NAMES:
        raise LayoutError(f"unknown KV cache layout {name!r}: use one of auto, {', '.join(LAYOUT_NAMES)}")
    if name == "fp8_ds_mla":
        if (kv_lora_rank, qk_rope_head_dim) != (512, 64):
            raise LayoutError(
                f"fp8_ds_mla is defined for kv_lora_rank 512 and qk_rope_head_dim 64 only, not {kv_lora_rank} and "
                f"{qk_rope_head_dim}: use fp8_e4m3 or bf16"
            )
        return RowLayout(name, 512, 64, "e4m3", "bf16", 0, 512, 528, 4, 656)
    dtype = {"fp32": "fp32", "bf16": "bf16", "fp8_e4m3": "e4m3"}[name]
    kpe_offset = kv_lora_rank * _ITEM[dtype]
    row_bytes = kpe_offset + qk_rope_head_dim * _ITEM[dtype]
    return RowLayout(name, kv_lora_rank, qk_rope_head_dim, dtype, dtype, 0, -1, kpe_offset, 0, row_bytes)
