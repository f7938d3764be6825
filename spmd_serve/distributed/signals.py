"""SIGTERM, SIGINT and SIGHUP, noticed at once even while the main thread is inside a collective."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from types import FrameType

from spmd_serve.types import ServicePhase

REPEAT_S = 1.0  # SLURM and torchrun both pass the same signal on: a second one sooner than this is the same request
# SIGHUP: the terminal was closed. torchrun passes it on as well, and gives the ranks no handler of their own for it.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """Raised in the main thread by a stop signal while the service starts."""


class StopSignals:
    """Turns stop signals into a phase: DRAIN after the first, STOP after a deliberate second.

    A rank that waits in a collective does not run Python's signal handlers. The interpreter's C handler still writes each
    signal's number into a pipe, which the watcher thread reads. While `interrupts` is True the Python handler also raises
    Stopped, to end whatever the main thread does. `stopped_at` is when that handler first ran.
    """

    def __init__(self) -> None:
        self.interrupts = True
        self.stopped_at: float | None = None
        self._first: float | None = None
        self._phase = ServicePhase.RUN
        self._pipe_out, self._pipe_in = os.pipe()
        os.set_blocking(self._pipe_out, False)
        os.set_blocking(self._pipe_in, False)

    def install(self) -> None:
        """Take over the signals; from the main thread."""
        signal.set_wakeup_fd(self._pipe_in, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # else under nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stopped_at = self.stopped_at or time.monotonic()
        if self.interrupts:
            self.interrupts = False
            raise Stopped

    def poke(self) -> None:
        """Make a `read` in progress return; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it returns anyway
            os.write(self._pipe_in, b"\0")

    def read(self, timeout_s: float) -> ServicePhase:
        """Wait for a signal, a poke or the timeout; returns what all signals so far ask for. For one thread only."""
        if select.select([self._pipe_out], [], [], timeout_s)[0]:
            for number in os.read(self._pipe_out, 4096):
                if number in _STOP_SIGNALS:
                    self._count(time.monotonic())
        return self._phase

    def _count(self, now: float) -> None:
        if self._first is None:
            self._first = now
            self._phase = ServicePhase.DRAIN
        elif now - self._first >= REPEAT_S:
            self._phase = ServicePhase.STOP
