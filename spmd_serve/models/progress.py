"""One progress display for long start-up work: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0


@contextmanager
def byte_progress(label: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields `advance(bytes)`. `total` is in bytes; nothing is shown when `show` is False."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console  # here: only one rank shows progress, and the import takes 0.1 s
    from rich.progress import Progress, TransferSpeedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(*Progress.get_default_columns(), TransferSpeedColumn(), console=console) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)
        return
    started = last = time.perf_counter()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.perf_counter()
        if now - last >= _LOG_EVERY_S:
            last = now
            logger.info("%s: %d%% (%.2f GB/s)", label, 100 * done // max(total, 1), done / (now - started) / 1e9)

    yield advance
