"""The radix tree against a plain dictionary of token paths."""

from __future__ import annotations

import random

from uncast.engine.prefix_cache import PrefixCache
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool

PAGE = 4


def new_cache(pages: int) -> PrefixCache:
    pool = PagedPool(row_layout("fp32", 8, 8), num_layers=2, num_pages=pages, page_size=PAGE)
    return PrefixCache(pool)


def insert(cache: PrefixCache, tokens: list[int], pages: list[int]) -> list[int]:
    """Gives the tree a request's full pages, as the scheduler does; returns the pages that the request owns then."""
    node, owned = cache.root, list(pages)
    for index, page in enumerate(pages):
        child = cache.extend(node, tuple(tokens[index * PAGE : (index + 1) * PAGE]), page)
        if child is None:
            break
        if child.page != page:
            owned[index] = cache.exchange(child, page)
        node = child
    return owned


def test_only_full_pages_within_the_limit_match() -> None:
    cache = new_cache(8)
    tokens = list(range(12))
    pages = cache.pool.allocate(3)
    assert insert(cache, tokens, pages) == pages
    for limit, count in ((12, 3), (11, 2), (8, 2), (7, 1), (3, 0), (0, 0)):
        found, node = cache.match(tokens, limit)
        assert found == pages[:count] and (node is cache.root) == (count == 0)
        cache.pool.release(found)
    found, _ = cache.match([*tokens[:8], 99, 9, 10, 11], 12)
    assert found == pages[:2]
    cache.pool.release([*found, *pages])
    assert len(cache) == 3 and cache.pool.num_free == 5


def test_what_is_in_use_is_not_evicted_and_the_rest_goes_oldest_first() -> None:
    cache = new_cache(8)
    old, young = [1] * 8, [2] * 8
    first, second = cache.pool.allocate(2), cache.pool.allocate(2)
    insert(cache, old, first)
    insert(cache, young, second)
    cache.pool.release(first + second)
    assert cache.evict(1) == 1 and sorted(cache.pages()) == sorted([first[0], *second])
    held, _ = cache.match(old, 4)
    assert cache.evict(9) == 2 and cache.pages() == held == first[:1]
    cache.pool.release(held)
    assert cache.evict(9) == 1 and cache.pool.num_free == 8 and len(cache) == 0


def test_using_a_path_makes_it_young() -> None:
    cache = new_cache(8)
    for value in (1, 2):
        pages = cache.pool.allocate(1)
        insert(cache, [value] * PAGE, pages)
        cache.pool.release(pages)
    cache.pool.release(cache.match([1] * PAGE, PAGE)[0])
    cache.evict(1)
    assert cache.match([2] * PAGE, PAGE)[0] == []


def test_an_idle_page_gives_way_to_the_page_of_a_request() -> None:
    cache = new_cache(4)
    old, new = cache.pool.allocate(1), cache.pool.allocate(1)
    insert(cache, [1] * PAGE, old)
    cache.pool.release(old)
    assert insert(cache, [1] * PAGE, new) == new and cache.pages() == new
    assert cache.pool.refcount(old[0]) == 0 and cache.pool.refcount(new[0]) == 2


def test_pages_in_use_are_shared_if_their_bytes_agree_and_left_alone_if_not() -> None:
    cache = new_cache(4)
    used, same, other = (cache.pool.allocate(1) for _ in range(3))
    cache.pool.storage[1, other[0], 0, 0] = 1
    insert(cache, [1] * PAGE, used)
    assert insert(cache, [1] * PAGE, same) == used
    assert cache.pool.refcount(same[0]) == 0 and cache.pool.refcount(used[0]) == 3
    assert insert(cache, [1] * PAGE, other) == other and cache.pool.refcount(other[0]) == 1


def test_random_use_against_a_dictionary() -> None:
    """Paths present, refcounts and free pages agree with a model that stores every path separately."""
    rng = random.Random(0)
    cache = new_cache(24)
    requests: list[list[int]] = []
    for turn in range(800):
        if rng.random() < 0.6:
            tokens = [rng.choice([0, 1]) for _ in range(PAGE * rng.randint(1, 5))]
            found, _ = cache.match(tokens, len(tokens))
            missing = len(tokens) // PAGE - len(found)
            cache.evict(max(0, missing - cache.pool.num_free))
            if missing > cache.pool.num_free:
                owned = {page for request in requests for page in request}.union(found)
                assert missing > 24 - len(owned), "evict left an idle page behind"
                cache.pool.release(found)
                continue
            pages = found + cache.pool.allocate(missing)
            for page in pages[len(found) :]:
                cache.pool.storage[:, page] = hash(tuple(tokens)) % 251 if turn % 2 else 0
            requests.append(insert(cache, tokens, pages))
            again, _ = cache.match(tokens, len(tokens))
            assert again[: len(found)] == found
            cache.pool.release(again)
        elif requests:
            cache.pool.release(requests.pop(rng.randrange(len(requests))))
        cache.pool.check_integrity([*requests, cache.pages()])
        assert len(cache.pages()) == len(cache)
