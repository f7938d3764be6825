"""Log lines: one per event, with the rank and, where there is one, the step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


class _LineFormatter(logging.Formatter):
    """`12:34:56 INFO rank 1 step 57 step_loop: message`. A traceback follows on its own lines."""

    def __init__(self, rank: int, step: Callable[[], int | None]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(where)s %(module)s: %(message)s", "%H:%M:%S")
        self._rank = rank
        self._step = step

    def format(self, record: logging.LogRecord) -> str:
        step = self._step()
        record.where = f"rank {self._rank}" + ("" if step is None else f" step {step}")
        return super().format(record)


def set_up_logs(level: str, rank: int, step: Callable[[], int | None]) -> None:
    """Send this process's log to stderr. Ranks other than 0 speak from WARNING on, unless `level` is debug.

    Args:
        level: debug, info, warning or error.
        step: called for each line; the step that the rank is in, or None.
    """
    threshold = logging.getLevelName(level.upper())
    if rank > 0 and level != "debug":
        threshold = max(threshold, logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(rank, step))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    if level != "debug":
        for chatty in ("httpx", "httpcore", "urllib3", "filelock", "asyncio"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
