"""Page ownership. A failure here means two requests could share a page that neither knows about."""

from __future__ import annotations

import random

import pytest
import torch

from uncast.latent.layouts import row_layout
from uncast.latent.pool import OutOfPages, PagedPool, PoolError


def make(num_pages: int = 8, page_size: int = 4) -> PagedPool:
    return PagedPool(row_layout("fp8_e4m3"), num_layers=2, num_pages=num_pages, page_size=page_size)


def test_a_full_pool_says_exactly_what_was_asked_and_what_is_free() -> None:
    pool = make()
    pool.allocate(5)
    with pytest.raises(OutOfPages, match="4 pages were asked for, 3 of 8 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert len(pool.allocate(3)) == 3


def test_shared_pages_live_until_the_last_owner() -> None:
    pool = make()
    pages = pool.allocate(2)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 6 and pool.refcount(pages[0]) == 1
    pool.release(pages)
    assert pool.num_free == 8


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = make()
    pages = pool.allocate(2)
    with pytest.raises(PoolError, match="was released 2 times but has 1 owners"):
        pool.release([pages[0], pages[1], pages[0]])
    with pytest.raises(PoolError, match="is free and cannot be retained"):
        pool.retain([pages[0], next(p for p in range(8) if p not in pages)])
    with pytest.raises(PoolError, match="page 8 does not exist"):
        pool.release([8])
    pool.check_integrity([pages])


@pytest.mark.parametrize("size", [0, 3, 256, -4])
def test_page_sizes_are_powers_of_two_up_to_128(size: int) -> None:
    with pytest.raises(ValueError, match="powers of two from 1 to 128"):
        make(page_size=size)


def test_integrity_names_the_wrong_page() -> None:
    pool = make()
    pages = pool.allocate(3)
    pool.check_integrity([pages])
    with pytest.raises(PoolError, match=f"page {pages[2]} has refcount 1 but 0 owners"):
        pool.check_integrity([pages[:2]])
    pool._free.append(pages[1])
    with pytest.raises(PoolError, match=f"page {pages[1]} with 1 owners is on the free list 1 times"):
        pool.check_integrity([pages])


def test_block_tables_and_slots() -> None:
    pool = make()
    assert pool.block_table([[3, 1], [], [5]]).tolist() == [[3, 1], [-1, -1], [5, -1]]
    assert pool.block_table([[3, 1]]).dtype == torch.int32
    assert pool.slots([3, 1, 6], 2, 9).tolist() == [14, 15, 4, 5, 6, 7, 24]


def test_random_use_keeps_integrity() -> None:
    rng, pool = random.Random(0), make(num_pages=40)
    owners: list[list[int]] = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.45:
            count = rng.randint(0, 6)
            if count <= pool.num_free:
                owners.append(pool.allocate(count))
            else:
                with pytest.raises(OutOfPages):
                    pool.allocate(count)
        elif action < 0.6 and owners:
            shared = rng.choice(owners)
            pool.retain(shared)
            owners.append(list(shared))
        elif owners:
            pool.release(owners.pop(rng.randrange(len(owners))))
        pool.check_integrity(owners)
    for pages in owners:
        pool.release(pages)
    assert pool.num_free == 40
