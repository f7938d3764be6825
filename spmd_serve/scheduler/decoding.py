"""The sequences that decode, in the order in which each step computes them."""

from __future__ import annotations

from operator import attrgetter

from spmd_serve.scheduler.sequence import Sequence, SequenceStatus


class Decoding:
    """Decoding sequences and their slots, the longest first: attention's programs start in this order.

    The lists are replaced, never changed: steps in flight keep them, and the engine sees by identity that nothing has changed.
    Only the scheduler mutates it.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.slots: list[int] = []
        self._joining: list[Sequence] = []
        self._changed = False

    def join(self, sequence: Sequence) -> None:
        """It decodes from the next step on."""
        self._joining.append(sequence)
        self._changed = True

    def leave(self) -> None:
        """A sequence does not decode any more, as its status says."""
        self._changed = True

    def update(self) -> None:
        """Take in who has joined and left since the last call."""
        if self._changed:
            self.sequences = self.members()
            self.sequences.sort(key=attrgetter("planned"), reverse=True)  # it stays so while all of them go on together
            self.slots = [s.slot for s in self.sequences]
            self._joining = []
            self._changed = False

    def members(self) -> list[Sequence]:
        """Those that decode now, in no order."""
        return [s for s in (*self.sequences, *self._joining) if s.status is SequenceStatus.DECODE]
