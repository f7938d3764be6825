"""The pool of KV pages: who holds them, which are free, which are kept for their contents.

A page is in one of three states, and `num_free + num_cached + num_used == num_pages` holds at all times:

    free     its contents mean nothing
    cached   in the prefix cache, held by no sequence; may be evicted
    used     held by one sequence or more (also in the prefix cache or not)

A sequence that holds a page of the tree holds all pages above it, and releases the deepest first. Hence no cached page is
ever nearer to eviction than its children: the oldest cached page is always a leaf, and evicting it is O(1), however many
pages are cached. The order is that of the step in which a page was last held, then of release within the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from spmd_serve.scheduler.prefix_cache import PrefixCache


class PagePool:
    """Reference counts, the free list and the eviction order of `num_pages` pages, ids 0 .. num_pages-1.

    The same calls give the same page ids on every rank. Only the scheduler mutates it.
    """

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self.num_pages = num_pages
        self._cache = cache
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; page 0 goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, next to be evicted first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free ones, and cached ones at the price of their contents."""
        return len(self._free) + len(self._idle)

    def count_cached(self, pages: Iterable[int]) -> int:
        """How many of `pages` no sequence holds (holding them makes them unavailable)."""
        refs = self._refs
        return sum(1 for page in pages if not refs[page])

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages for one holder, evicting the least recently used cached ones when no free ones are left."""
        assert count <= self.num_available, f"{count} pages asked for, {self.num_available} available"
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """Take one page, which must be available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._cache.remove(page)
        self._refs[page] = 1
        return page

    def retain(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are used or cached."""
        refs, idle = self._refs, self._idle
        for page in pages:
            if refs[page] == 0:
                del idle[page]
            refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one holder from each page, the last one first (see above)."""
        refs, in_tree = self._refs, self._cache.edge_of
        for page in reversed(pages):
            left = refs[page] - 1
            refs[page] = left
            if left == 0:
                if page in in_tree:
                    self._idle[page] = None
                else:
                    self._free.append(page)
            else:
                assert left > 0, f"page {page} released more often than held"

    def check(self, holders: Iterable[list[int]]) -> None:
        """Recount everything from scratch (O(pages)); `holders` are the page tables of all running sequences.

        Raises:
            AssertionError: a page is lost, owned twice, or counted wrongly.
        """
        counted = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), f"a sequence holds a page twice: {pages}"
            for page in pages:
                counted[page] += 1
        assert counted == self._refs, "reference counts differ from a recount"
        free, idle, tree = set(self._free), set(self._idle), self._cache.edge_of
        assert len(free) == len(self._free), "a page is free twice"
        used = {page for page, refs in enumerate(counted) if refs}
        assert not (free & idle or free & used or idle & used), "a page is in two states"
        assert len(free) + len(idle) + len(used) == self.num_pages, "a page is lost"
        assert (len(free), len(idle), len(used)) == (self.num_free, self.num_cached, self.num_used)
        assert free.isdisjoint(tree), "a page is both free and in the prefix cache"
        assert idle <= tree.keys(), "a cached page is not in the prefix cache"
        place = {page: i for i, page in enumerate(self._idle)}
        for page, (parent, _) in tree.items():
            if parent >= 0:  # neither a first page nor hidden
                assert parent in tree, f"page {page} is in the prefix cache without its parent {parent}"
                assert counted[parent] >= counted[page], f"page {page} is held without its parent {parent}"
                assert parent not in place or place[page] < place[parent], (
                    f"page {page} would outlive its parent {parent}"
                )
