"""The rolling digest: every rank folds what it decided into three CRCs, so that ranks that disagree find out.

Rows and pages are folded when a step is planned, tokens when it is committed. With overlap a step is planned before the
previous one is committed, so the CRCs of the plan wait until the tokens are there: a StepDigest is always whole.
"""

from __future__ import annotations

from collections import deque
from zlib import crc32

import msgspec

from spmd_serve.types import FinishReason, ScheduledBatch, StepDigest

SAMPLE_EVERY = 16  # with --digest sampled, steps between two that are folded
_encode = msgspec.msgpack.Encoder().encode  # integers to bytes, ten times as fast as array("i", ...)


class RollingDigest:
    """CRCs over all decisions so far. Equal inputs give equal digests on every rank.

    Args:
        mode: "every-step", "sampled" (every 16th step is folded) or "off" (`latest` stays at step -1).
    """

    def __init__(self, mode: str) -> None:
        self._every = {"every-step": 1, "sampled": SAMPLE_EVERY, "off": 0}[mode]
        self._rows = self._pages = self._tokens = 0
        self._planned: deque[tuple[int, int, int]] = deque()  # (step, rows, pages) of steps whose tokens are not here
        self.latest = StepDigest(-1, 0, 0, 0)

    def _folds(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def fold_end(self, uid: int, reason: FinishReason) -> None:
        """A request ended for `reason`; counts as a decision about rows."""
        if self._every:
            self._rows = crc32(_encode((uid, reason)), self._rows)

    def fold_plan(self, batch: ScheduledBatch) -> None:
        """Fold the rows and page ids of a step that was planned."""
        if not self._folds(batch.step):
            return
        rows = crc32(_encode(batch.decode_slots), self._rows)
        if batch.chunks or batch.new_rows:
            chunks = [(chunk.slot, chunk.start, len(chunk.tokens), chunk.samples) for chunk in batch.chunks]
            new_rows = [(row.slot, row.uid, row.num_tokens, row.num_cached) for row in batch.new_rows]
            rows = crc32(_encode((chunks, new_rows)), rows)
        self._rows = rows
        if batch.page_writes:
            self._pages = crc32(_encode(batch.page_writes), self._pages)
        self._planned.append((batch.step, rows, self._pages))

    def fold_tokens(self, step: int, tokens: list[int]) -> None:
        """Fold the tokens that step `step` sampled; `latest` becomes that step's digest."""
        if not self._folds(step):
            return
        planned, rows, pages = self._planned.popleft()
        assert planned == step, f"step {step} committed, but step {planned} is the oldest in flight"
        self._tokens = crc32(_encode(tokens), self._tokens)
        self.latest = StepDigest(step, rows, pages, self._tokens)


def first_difference(ours: StepDigest, theirs: StepDigest) -> str | None:
    """The first field in which two digests differ ("step", "rows", "pages", "tokens"), or None."""
    for field in ("step", "rows", "pages", "tokens"):
        if getattr(ours, field) != getattr(theirs, field):
            return field
    return None
