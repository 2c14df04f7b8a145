"""A paged pool of latent rows, shared by all layers: one page number means the same rows in every layer.

A model with sparse attention has a second cache beside the rows, the indexer's keys of its full layers. It shares the page
numbers: page 7 holds the latent rows and the index keys of the same tokens, and is owned, shared and moved as one.

A page is free (on the free list, refcount 0) or held (refcount >= 1); requests that share a prefix share its pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from uncast.latent.index_keys import IndexLayout
from uncast.latent.layouts import RowLayout

MAX_PAGE_SIZE = 128


class PoolError(RuntimeError):
    """A page used against its ownership: freed twice, retained while free, out of range."""


class OutOfPages(PoolError):
    """More pages were asked for than are free."""

    def __init__(self, wanted: int, free: int, total: int) -> None:
        super().__init__(f"the KV pool is full: {wanted} pages were asked for, {free} of {total} are free")
        self.wanted, self.free, self.total = wanted, free, total


def check_page_size(page_size: int) -> None:
    """Raises `ValueError` unless it is a power of two from 1 to 128."""
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"page_size is {page_size}: allowed are powers of two from 1 to {MAX_PAGE_SIZE}")


class PagedPool:
    """Storage and page ownership.

    Attributes:
        storage: uint8 [num_layers, num_pages, page_size, row_bytes].
        index_layout: of the index keys; None without an index cache.
        index_storage: uint8 [num_index_layers, num_pages, page_size, index row_bytes]; None without.
        after_copy_in: called with pages whose bytes came back from the host; None calls nothing.
    """

    def __init__(
        self,
        layout: RowLayout,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int = 64,
        device: torch.device | str = "cpu",
        index_layout: IndexLayout | None = None,
        num_index_layers: int = 0,
    ) -> None:
        """Raises `ValueError` on sizes that are not positive, a page_size that is not a power of two 1..128, or an index layout
        without layers or the reverse."""
        check_page_size(page_size)
        if num_layers < 1 or num_pages < 1:
            raise ValueError(f"a pool needs at least 1 layer and 1 page, not {num_layers} and {num_pages}")
        if num_index_layers < 0 or (index_layout is None) != (num_index_layers == 0):
            raise ValueError(
                f"an index cache of {num_index_layers} layers and layout {index_layout} go together or not at all"
            )
        self.layout, self.page_size, self.num_pages = layout, page_size, num_pages
        self.index_layout = index_layout
        self.storage = torch.zeros(
            (num_layers, num_pages, page_size, layout.row_bytes), dtype=torch.uint8, device=device
        )
        self.index_storage: torch.Tensor | None = None
        if index_layout is not None:
            self.index_storage = torch.zeros(
                (num_index_layers, num_pages, page_size, index_layout.row_bytes), dtype=torch.uint8, device=device
            )
        self.after_copy_in: Callable[[Sequence[int]], None] | None = None
        self._refcount = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_layers(self) -> int:
        return self.storage.shape[0]

    @property
    def storages(self) -> tuple[torch.Tensor, ...]:
        """Everything that a page's bytes are in: uint8 [layers, num_pages, page_size, row_bytes] each."""
        return (self.storage,) if self.index_storage is None else (self.storage, self.index_storage)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def layer(self, index: int) -> torch.Tensor:
        """uint8 [num_pages, page_size, row_bytes], the cache tensor of one layer."""
        return self.storage[index]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` rows."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with refcount 1, all or none.

        Raises:
            OutOfPages: fewer are free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.num_pages)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refcount[page] = 1
        return pages

    def refcount(self, page: int) -> int:
        self._check_page(page)
        return self._refcount[page]

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for each page; all or none.

        Raises:
            PoolError: a page is free or out of range.
        """
        pages = list(pages)
        for page in pages:
            self._check_page(page)
            if self._refcount[page] == 0:
                raise PoolError(f"page {page} is free and cannot be retained")
        for page in pages:
            self._refcount[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; a page without owners is free. All or none.

        Raises:
            PoolError: a page would lose more owners than it has, or is out of range.
        """
        counts = Counter(pages)
        for page, times in counts.items():
            self._check_page(page)
            if self._refcount[page] < times:
                raise PoolError(f"page {page} was released {times} times but has {self._refcount[page]} owners")
        for page, times in counts.items():
            self._refcount[page] -= times
            if self._refcount[page] == 0:
                self._free.append(page)

    def block_table(self, pages: Sequence[Sequence[int]]) -> torch.Tensor:
        """int32 [batch, longest], the page lists padded with -1."""
        width = max((len(p) for p in pages), default=0)
        padded = [[*p, *([-1] * (width - len(p)))] for p in pages]
        return torch.tensor(padded, dtype=torch.int32, device=self.storage.device).reshape(len(pages), width)

    def slots(self, pages: Sequence[int], start: int, end: int) -> torch.Tensor:
        """int64 [end - start], the slots (page * page_size + offset) of a request's token positions start..end."""
        position = torch.arange(start, end)
        table = torch.tensor(pages, dtype=torch.int64)
        slots = table[position // self.page_size] * self.page_size + position % self.page_size
        return slots.to(self.storage.device)

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Checks that `owners` (every page list held by anyone, the prefix cache included) explains every refcount.

        Raises:
            PoolError: naming the first page that is wrong and why.
        """
        held = Counter(page for pages in owners for page in pages)
        free = Counter(self._free)
        for page in range(self.num_pages):
            if self._refcount[page] != held[page]:
                raise PoolError(f"page {page} has refcount {self._refcount[page]} but {held[page]} owners")
            if free[page] != (1 if held[page] == 0 else 0):
                raise PoolError(f"page {page} with {held[page]} owners is on the free list {free[page]} times")

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise PoolError(f"page {page} does not exist: the pool has pages 0 to {self.num_pages - 1}")
