"""The prefix cache's index: a radix tree whose digit is one page of tokens.

An edge is (parent page, contents of the next page) -> page, and all edges lie in one dict: a page stands for the whole
prefix that ends in it, because it is in the tree once and leaves it before its parent does. So a lookup of n pages is n dict
lookups, adding and removing a page is O(1), and no two prefixes can be taken for each other (contents are compared, not
hashes). The idea of a radix tree over KV pages is SGLang's (RadixAttention, Zheng et al. 2023); a flat table of pages chained by
their parent is vLLM's.

Who holds which page, and which page is evicted next, is the PagePool's business.
"""

from __future__ import annotations

from array import array

ROOT = -1  # the parent of a prompt's first page


class PrefixCache:
    """Which page holds which prefix. Only the scheduler and its PagePool mutate it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_of: dict[tuple[int, bytes], int] = {}
        self.edge_of: dict[int, tuple[int, bytes]] = {}  # page -> its edge; the pages that are in the tree
        self.version = 0  # grows with every add(): a lookup that failed may succeed now

    def __len__(self) -> int:
        return len(self.edge_of)

    def match(self, tokens: array[int], max_pages: int, salt: bytes) -> list[int]:
        """The pages that hold the longest cached prefix of `tokens`, at most `max_pages`.

        Args:
            tokens: int32 token ids.
            salt: only pages added with the same salt match.
        """
        width = self._page_size * tokens.itemsize
        data = tokens[: max_pages * self._page_size].tobytes()
        page_of = self._page_of
        pages: list[int] = []
        page: int | None = page_of.get((ROOT, salt + data[:width])) if data else None
        end = width
        while page is not None:
            pages.append(page)
            start, end = end, end + width
            if end > len(data):
                break
            page = page_of.get((page, data[start:end]))
        return pages

    def add(self, tokens: array[int], pages: list[int], start: int, stop: int, salt: bytes) -> list[int]:
        """Put pages[start:stop] into the tree, below pages[start - 1], which must be in it.

        Returns:
            The pages that the tree has for these contents: equal to pages[start:stop], but for those that it already had
            from somebody else.
        """
        size = self._page_size
        width = size * tokens.itemsize
        data = tokens[start * size : stop * size].tobytes()
        parent = pages[start - 1] if start else ROOT
        assert parent == ROOT or parent in self.edge_of, f"page {parent} is not in the tree"
        self.version += 1
        kept: list[int] = []
        for i in range(stop - start):
            contents = data[i * width : (i + 1) * width]
            edge = (parent, salt + contents if parent == ROOT else contents)
            page = pages[start + i]
            parent = self._page_of.setdefault(edge, page)
            if parent == page:
                self.edge_of[page] = edge
            kept.append(parent)
        return kept

    def hide(self, page: int) -> None:
        """Never find the prefix that ends in `page` again, nor any that goes on from it. The pages stay until they are evicted."""
        del self._page_of[self.edge_of[page]]
        edge = self.edge_of[page] = (-2 - page, b"")  # no page's child
        self._page_of[edge] = page

    def remove(self, page: int) -> None:
        """Take a page without children out of the tree."""
        del self._page_of[self.edge_of.pop(page)]
