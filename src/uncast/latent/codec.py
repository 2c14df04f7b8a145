"""Rows to bytes and back: the reference writer and reader of every layout.

Kernels are byte-identical to `encode_rows`; the float64 oracle reads through `decode_rows`.
"""

from __future__ import annotations

import torch

from uncast.latent.layouts import DS_MLA_TILE, RowLayout
from uncast.numerics import e4m3
from uncast.numerics.ue8m0 import ceil_pow2

Scale = float | torch.Tensor | None
"""A per-layer scale of `fp8_e4m3`: host float, fp32 tensor of one element, or None for 1.0."""

SATURATED, SUBNORMAL, NAN = 0, 1, 2
"""Indices into `counters`: |x| > 448 * scale; 0 < |x| < 2^-6 * scale; NaN."""

DS_MLA_MIN_SCALE = 1e-4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ScaleError(ValueError):
    """A scale that is not positive and finite, or given for a layout that has none."""


class RowError(ValueError):
    """Rows that do not fit the layout or the cache."""


def check_scale(layout: RowLayout, name: str, scale: Scale) -> None:
    """Raises `ScaleError` in one sentence; a device tensor's value is not looked at."""
    if scale is None:
        return
    if not layout.has_external_scales:
        if isinstance(scale, torch.Tensor) or scale != 1.0:
            raise ScaleError(f"{name} was given, but layout {layout.name} has no per-layer scale: pass None")
    elif isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ScaleError(f"{name} must be one float32 value, not {scale.dtype} {list(scale.shape)}")
    elif not 0.0 < scale < float("inf"):
        raise ScaleError(f"{name} is {scale}: it must be positive and finite")


def new_counters(device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [3] zeros: saturated, subnormal and NaN values seen by a writer."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def _divide(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    x = x.to(torch.float32)
    if scale is None:
        return x
    return x / (scale.to(x.device) if isinstance(scale, torch.Tensor) else torch.tensor(scale, device=x.device))


def _encode_e4m3(scaled: torch.Tensor, counters: torch.Tensor | None) -> torch.Tensor:
    if counters is not None:
        size = scaled.abs()
        counters[SATURATED] += (size > e4m3.E4M3_MAX).sum()
        counters[SUBNORMAL] += ((size > 0) & (size < e4m3.E4M3_MIN_NORMAL)).sum()
        counters[NAN] += scaled.isnan().sum()
    return e4m3.encode(scaled)


def ds_mla_scales(ckv: torch.Tensor) -> torch.Tensor:
    """float32 [n, 4]: s = 2^ceil(log2(max(amax / 448, 1e-4))) per 128 channels of ckv [n, 512].

    Source: FlashMLA's `tests/quant.py` and vLLM's `concat_and_cache_ds_mla`. NaN and infinities do not count for amax, so a
    tile that holds one keeps a finite scale.
    """
    tiles = ckv.to(torch.float32).reshape(*ckv.shape[:-1], ckv.shape[-1] // DS_MLA_TILE, DS_MLA_TILE)
    amax = tiles.abs().masked_fill(~tiles.isfinite(), 0.0).amax(-1)
    return ceil_pow2((amax / e4m3.E4M3_MAX).clamp_min(DS_MLA_MIN_SCALE))


def encode_rows(
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    layout: RowLayout,
    *,
    ckv_scale: Scale = None,
    kpe_scale: Scale = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bytes of n rows.

    Args:
        ckv: [n, kv_lora_rank] any float dtype; kpe: [n, qk_rope_head_dim], rope applied.
        ckv_scale, kpe_scale: `fp8_e4m3` stores x / scale; other layouts take None.
        counters: int64 [3], see `new_counters`; counts the FP8 parts only.

    Returns:
        uint8 [n, row_bytes].

    Raises:
        ScaleError: see `check_scale`.
        RowError: ckv, kpe or counters of another shape or dtype.
    """
    _check_rows(ckv, kpe, layout, counters)
    check_scale(layout, "ckv_scale", ckv_scale)
    check_scale(layout, "kpe_scale", kpe_scale)
    if not layout.is_fp8:
        dtype = _DTYPES[layout.ckv_dtype]
        return torch.cat([ckv.to(dtype), kpe.to(dtype)], dim=-1).view(torch.uint8)
    if layout.has_external_scales:
        parts = [_divide(ckv, ckv_scale), _divide(kpe, kpe_scale)]
        return torch.cat([_encode_e4m3(p, counters) for p in parts], dim=-1)
    scales = ds_mla_scales(ckv)
    scaled = ckv.to(torch.float32) / scales.repeat_interleave(DS_MLA_TILE, -1)
    codes = _encode_e4m3(scaled, counters)
    return torch.cat([codes, scales.view(torch.uint8), kpe.to(torch.bfloat16).contiguous().view(torch.uint8)], dim=-1)


def _check_rows(ckv: torch.Tensor, kpe: torch.Tensor, layout: RowLayout, counters: torch.Tensor | None) -> None:
    for name, rows, width in (("ckv", ckv, layout.kv_lora_rank), ("kpe", kpe, layout.qk_rope_head_dim)):
        if tuple(rows.shape) != (ckv.shape[0], width) or not rows.is_floating_point():
            raise RowError(
                f"{name} is {rows.dtype} {list(rows.shape)}: rows of {layout.name} need floats [{ckv.shape[0]}, {width}]"
            )
    if counters is not None and (counters.dtype != torch.int64 or tuple(counters.shape) != (3,)):
        raise RowError(f"counters is {counters.dtype} {list(counters.shape)}: it must be int64 [3]")


def decode_rows(
    rows: torch.Tensor,
    layout: RowLayout,
    *,
    ckv_scale: Scale = None,
    kpe_scale: Scale = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of rows, the inverse of `encode_rows`.

    Args:
        rows: uint8 [n, row_bytes].
        dtype: float32 or float64; stored values and their products with a scale are exact in float64.

    Returns:
        ckv [n, kv_lora_rank] and kpe [n, qk_rope_head_dim] in `dtype`.
    """
    check_scale(layout, "ckv_scale", ckv_scale)
    check_scale(layout, "kpe_scale", kpe_scale)
    ckv_bytes, kpe_bytes = rows[:, : layout.kpe_offset], rows[:, layout.kpe_offset :]
    if not layout.is_fp8:
        stored = _DTYPES[layout.ckv_dtype]
        return ckv_bytes.contiguous().view(stored).to(dtype), kpe_bytes.contiguous().view(stored).to(dtype)
    if layout.has_external_scales:
        ckv, kpe = e4m3.decode(ckv_bytes).to(dtype), e4m3.decode(kpe_bytes).to(dtype)
        return _multiply(ckv, ckv_scale), _multiply(kpe, kpe_scale)
    scales = ckv_bytes[:, layout.scale_offset :].contiguous().view(torch.float32).to(dtype)
    ckv = e4m3.decode(ckv_bytes[:, : layout.scale_offset]).to(dtype)
    ckv = ckv.view(-1, layout.num_tiles, DS_MLA_TILE).mul_(scales[..., None]).view(-1, layout.kv_lora_rank)
    return ckv, kpe_bytes.contiguous().view(torch.bfloat16).to(dtype)


def _multiply(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    if scale is None:
        return x
    return x.mul_(scale.to(x.device, x.dtype) if isinstance(scale, torch.Tensor) else scale)


def store_rows(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Puts rows [n, row_bytes] into cache [num_pages, page_size, row_bytes] at slot = page * page_size + offset (int64 [n]);
    negative slots are skipped.

    Raises:
        RowError: rows of another width than the cache's, or not as many as slots.
    """
    if tuple(rows.shape) != (slot_mapping.shape[0], cache.shape[-1]):
        raise RowError(
            f"rows are {list(rows.shape)}: {slot_mapping.shape[0]} slots of this cache need "
            f"[{slot_mapping.shape[0]}, {cache.shape[-1]}]"
        )
    keep = slot_mapping >= 0
    flat = cache.view(-1, cache.shape[-1])
    flat[slot_mapping[keep].long()] = rows[keep]
