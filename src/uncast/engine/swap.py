"""Pages to host memory and back, byte for byte in their stored layout: nothing is decoded and nothing is recomputed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from uncast.latent.pool import PagedPool
from uncast.verify.guard import allow_swap


@dataclass(frozen=True)
class HostPages:
    """Pages in host memory.

    Attributes:
        parts: for each of the pool's storages (latent rows; index keys) uint8 [layers, num_pages, page_size, row_bytes].
    """

    parts: tuple[torch.Tensor, ...]

    @property
    def num_pages(self) -> int:
        return self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def copy_out(pool: PagedPool, pages: Seq[int]) -> HostPages:
    """The pages' bytes, in the order given.

    One page at a time, so that no device buffer holds more than it needs to.
    """
    return HostPages(tuple(_copy_out(storage, pages) for storage in pool.storages))


def _copy_out(storage: torch.Tensor, pages: Seq[int]) -> torch.Tensor:
    host = torch.empty((storage.shape[0], len(pages), *storage.shape[2:]), dtype=torch.uint8)
    with allow_swap():
        for index, page in enumerate(pages):
            host[:, index].copy_(storage[:, page])
    return host


def copy_in(pool: PagedPool, host: HostPages, pages: Seq[int]) -> None:
    """Writes what `copy_out` returned into `pages`, which need not be the pages it came from.

    Raises:
        ValueError: as many pages as were copied out are needed.
    """
    if host.num_pages != len(pages):
        raise ValueError(f"{host.num_pages} pages were copied out and cannot go into {len(pages)}")
    for storage, part in zip(pool.storages, host.parts, strict=True):
        for index, page in enumerate(pages):
            storage[:, page].copy_(part[:, index])
    if pool.after_copy_in is not None:
        pool.after_copy_in(pages)
