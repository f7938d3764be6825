"""The page pool: states, reference counts, and the order of eviction against a naive model."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_serve.scheduler.page_pool import PagePool
from spmd_serve.scheduler.prefix_cache import PrefixCache


def tokens_of(*pages: int) -> array[int]:
    """With page size 1: one token per page."""
    return array("i", pages)


def make_pool(num_pages: int) -> tuple[PagePool, PrefixCache]:
    cache = PrefixCache(page_size=1)
    return PagePool(num_pages, cache), cache


def keep(pool: PagePool, cache: PrefixCache, tokens: array[int]) -> list[int]:
    """What a sequence does in its life: take what is cached, allocate the rest, leave all of it in the tree."""
    found = cache.match(tokens, len(tokens), b"")
    pool.retain(found)
    pages = found + pool.allocate(len(tokens) - len(found))
    assert cache.add(tokens, pages, len(found), len(pages), b"") == pages[len(found) :]
    return pages


def test_states() -> None:
    pool, cache = make_pool(4)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 0, 0)
    pages = pool.allocate(3)
    assert pages == [0, 1, 2], "the order is fixed"
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 3)
    cache.add(tokens_of(7, 8), pages, 0, 2, b"")
    pool.release(pages)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 2, 0)
    pool.check([])
    assert pool.count_cached([0, 1]) == 2
    pool.retain([0])
    assert pool.count_cached([0, 1]) == 1
    pool.check([[0]])
    assert pool.num_available == 3
    pool.release([0])
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3] and not cache.edge_of


def test_leaves_go_first_and_used_pages_never() -> None:
    pool, cache = make_pool(5)
    trunk = keep(pool, cache, tokens_of(1, 2, 3))
    branch = keep(pool, cache, tokens_of(1, 2, 4, 5))
    assert branch[:2] == trunk[:2]
    pool.release(trunk)
    assert pool.num_cached == 1, "only the leaf that the branch does not hold"
    assert pool.allocate_one() == trunk[2]
    with pytest.raises(AssertionError, match="available"):
        pool.allocate(1)
    pool.release([trunk[2]])
    pool.release(branch)
    assert [pool.allocate_one() for _ in range(5)] == [trunk[2], branch[3], branch[2], trunk[1], trunk[0]]


def test_least_recently_used_goes_first() -> None:
    pool, cache = make_pool(6)
    for pages in [keep(pool, cache, tokens_of(t, t + 1)) for t in (10, 20, 30)]:
        pool.release(pages)
    pool.release(keep(pool, cache, tokens_of(10, 11)))  # a hit makes it the youngest
    pool.allocate(2)
    assert not cache.match(tokens_of(20, 21), 2, b"")
    assert len(cache.match(tokens_of(30, 31), 2, b"")) == 2
    pool.allocate(3)
    assert not cache.match(tokens_of(30, 31), 2, b"")
    assert len(cache.match(tokens_of(10, 11), 2, b"")) == 1, "the leaf went, its parent stays"


def test_a_page_is_not_released_twice() -> None:
    pool, _ = make_pool(2)
    page = pool.allocate_one()
    pool.release([page])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([page])


@pytest.mark.parametrize("damage", ["leak", "double", "count", "tree"])
def test_check_finds_damage(damage: str) -> None:
    """The recount is no decoration."""
    pool, cache = make_pool(6)
    pages = keep(pool, cache, tokens_of(1, 2, 3))
    holders = [pages]
    pool.check(holders)
    if damage == "leak":
        pool._free.pop()
    elif damage == "double":
        pool._free.append(pages[0])
    elif damage == "count":
        holders = [pages, pages]
    else:
        cache.remove(pages[1])
    with pytest.raises(AssertionError):
        pool.check(holders)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 12))
def test_against_a_naive_model(seed: int, num_pages: int) -> None:
    """Random sequences over a tiny alphabet. The model: evict the unheld leaf whose last use is the oldest."""
    rng = random.Random(seed)
    pool, cache = make_pool(num_pages)
    prefix_of: dict[int, tuple[int, ...]] = {}  # the model's tree: page -> prefix
    last_use: dict[int, tuple[int, int]] = {}  # page -> (time, -depth)
    held: list[list[int]] = []
    for clock in range(40):
        tokens = tuple(rng.randrange(2) for _ in range(rng.randint(1, 5)))
        found = cache.match(array("i", tokens), len(tokens), b"")
        expected = [page for n in range(len(tokens)) for page, prefix in prefix_of.items() if prefix == tokens[: n + 1]]
        assert found == expected, "a hit must be the longest prefix in the tree"
        missing = len(tokens) - len(found)
        if held and (rng.random() < 0.4 or pool.num_available - pool.count_cached(found) < missing):
            pages = held.pop(rng.randrange(len(held)))
            pool.release(pages)
            last_use.update({page: (clock, -depth) for depth, page in enumerate(pages)})
        elif pool.num_available - pool.count_cached(found) >= missing:
            pool.retain(found)
            used = {page for pages in held for page in pages} | set(found)
            for _ in range(max(missing - pool.num_free, 0)):  # the model's evictions
                idle = [page for page in prefix_of if page not in used]
                leaves = [p for p in idle if not any(q[:-1] == prefix_of[p] for q in prefix_of.values())]
                victim = min(leaves, key=last_use.__getitem__)
                del prefix_of[victim]
            pages = found + pool.allocate(missing)
            assert set(cache.edge_of) == set(prefix_of), "the pool evicted other pages than the model"
            cache.add(array("i", tokens), pages, len(found), len(pages), b"")
            prefix_of.update({page: tokens[: depth + 1] for depth, page in enumerate(pages)})
            held.append(pages)
        pool.check(held)


def test_eviction_costs_the_same_with_many_pages() -> None:
    """100,000 cached pages instead of 1,000: a linear search would be 100 times slower, not three."""
    costs = []
    for num_pages in (1_000, 100_000):
        pool, cache = make_pool(num_pages)
        for start in range(0, num_pages, 100):
            pool.release(keep(pool, cache, array("i", range(start, start + 100))))
        assert pool.num_cached == num_pages
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            pages = pool.allocate(100)
            best = min(best, time.perf_counter() - begin)
            pool.release(pages)
        costs.append(best)
    assert costs[1] < 10 * costs[0] + 1e-3
