"""The watcher: a thread per rank that sees what the main thread, inside a collective or a kernel, cannot.

It notices signals, failures of other ranks, and ranks that are dead, silent or stuck: rank 0's watcher judges everybody, the
others' rank 0. What it finds goes on the board, where the first finding counts; every rank then ends, its main thread by itself
if it can, else by force. The watcher itself never blocks: what may block is the messenger's (beats.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping

from spmd_serve.config import ControlOptions
from spmd_serve.distributed.beats import SLOW_S, TICK_S, Beat, Messenger, Progress
from spmd_serve.distributed.board import Board, Failure, Peer
from spmd_serve.distributed.channel import is_peer_error, is_timeout
from spmd_serve.distributed.process import is_dead, leave_process, parent_of, tell_torchrun
from spmd_serve.distributed.signals import StopSignals
from spmd_serve.errors import REFUSALS, SpmdServeError
from spmd_serve.types import ServicePhase

logger = logging.getLogger(__name__)

START_SILENCE_S = 60.0  # while weights load, a thread may keep the interpreter for long
SUSPECT_SILENCE_S = 1.2  # once a connection broke, the rank that is silent this long is the one
EXPLAIN_S = 2.5  # how long a rank whose connection broke looks for the reason
REPORT_S = 1.0  # how long a finding may take to get on the board
START_STOP_S = 5.0  # how long the main thread may take to heed a stop while starting, and then to leave
STOP_SILENCE_S = 10.0  # a rank that is silent this long once all are to stop does not leave by itself
GRACE_S = 3.0  # from a failure to the forced exit: rank 0 ends open requests in this time
LATE_S = 0.5  # a watcher that comes this late was suspended or starved, and so may the others have been


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
        self._ranks = board.ranks
        self._peers = board.peers
        self._own = board.peers[board.ranks.rank]
        own = self._own
        # Without LOCAL_RANK all count as of node 0; pids say nothing about another host's processes.
        self._neighbours = [
            p for p in board.peers if (p.node, p.hostname) == (own.node, own.hostname) and p.pid != own.pid
        ]
        self._progress = progress
        self._signals = signals
        self._messenger = Messenger(board, progress)
        self._control: ControlOptions | None = None
        self._wake: Callable[[], None] = lambda: None
        self._leaving = False
        self._peer_error: BaseException | None = None  # which the main thread got from a collective
        self._concluding = False
        self._leaving_together = False
        self._reported_at = 0.0
        self._settled = threading.Event()
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
        self._leaving_together = True
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
        """This rank needs the others no longer: ranks that go from now on are no failure, and nobody is to be woken."""
        self._leaving = True
        self._wake = lambda: None

    def conclude(self, exc: BaseException) -> Failure:
        """Find out why the main thread got `exc`, and put it on the board if nobody else did.

        An error that only says that a peer has gone is a consequence: the peer's own report, or its silence, is waited for.
        """
        self._concluding = True
        kind = "refused" if isinstance(exc, REFUSALS) and self._control is None else "error"
        message = " ".join(f"{'' if kind == 'refused' else type(exc).__name__ + ': '}{exc}".split())
        details = "" if isinstance(exc, SpmdServeError) else "".join(traceback.format_exception(exc)).rstrip()
        own = Failure(self._own.rank, self._own.hostname, kind, message, details)
        if is_peer_error(exc):
            self._peer_error = exc
            self._progress.idle()  # this rank is not the one that the others wait for
            self._signals.poke()
            self._settled.wait(EXPLAIN_S)
        deadline = time.monotonic() + EXPLAIN_S
        while not self._settled.is_set() and time.monotonic() < deadline:
            self._report(own)
            self._settled.wait(0.05)
        return self.failure or own

    def fail(self, exc: SpmdServeError) -> None:
        """Another thread of this rank says that the job cannot go on, whatever the main thread is at."""
        self._report(Failure(self._own.rank, self._own.hostname, "error", f"{type(exc).__name__}: {exc}"))

    def exchange_times(self) -> tuple[float, ...]:
        """Seconds of each rank's last exchange, by rank; for rank 0."""
        beats = self._messenger.beats
        return tuple(beats[rank].exchange_s for rank in sorted(beats))

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._heed(self._signals.read(TICK_S))
            if not self._settled.is_set() and not self._leaving:
                self._look(time.monotonic())

    def _heed(self, requested: ServicePhase) -> None:
        """Take in what signals here, or on another rank, ask for."""
        self._messenger.request = requested
        requested = max(requested, self._messenger.stop)
        if requested <= self.phase or self.failure is not None:
            return
        self.phase = requested
        self._messenger.poke()
        self._messenger.heard = dict.fromkeys(self._messenger.heard, time.monotonic())  # shorter silences count now
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
        if self._leaving_together or self._control is not None or self.failure is not None:
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
        _exit_after(limit, 1, f"the drain did not end within {limit:g} s", unless=lambda: self._leaving_together)

    def _look(self, now: float) -> None:
        messenger = self._messenger
        late = now - self._last_look - TICK_S
        if late > LATE_S:  # that is no silence of the others
            messenger.round_at += late
            messenger.heard = {rank: heard + late for rank, heard in messenger.heard.items()}
        self._last_look = now
        report = messenger.report
        if messenger.failure is not None:
            self._settle(messenger.failure, found_here=messenger.failure == report)
        elif report is None:
            found = self._judge(now)
            if found is not None:
                self._report(found)
        elif now - self._reported_at > REPORT_S:  # the board cannot be reached
            self._settle(report, found_here=True)

    def _report(self, failure: Failure) -> None:
        if self._messenger.report is None:
            self._reported_at = time.monotonic()
            self._messenger.report = failure
            self._messenger.poke()

    # ---- judgement -----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> Failure | None:
        """The rank that is dead, silent or stuck, if there is one."""
        messenger, control = self._messenger, self._control
        for peer in self._neighbours:
            if is_dead(peer.pid):
                return self._blame(
                    peer, "lost", "its process is gone (killed, or out of memory?)" + self._last_seen(peer)
                )
        limit = START_SILENCE_S if control is None else min(control.step_timeout, control.control_timeout)
        if self.phase is not ServicePhase.RUN:
            limit = min(limit, STOP_SILENCE_S)
        if self._peer_error is not None:
            limit = SUSPECT_SILENCE_S
        quiet = now - messenger.round_at
        if messenger.error is not None or quiet > limit:
            reason = str(messenger.error).splitlines()[0] if messenger.error else f"for {quiet:.1f} s"
            store = f"{self._ranks.store_host}:{self._ranks.store_port}"
            message = f"no answer from the job's store at {store} ({reason}); the head node, its torchrun or the network is gone"
            return self._blame(self._peers[0], "lost", message)
        heard = messenger.heard
        longest = min(heard, key=heard.__getitem__, default=None)
        if longest is not None and now - heard[longest] > limit:
            peer = self._peers[longest]
            return self._silent(peer, now - heard[longest])
        if control is None:
            return None
        if self._peer_error is not None and is_timeout(self._peer_error):
            return self._name_stuck(now, "--control-timeout", control.control_timeout)
        if self._own.rank == 0 and self._progress.busy and now - self._progress.since > control.step_timeout:
            return self._name_stuck(now, "--step-timeout", control.step_timeout)
        return None

    def _name_stuck(self, now: float, option: str, limit: float) -> Failure | None:
        """The step does not end: who holds it up. None if that cannot be told yet, or (on followers) it is not rank 0."""
        beats = self._messenger.beats
        if not beats:
            return None
        rank = holds_up(beats)
        beat = beats[rank]
        if self._own.rank > 0 and (beat.waits or not beat.busy):
            return None
        silent = now - self._messenger.heard.get(rank, now)
        if silent > min(SUSPECT_SILENCE_S, limit - 2 * TICK_S):
            # Stopped in this step, so its silence is not quite as old as the step. It cannot end itself: lost, not hanging.
            return self._silent(self._peers[rank], silent)
        if beat.busy and beat.age <= SLOW_S and now - self._progress.since <= limit + SLOW_S:
            return None  # too young to say whether it waits itself
        others = "; all ranks wait for each other" if beat.waits else ""
        message = f"step {beat.step} for {beat.age:.1f} s ({option} is {limit:g}) at {beat.where}{others}"
        return self._blame(self._peers[rank], "hangs", message)

    def _silent(self, peer: Peer, seconds: float) -> Failure:
        return self._blame(peer, "lost", f"no sign of life for {seconds:.1f} s" + self._last_seen(peer))

    def _last_seen(self, peer: Peer) -> str:
        beat = self._messenger.beats.get(peer.rank)
        return "" if beat is None or beat.step < 0 else f"; last seen in step {beat.step}"

    @staticmethod
    def _blame(peer: Peer, kind: str, message: str) -> Failure:
        return Failure(peer.rank, peer.hostname, kind, message)

    # ---- the end -------------------------------------------------------------------------------------------------

    def _settle(self, failure: Failure, found_here: bool) -> None:
        """The job has failed: say so, end what hangs, and see to it that this process ends."""
        self.failure = failure
        is_own = failure.rank == self._own.rank and failure.kind in ("refused", "error") and self._concluding
        if not is_own and (self._own.rank == 0 or found_here):  # else the main thread speaks
            logger.error("%s", failure)
            self.spoken = True
        if failure.exit_code:
            tell_torchrun(str(failure), failure.details)  # all ranks name the culprit, whichever torchrun asks
        if self._own.rank == 0:
            self.on_failure(str(failure))
        self._settled.set()
        self._wake()  # an idle rank 0 then finds the connection broken, and ends in good order
        _exit_after(GRACE_S + 2 * is_own, failure.exit_code)
        for peer in self._neighbours:
            # A stopped process would keep torchrun waiting for 30 s. Only this job's own: the same parent started it.
            if peer.rank == failure.rank and failure.kind == "lost" and parent_of(peer.pid) == os.getppid():
                os.kill(peer.pid, signal.SIGKILL)


def holds_up(beats: Mapping[int, Beat]) -> int:
    """The rank that the others wait for: one that is not itself inside a collective, or else the one furthest behind."""
    return min(beats, key=lambda rank: (beats[rank].waits or not beats[rank].busy, beats[rank].step, rank))


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
