"""The sequences that wait for a row, in two orders at once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from spmd_serve.scheduler.sequence import Sequence

_SizeEntry = tuple[tuple[int, int, int], Sequence]


class WaitingQueue:
    """Sorted by order of service and by size. Insertion and removal take O(log n) comparisons; only the scheduler mutates it."""

    def __init__(self) -> None:
        self._by_order: list[Sequence] = []
        self._by_size: list[_SizeEntry] = []

    def __len__(self) -> int:
        return len(self._by_order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_order)

    @property
    def first(self) -> Sequence | None:
        """The first in order of service: see Sequence.order."""
        return self._by_order[0] if self._by_order else None

    def shortest(self, but: Sequence | None = None) -> Sequence | None:
        """The one with the shortest prompt (of the best priority): see Sequence.size_order. `but`: not this one."""
        for _, sequence in self._by_size[:2]:
            if sequence is not but:
                return sequence
        return None

    def add(self, sequence: Sequence) -> None:
        insort(self._by_order, sequence)
        insort(self._by_size, (sequence.size_order, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self._by_order[bisect_left(self._by_order, sequence)]
        del self._by_size[bisect_left(self._by_size, (sequence.size_order, sequence))]

    def check(self) -> None:
        """Raises AssertionError when the two orders do not hold the same sequences, each sorted."""
        assert self._by_order == sorted(self._by_order), "the waiting queue is out of order"
        assert self._by_size == sorted((s.size_order, s) for s in self._by_order), (
            "the orders of the waiting queue differ"
        )
