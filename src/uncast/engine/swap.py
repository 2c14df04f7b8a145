"""Pages to host memory and back, byte for byte in their stored layout: nothing is decoded and nothing is recomputed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from uncast.latent.pool import PagedPool
from uncast.verify.guard import allow_swap


def copy_out(pool: PagedPool, pages: Seq[int]) -> torch.Tensor:
    """uint8 [num_layers, len(pages), page_size, row_bytes] on the host: the pages' bytes, in the order given.

    One page at a time, so that no device buffer holds more than it needs to.
    """
    shape = (pool.num_layers, len(pages), pool.page_size, pool.layout.row_bytes)
    host = torch.empty(shape, dtype=torch.uint8)
    with allow_swap():
        for index, page in enumerate(pages):
            host[:, index].copy_(pool.storage[:, page])
    return host


def copy_in(pool: PagedPool, host: torch.Tensor, pages: Seq[int]) -> None:
    """Writes what `copy_out` returned into `pages`, which need not be the pages it came from.

    Raises:
        ValueError: as many pages as were copied out are needed.
    """
    if host.shape[1] != len(pages):
        raise ValueError(f"{host.shape[1]} pages were copied out and cannot go into {len(pages)}")
    for index, page in enumerate(pages):
        pool.storage[:, page].copy_(host[:, index])
