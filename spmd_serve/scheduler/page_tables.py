"""The page tables of the running sequences: which pages a sequence takes, leaves in the prefix cache, and gives back.

Joins the PagePool and the PrefixCache, and collects what the engine must write into its own tables.
"""

from __future__ import annotations

from spmd_serve.scheduler.page_pool import PagePool
from spmd_serve.scheduler.prefix_cache import PrefixCache
from spmd_serve.scheduler.sequence import Sequence


class PageTables:
    """Owns all pages. Only the scheduler calls it, and only it changes `pages` and `num_shared` of a Sequence."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.cache = PrefixCache(page_size)
        self.pool = PagePool(num_pages, self.cache)
        self._writes: list[tuple[int, int, list[int]]] = []

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds."""
        return self.pool.num_pages * self.page_size

    def pages_of(self, sequence: Sequence) -> int:
        """Pages that all known tokens of a sequence take."""
        return -(-len(sequence.tokens) // self.page_size)

    def take_writes(self) -> list[tuple[int, int, list[int]]]:
        """(slot, first page index, pages) for the engine's tables, since the last call, in order."""
        writes, self._writes = self._writes, []
        return writes

    def open(self, sequence: Sequence, slot: int, headroom: int) -> bool:
        """Give a sequence that holds nothing the pages of all its known tokens, shared ones first.

        Args:
            headroom: pages that must be available beyond that.

        Returns:
            False, and nothing has changed, if there are too few pages.
        """
        pool = self.pool
        available = pool.num_available
        if headroom and available <= sequence.blocked_at[0] and self.cache.version == sequence.blocked_at[1]:
            return False  # nothing has become better since
        known = len(sequence.tokens)
        found: list[int] = []
        if sequence.use_cache:  # at least one token is computed, or there would be no logits to sample from
            found = self.cache.match(sequence.tokens, (known - 1) // self.page_size, sequence.salt)
        missing = self.pages_of(sequence) - len(found)
        if available - pool.count_cached(found) < missing + headroom:
            sequence.blocked_at = (available, self.cache.version)
            return False
        pool.retain(found)
        sequence.pages = found + pool.allocate(missing)
        sequence.num_shared = len(found)
        sequence.blocked_at = (-1, -1)
        self._writes.append((slot, 0, sequence.pages[:]))
        return True

    def grow(self, sequence: Sequence) -> None:
        """Add one page, which must be available."""
        page = self.pool.allocate_one()
        self._writes.append((sequence.slot, len(sequence.pages), [page]))
        sequence.pages.append(page)

    def share(self, sequence: Sequence, num_tokens: int) -> None:
        """Put the full pages of the first `num_tokens` positions, computed and committed, into the prefix cache.

        Where the cache has a page of the same contents already (two equal prompts in flight), the sequence takes that one
        and gives its own back. The engine hears of it with the next batch. Steps in flight may still read the old page:
        whoever gets it next writes into it in a later step.
        """
        start, stop = sequence.num_shared, num_tokens // self.page_size
        if stop <= start or not sequence.use_cache:
            return
        pages = sequence.pages
        kept = self.cache.add(sequence.tokens, pages, start, stop, sequence.salt)
        for index, page in enumerate(kept, start):
            if page != pages[index]:
                self.pool.retain((page,))
                self.pool.release((pages[index],))
                pages[index] = page
                self._writes.append((sequence.slot, index, [page]))
        sequence.num_shared = stop

    def distrust(self, sequence: Sequence) -> None:
        """What was computed of the sequence is wrong: nobody may find it in the prefix cache.

        Nor what it found there itself, since that may be where it went wrong. Sequences that hold its pages keep them.
        """
        if sequence.use_cache:
            sequence.use_cache = False
            for page in self.cache.match(sequence.tokens, 1, sequence.salt):
                self.cache.hide(page)

    def close(self, sequence: Sequence) -> None:
        """Give all pages back; those with committed contents stay cached. Nothing is written for the row any more.

        A step in flight may still write into the pages: whoever gets them next writes later.
        """
        self.share(sequence, sequence.num_computed)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_shared = 0
        if self._writes:
            self._writes = [write for write in self._writes if write[0] != sequence.slot]

    def check(self, running: list[Sequence]) -> None:
        """Recount everything from scratch, O(pages).

        Raises:
            AssertionError: a page is lost, owned twice or counted wrongly.
        """
        self.pool.check([sequence.pages for sequence in running])
        cached = self.cache.edge_of
        for sequence in running:
            assert sequence.planned <= len(sequence.pages) * self.page_size
            assert all(page in cached for page in sequence.pages[: sequence.num_shared])
            assert not any(page in cached for page in sequence.pages[sequence.num_shared :]), "an open page is cached"
