"""The index cache: the lightning indexer's key of each token, paged like the latent rows and beside them.

This module is the only place that says where a key's bytes lie; the writer, every kernel and the oracle ask it. A page holds
the codes of all its keys first, then their scales, so that codes start at multiples of head_dim bytes whatever the page size:

| name   | bytes a key at 128 | a page of `page_size` keys                                                           |
|--------|--------------------|--------------------------------------------------------------------------------------|
| `fp8`  | 132                | page_size x head_dim e4m3, then page_size fp32 scales, one for each 128 channels       |
| `bf16` | 256                | page_size x head_dim bf16                                                              |
| `fp32` | 512                | page_size x head_dim fp32                                                              |

`fp8` pages of 64 are the bytes of DeepGEMM's paged index kernels and of vLLM's and SGLang's index cache. We write scales as
powers of two; readers accept any positive scale. Keys are stored with rope applied, without a Hadamard rotation: it changes no
dot product, and in e4m3 it gains no accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as cached

import torch

from uncast.latent.layouts import LayoutError, RowLayout
from uncast.numerics import e4m3
from uncast.numerics.ue8m0 import ceil_pow2

INDEX_LAYOUT_NAMES = ("fp8", "bf16", "fp32")
INDEX_TILE = 128
"""Channels that share one scale in `fp8`."""
MIN_AMAX = 1e-4
"""The least largest channel that a scale is made for, as in DeepSeek's code."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class IndexLayout:
    """Bytes of one page of index keys.

    Attributes:
        name: one of `INDEX_LAYOUT_NAMES`.
        head_dim: channels of a key.
        key_bytes: of the codes of one key.
        num_tiles: fp32 scales of one key; 0 without.
    """

    name: str
    head_dim: int
    key_bytes: int
    num_tiles: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one key, scales included."""
        return self.key_bytes + 4 * self.num_tiles

    def scale_offset(self, page_size: int) -> int:
        """Bytes from the start of a page to its scales."""
        return page_size * self.key_bytes


@cached
def index_layout(name: str, head_dim: int = 128) -> IndexLayout:
    """The layout `name` for keys of `head_dim` channels.

    Raises:
        LayoutError: unknown name, or `fp8` with a head_dim that is not a multiple of 128.
    """
    if name not in INDEX_LAYOUT_NAMES:
        raise LayoutError(f"unknown index cache layout {name!r}: use one of {', '.join(INDEX_LAYOUT_NAMES)}")
    if head_dim < 1:
        raise LayoutError(f"index head_dim is {head_dim}: it must be positive")
    if name != "fp8":
        return IndexLayout(name, head_dim, head_dim * _DTYPES[name].itemsize, 0)
    if head_dim % INDEX_TILE:
        raise LayoutError(
            f"an fp8 index cache needs keys of a multiple of {INDEX_TILE} channels, not {head_dim}: use bf16"
        )
    return IndexLayout(name, head_dim, head_dim, head_dim // INDEX_TILE)


def matching_layout(rows: RowLayout, head_dim: int) -> IndexLayout:
    """The layout of keys beside latent rows of `rows`: `fp8` beside FP8 ones where the keys fit it, else of the rows' dtype."""
    if rows.is_fp8:
        return index_layout("bf16" if head_dim % INDEX_TILE else "fp8", head_dim)
    return index_layout(rows.name, head_dim)


def key_scales(keys: torch.Tensor) -> torch.Tensor:
    """float32 [n, head_dim / 128]: s = 2^ceil(log2(max(amax, 1e-4) / 448)) per 128 channels of keys [n, head_dim].

    Source: DeepSeek-V3.2's and vLLM's `ue8m0` index keys. NaN and infinities do not count for amax.
    """
    tiles = keys.to(torch.float32).reshape(keys.shape[0], keys.shape[1] // INDEX_TILE, INDEX_TILE)
    amax = tiles.abs().masked_fill(~tiles.isfinite(), 0.0).amax(-1)
    return ceil_pow2(amax.clamp_min(MIN_AMAX) / e4m3.E4M3_MAX)


def store_keys(cache: torch.Tensor, keys: torch.Tensor, slot_mapping: torch.Tensor, layout: IndexLayout) -> None:
    """Writes keys [n, head_dim] (any float dtype, rope applied) to slot = page * page_size + offset (int [n]) of cache
    [num_pages, page_size, row_bytes] uint8; negative slots are skipped.

    Raises:
        LayoutError: keys or cache of another shape.
    """
    if keys.shape != (slot_mapping.shape[0], layout.head_dim) or cache.shape[-1] != layout.row_bytes:
        raise LayoutError(
            f"keys are {list(keys.shape)} for a cache of {cache.shape[-1]} bytes a key: {slot_mapping.shape[0]} slots of "
            f"index layout {layout.name} need [{slot_mapping.shape[0]}, {layout.head_dim}] and {layout.row_bytes} bytes"
        )
    if slot_mapping.shape[0] == 0:
        return
    keys, slots, written = _without_skipped(keys, slot_mapping.long())
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    codes, scales = pages_view(cache, layout)
    if not layout.num_tiles:
        code = keys.to(_DTYPES[layout.name]).contiguous().view(torch.uint8)
        codes[page, offset] = torch.where(written, code, codes[0, 0])
        return
    scale = key_scales(keys)
    code = e4m3.encode(keys.to(torch.float32) / scale.repeat_interleave(INDEX_TILE, -1))
    codes[page, offset] = torch.where(written, code, codes[0, 0])
    scales[page, offset] = torch.where(written, scale, scales[0, 0])


def _without_skipped(keys: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and slots of the same number without a negative slot: a skipped row becomes a second copy of the first one that is
    not. The third is false where all are skipped; slots are 0 then, and what is there has to stay. No value comes to the host,
    so a CUDA graph can capture it.
    """
    keep = slots >= 0
    rows = torch.where(keep, torch.arange(slots.shape[0], device=slots.device), keep.to(torch.uint8).argmax())
    return keys[rows], slots[rows].clamp_min(0), keep.any()


def pages_view(cache: torch.Tensor, layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of cache [num_pages, page_size, row_bytes]: codes uint8 [num_pages, page_size, key_bytes] and scales float32
    [num_pages, page_size, num_tiles]."""
    num_pages, page_size = cache.shape[:2]
    pages, split = cache.view(num_pages, page_size * layout.row_bytes), layout.scale_offset(page_size)
    codes = pages[:, :split].view(num_pages, page_size, layout.key_bytes)
    if not layout.num_tiles:
        return codes, torch.empty((num_pages, page_size, 0), device=cache.device)
    return codes, pages[:, split:].view(torch.float32).view(num_pages, page_size, layout.num_tiles)


def load_keys(
    cache: torch.Tensor, pages: torch.Tensor, count: int, layout: IndexLayout, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The first `count` keys of `pages` (int [n]): [count, head_dim] in `dtype`, float32 or float64, stored values exactly."""
    codes, scales = pages_view(cache.index_select(0, pages), layout)
    codes = codes.reshape(-1, layout.key_bytes)[:count]
    if not layout.num_tiles:
        return codes.contiguous().view(_DTYPES[layout.name]).to(dtype)
    values = e4m3.decode(codes).to(dtype).view(count, layout.num_tiles, INDEX_TILE)
    return values.mul_(scales.reshape(-1, layout.num_tiles)[:count, :, None].to(dtype)).view(count, layout.head_dim)
