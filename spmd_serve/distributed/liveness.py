"""The watcher: a thread per rank that sees what the main thread, inside a collective or a kernel, cannot.

It notices signals, failures of other ranks, and ranks that are dead, silent or stuck (judgement.py). What it finds goes on the
board, where the first finding counts; every rank then ends, its main thread by itself if it can, else by force. The watcher
itself never blocks: what may block is the messenger's (beats.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from enum import IntEnum

from spmd_serve.config import ControlOptions
from spmd_serve.distributed.beats import TICK_S, Messenger, Progress
from spmd_serve.distributed.board import Board, Failure
from spmd_serve.distributed.channel import is_peer_error
from spmd_serve.distributed.judgement import Evidence, Judge
from spmd_serve.distributed.process import is_dead, is_suspended, leave_process, parent_of, tell_torchrun
from spmd_serve.distributed.signals import StopSignals
from spmd_serve.errors import REFUSALS, SpmdServeError
from spmd_serve.types import ServicePhase

logger = logging.getLogger(__name__)

EXPLAIN_S = 2.5  # how long a rank whose connection broke looks for the reason
REPORT_S = 1.0  # how long a finding may take to get on the board
START_STOP_S = 5.0  # how long the main thread may take to heed a stop while starting, and then to leave
GRACE_S = 3.0  # from a failure to the forced exit: rank 0 ends open requests in this time
LATE_S = 0.5  # a watcher that comes this late was suspended or starved, and so may the others have been


class WayOut(IntEnum):
    """How far the main thread is on its way out of the job. It only ever grows."""

    NONE = 0
    TOGETHER = 1  # it is done, and waits until all ranks are; they are still watched
    ALONE = 2  # it needs the others no longer: ranks that go from now on are no failure


class Liveness:
    """Watches the ranks. `phase` and `failure` are for the main thread to read.

    Args:
        board: the job's board.
        progress: of this rank's main thread.
        signals: installed by the main thread, read by the watcher.

    Attributes:
        on_failure: called once with the reason when the job has failed, from the watcher's thread.
        phase: what signals here or on another rank ask for.
        failure: why the job ends, once it is known.
        spoken: the watcher has put into the log what failed on this rank; the main thread need not.
    """

    def __init__(self, board: Board, progress: Progress, signals: StopSignals) -> None:
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.phase = ServicePhase.RUN
        self.failure: Failure | None = None
        self.spoken = False
        self._board = board
        self._own = board.peers[board.ranks.rank]
        self._neighbours = board.neighbours
        self._progress = progress
        self._signals = signals
        self._messenger = Messenger(board, progress)
        self._judge = Judge(board.ranks, board.peers)
        self._control: ControlOptions | None = None
        self._wake: Callable[[], None] = lambda: None
        self._way_out = WayOut.NONE
        self._error: BaseException | None = None  # which has ended the main thread's work
        self._settled = threading.Event()  # `failure` is known, and told
        self._last_look = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    # ---- for the main thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._messenger.start()
        self._thread.start()

    def serve(self, control: ControlOptions, wake: Callable[[], None]) -> None:
        """The step loop begins: judge by the options from now on, and call `wake` when a stop is requested."""
        self._wake = wake
        self._signals.interrupts = False
        self._control = control
        if self.phase is not ServicePhase.RUN:
            self._limit_drain(control)

    @property
    def stopped_while_starting(self) -> bool:
        return self._control is None and self.phase is not ServicePhase.RUN

    def leave_together(self) -> int:
        """The last act of a stop: leave when all ranks can. Returns the exit code.

        torchrun waits for every rank. One that cannot leave, because it is stopped or hangs, must be named and ended by those
        that can, or it is waited for without end. Rank 0, which hears all of them, goes last.
        """
        self._way_out = WayOut.TOGETHER
        return self._leave_together(self._board)

    def _leave_together(self, board: Board) -> int:
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever hosts it has left already
            board.request_stop(ServicePhase.DRAIN)
            board.say_leaving()
            self._await(board.all_leave)
            if self._own.rank == 0:
                self._await(board.others_are_gone)
            if self.failure is None:
                board.say_gone()
        if self.failure is not None:  # the watcher is about to tell torchrun, and to end who is suspended: let it
            self._settled.wait(GRACE_S)
        self.leave()
        code = self.failure.exit_code if self.failure else 0
        _exit_after(START_STOP_S, code)
        return code

    def _await(self, come: Callable[[], bool]) -> None:
        while self.failure is None and not come():
            time.sleep(TICK_S / 4)

    def forget_frontend(self) -> None:
        """The frontend is about to end: nobody is to be told or woken any more."""
        self.on_failure = lambda reason: None
        self._wake = lambda: None

    def leave(self) -> None:
        """This rank needs the others no longer, and nobody is to be woken."""
        self._way_out = WayOut.ALONE
        self._wake = lambda: None

    def conclude(self, exc: BaseException) -> Failure:
        """Find out why the main thread got `exc`, and put it on the board if nobody else did.

        An error that only says that a peer has gone is a consequence: the peer's own report, or its silence, is waited for.
        """
        self._error = exc
        kind = "refused" if isinstance(exc, REFUSALS) and self._control is None else "error"
        own = self._own_failure(kind, exc)
        if is_peer_error(exc):
            self._progress.idle()  # this rank is not the one that the others wait for
            self._signals.poke()
            self._settled.wait(EXPLAIN_S)
        deadline = time.monotonic() + EXPLAIN_S
        while not self._settled.is_set() and time.monotonic() < deadline:
            self._messenger.accuse(own)
            self._settled.wait(0.05)
        return self.failure or own

    def fail(self, exc: SpmdServeError) -> None:
        """Another thread of this rank says that the job cannot go on, whatever the main thread is at."""
        self._messenger.accuse(self._own_failure("error", exc))

    def _own_failure(self, kind: str, exc: BaseException) -> Failure:
        message = " ".join(f"{'' if kind == 'refused' else type(exc).__name__ + ': '}{exc}".split())
        details = "" if isinstance(exc, SpmdServeError) else "".join(traceback.format_exception(exc)).rstrip()
        return Failure(self._own.rank, self._own.hostname, kind, message, details)

    def exchange_times(self) -> tuple[float, ...]:
        """Seconds of each rank's last exchange, by rank; for rank 0."""
        beats = self._messenger.beats
        return tuple(beats[rank].exchange_s for rank in sorted(beats))

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._heed(self._signals.read(TICK_S))
                if self.failure is None and self._way_out < WayOut.ALONE:
                    self._look(time.monotonic())
        except Exception as exc:  # nobody would notice signals and the other ranks' ends any more
            logger.exception("the watcher failed")
            own = self._own_failure("error", exc)
            self._messenger.accuse(own)
            self._settle(own, found_here=True)

    def _heed(self, requested: ServicePhase) -> None:
        """Take in what signals here, or on another rank, ask for."""
        self._messenger.request = requested
        requested = max(requested, self._messenger.stop)
        if requested <= self.phase or self.failure is not None:
            return
        self.phase = requested
        self._messenger.poke()
        self._messenger.begin_anew()  # shorter silences count now
        if self._control is None:
            # The main thread may be anywhere: the signal ends a sleep or a system call, and its handler raises Stopped.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            _after(START_STOP_S, self._leave_for_main_thread)
        elif requested is ServicePhase.DRAIN:
            self._limit_drain(self._control)
        else:
            _exit_after(GRACE_S, 1, "stopped by a second signal")
        self._wake()

    def _leave_for_main_thread(self) -> None:
        """The main thread does not heed the stop: it is in a call that does not end, which may wait for another rank."""
        if self._way_out is not WayOut.NONE or self._control is not None or self.failure is not None:
            return
        logger.warning("stopped while starting; leaving by force")
        try:
            code = self._leave_together(self._board.reopen())
        except RuntimeError:  # the store is gone
            code = 0
        leave_process(code)

    def _limit_drain(self, control: ControlOptions) -> None:
        limit = control.drain_timeout + GRACE_S + 1.5
        # A rank that leaves together with the others has drained, and the watcher ends its wait for them.
        _exit_after(
            limit, 1, f"the drain did not end within {limit:g} s", unless=lambda: self._way_out is not WayOut.NONE
        )

    def _look(self, now: float) -> None:
        messenger = self._messenger
        if messenger.defect is not None:
            raise messenger.defect
        late = now - self._last_look - TICK_S
        if late > LATE_S:  # that is no silence of the others, and no step that does not end
            messenger.excuse(late)
            self._progress.excuse(late)
        self._last_look = now
        report = messenger.report
        if messenger.failure is not None:
            self._settle(messenger.failure, found_here=messenger.failure == report)
        elif report is None:
            found = self._judge.find(self._evidence(now))
            if found is not None:
                messenger.accuse(found)
        elif now - messenger.report_at > REPORT_S:  # the board cannot be reached
            self._settle(report, found_here=True)

    def _evidence(self, now: float) -> Evidence:
        messenger, error = self._messenger, self._error
        return Evidence(
            control=self._control,
            stopping=self.phase is not ServicePhase.RUN,
            peer_error=error if error is not None and is_peer_error(error) else None,
            busy=self._progress.busy,
            step_age=now - self._progress.since,
            gone=next((peer for peer in self._neighbours if is_dead(peer.pid)), None),
            store_silence=now - messenger.round_at,
            store_error=messenger.error,
            beats=dict(messenger.beats),
            silence={rank: now - heard for rank, heard in messenger.heard.items()},
        )

    # ---- the end -------------------------------------------------------------------------------------------------

    def _settle(self, failure: Failure, found_here: bool) -> None:
        """The job has failed: say so, end what hangs, and see to it that this process ends."""
        self.failure = failure
        is_own = failure.rank == self._own.rank and failure.kind in ("refused", "error") and self._error is not None
        if not is_own and (self._own.rank == 0 or found_here):  # else the main thread speaks
            logger.error("%s", failure)
            self.spoken = True
        if failure.exit_code:
            tell_torchrun(str(failure), failure.details)  # all ranks name the culprit, whichever torchrun asks
        if self._own.rank == 0:
            self.on_failure(str(failure))
        for peer in self._neighbours:
            # A suspended process, of which there may be several, would keep torchrun waiting for 30 s. Only this job's own: the
            # same parent started it.
            stays = (peer.rank == failure.rank and failure.kind == "lost") or is_suspended(peer.pid)
            if stays and parent_of(peer.pid) == os.getppid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGKILL)
        # The main thread goes on now, and may be gone at once.
        self._settled.set()
        self._wake()  # an idle rank 0 then finds the connection broken, and ends in good order
        _exit_after(GRACE_S + 2 * is_own, failure.exit_code)


def _exit_after(seconds: float, code: int, why: str = "", unless: Callable[[], bool] = lambda: False) -> None:
    """End this process by force unless it has ended by then, or `unless` says so."""

    def force() -> None:
        if unless():
            return
        if why:
            logger.warning("%s; leaving by force", why)
        leave_process(code)

    _after(seconds, force)


def _after(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
