"""The prefix cache's index: contents and position decide, nothing else."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_serve.scheduler.prefix_cache import PrefixCache


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def test_longest_prefix_in_whole_pages() -> None:
    cache = PrefixCache(page_size=2)
    tokens = ids(1, 2, 3, 4, 5, 6)
    assert cache.match(tokens, 3, b"") == []
    assert cache.add(tokens, [7, 8, 9], 0, 3, b"") == [7, 8, 9]
    assert cache.match(tokens, 3, b"") == [7, 8, 9]
    assert cache.match(tokens, 2, b"") == [7, 8]
    assert cache.match(tokens, 0, b"") == []
    assert cache.match(ids(1, 2, 3, 4, 5), 2, b"") == [7, 8]
    assert cache.match(ids(1, 2, 3, 9, 5, 6), 3, b"") == [7]
    assert cache.match(ids(3, 4), 1, b"") == [], "the same contents elsewhere are another prefix"


def test_branches_and_later_pages() -> None:
    cache = PrefixCache(page_size=1)
    cache.add(ids(1, 2), [0, 1], 0, 2, b"")
    assert cache.add(ids(1, 3), [0, 5], 1, 2, b"") == [5]
    assert cache.match(ids(1, 2), 2, b"") == [0, 1]
    assert cache.match(ids(1, 3), 2, b"") == [0, 5]


def test_what_is_there_stays() -> None:
    """Another sequence's page of the same contents is returned, and the path goes on below it."""
    cache = PrefixCache(page_size=1)
    cache.add(ids(1, 2), [0, 1], 0, 2, b"")
    assert cache.add(ids(1, 2, 3), [10, 11, 12], 0, 3, b"") == [0, 1, 12]
    assert cache.match(ids(1, 2, 3), 3, b"") == [0, 1, 12]
    assert set(cache.edge_of) == {0, 1, 12}


def test_remove() -> None:
    cache = PrefixCache(page_size=1)
    cache.add(ids(1, 2), [0, 1], 0, 2, b"")
    cache.remove(1)
    assert cache.match(ids(1, 2), 2, b"") == [0] and len(cache) == 1
    with pytest.raises(AssertionError, match="not in the tree"):
        cache.add(ids(1, 2, 3), [0, 1, 2], 2, 3, b"")


def test_salts_are_roots_of_their_own() -> None:
    """Also where salt and contents together are the same bytes."""
    cache = PrefixCache(page_size=1)
    one, two = int.from_bytes(b"aaaa", "little"), int.from_bytes(b"bbbb", "little")
    cache.add(ids(one, two), [0, 1], 0, 2, b"")
    assert cache.match(ids(one, two), 2, b"x") == []
    assert cache.match(ids(two), 1, b"aaaa") == []
    assert cache.add(ids(one, two), [2, 3], 0, 2, b"x") == [2, 3]
    assert cache.match(ids(one, two), 2, b"x") == [2, 3]
    assert cache.match(ids(one, two), 2, b"") == [0, 1]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12), st.integers(1, 3))
def test_equals_a_set_of_prefixes(prompts: list[list[int]], page_size: int) -> None:
    cache = PrefixCache(page_size)
    known: set[tuple[int, ...]] = set()
    fresh = iter(range(10_000))
    for prompt in prompts:
        tokens, count = array("i", prompt), len(prompt) // page_size
        ends = [page_size * (i + 1) for i in range(count)]
        hits = cache.match(tokens, count, b"")
        assert len(hits) == sum(tuple(prompt[:end]) in known for end in ends)
        pages = hits + [next(fresh) for _ in range(count - len(hits))]
        assert cache.add(tokens, pages, 0, count, b"") == pages
        known |= {tuple(prompt[:end]) for end in ends}
    assert len(cache) == len(known)
