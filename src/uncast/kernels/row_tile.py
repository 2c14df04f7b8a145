"""Few rows on a GPU: products see `ROW_TILE` rows, so that a row's bits do not depend on how many rows there are.

A BLAS picks its code by the number of rows, and codes differ in their last bits. With 1 to 15 rows every product here takes 16:

    memory      [row 0] ... [row n - 1] [anything] ... [anything]        `new_rows` leaves room for a whole tile
    product     of all 16; what comes of the last 16 - n is dropped

so no row is copied, and on a GPU, where few rows are bound by the bytes of the weights, a product of 16 takes as long as one of
one. The project's own kernels compute each row for itself and see the n rows alone. From 16 rows on nothing changes.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

ROW_TILE = 16
"""Rows of a tile. 16 float32 or 32 BF16 rows keep every tile of any width on a 64-byte boundary."""
DEVICES = ("cuda",)
"""Where few rows are computed so. On a CPU a row costs nearly what a step costs."""


def is_few(x: torch.Tensor) -> bool:
    """Whether x [n, ...] has fewer rows than a tile, on a device where that matters."""
    return 0 < x.shape[0] < ROW_TILE and x.device.type in DEVICES


def new_rows(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Uninitialised, contiguous [shape] on the device of `like` and of its dtype if none is given; few rows have a whole tile's
    memory."""
    made = (ROW_TILE, *shape[1:]) if 0 < shape[0] < ROW_TILE and like.device.type in DEVICES else shape
    return like.new_empty(made, dtype=dtype)[: shape[0]]


def whole_tile(x: torch.Tensor) -> torch.Tensor:
    """x [n, ...] where these are not few rows; else [ROW_TILE, ...] that begins with them. What follows is what the memory
    behind them holds, or zeros where it ends too early."""
    if not is_few(x):
        return x
    shape = (ROW_TILE, *x.shape[1:])
    last = sum((size - 1) * stride for size, stride in zip(shape, x.stride(), strict=True))
    if x.storage_offset() + last < x.untyped_storage().nbytes() // x.element_size():
        return x.as_strided(shape, x.stride(), x.storage_offset())
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, ROW_TILE - x.shape[0]))


def tile_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, columns] @ weight [rows, columns]^T; few rows as a whole tile."""
    return F.linear(whole_tile(x), weight)[: x.shape[0]] if is_few(x) else F.linear(x, weight)
