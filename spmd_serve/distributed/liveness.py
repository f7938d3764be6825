"""The watcher: one thread per rank that sees what the main thread, inside a collective or a kernel, cannot.

Five times a second it publishes this rank's beat (step, how long in it, where), reads the failure and stop requests on the
board, and judges: rank 0's watcher everybody, the others' rank 0. Whoever finds a rank dead, silent or stuck puts a Failure on
the board; the first one counts, and every rank then ends: the main thread by itself if it can, else by force.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from spmd_serve.config import ControlOptions
from spmd_serve.distributed.board import Board, Failure, Peer
from spmd_serve.distributed.channel import is_peer_error
from spmd_serve.distributed.signals import StopSignals
from spmd_serve.errors import RankLostError, SpmdServeError
from spmd_serve.types import ServicePhase

logger = logging.getLogger(__name__)

TICK_S = 0.2
START_SILENCE_S = 60.0  # while weights load, a thread may keep the interpreter for long
SUSPECT_SILENCE_S = 1.2  # once a connection broke, the rank that is silent this long is the one
EXPLAIN_S = 2.5  # how long a rank whose connection broke looks for the reason
START_STOP_S = 5.0  # a stop while starting is done by then
GRACE_S = 3.0  # from a failure to the forced exit: rank 0 ends open requests in this time
STDLIB = os.path.dirname(os.__file__) + "/"


class Progress:
    """What the main thread is doing. It alone writes; the watcher and the log read."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.since = time.monotonic()  # when it began that
        self.busy = False  # in a step that must end, as opposed to waiting for work
        self.exchange_s = 0.0  # how long the last exchange took

    def begin(self, step: int) -> None:
        """The main thread works on `step` from now on."""
        self.step = step
        self.since = time.monotonic()
        self.busy = True

    def idle(self) -> None:
        """The main thread waits for work or, on a follower, for rank 0."""
        self.busy = False


@dataclass(frozen=True)
class Beat:
    """One sign of life of a rank. `waits`: its main thread is inside a collective, waiting for others."""

    count: int
    step: int
    busy: bool
    age: float
    exchange_s: float
    where: str = ""
    waits: bool = False


class Liveness:
    """Watches the ranks from a thread of its own. `phase` and `failure` are for the main thread to read.

    Args:
        board: the job's board; the watcher opens its own connection to it.
        on_failure: called once with the reason when the job has failed, from the watcher's thread.
    """

    def __init__(
        self,
        board: Board,
        progress: Progress,
        signals: StopSignals,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._main_board = board
        self._own = board.peers[board.ranks.rank]
        self._progress = progress
        self._signals = signals
        self.on_failure = on_failure
        self.phase = ServicePhase.RUN
        self.failure: Failure | None = None
        self.exchange_times: tuple[float, ...] = ()
        self._control: ControlOptions | None = None
        self._wake: Callable[[], None] = lambda: None
        self._leaving = False
        self._suspects = False
        self._report: Failure | None = None
        self._settled = threading.Event()
        self._count = 0
        now = time.monotonic()
        watched = board.peers if self._own.rank == 0 else board.peers[:1]
        self._watched = [peer for peer in watched if peer is not self._own]
        self._neighbours = [p for p in board.peers if p.node == self._own.node and p.pid != self._own.pid]
        self._beats: dict[int, Beat] = {}
        self._heard = {peer.rank: now for peer in self._watched}
        self._last_tick = now
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    # ---- for the main thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def serve(self, control: ControlOptions, wake: Callable[[], None]) -> None:
        """The step loop begins: judge by the options from now on, and call `wake` when a stop is requested."""
        self._control = control
        self._wake = wake
        self._signals.interrupts = False
        self._signals.poke()

    def leave(self) -> None:
        """The step loop has ended by agreement: ranks that go from now on are no failure."""
        self._leaving = True

    def conclude(self, exc: BaseException) -> Failure:
        """Find out why the main thread got `exc`, and put it on the board if nobody else did.

        An error that only says that a peer has gone is a consequence: the peer's own report, or its silence, is waited for.
        """
        kind = "refused" if isinstance(exc, SpmdServeError) and self._control is None else "error"
        message = " ".join(f"{'' if kind == 'refused' else type(exc).__name__ + ': '}{exc}".split())
        details = "" if isinstance(exc, SpmdServeError) else "".join(traceback.format_exception(exc)).rstrip()
        own = Failure(self._own.rank, self._own.hostname, kind, message, details)
        if is_peer_error(exc):
            self._suspects = True
            self._settled.wait(EXPLAIN_S)
        if not self._settled.is_set():
            self._report = own
            self._signals.poke()
            self._settled.wait(EXPLAIN_S)
        return self.failure or own

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        board: Board | None = None
        while True:
            requested = self._signals.read(TICK_S)
            try:
                board = board or self._main_board.reopen()
                self._heed(requested, board)
                self._tick(board)
            except RuntimeError as exc:
                if not self._leaving:
                    self._settle(self._store_failure(exc), found_here=True)
                self._heed(requested, None)
                time.sleep(TICK_S)

    def _heed(self, requested: ServicePhase, board: Board | None) -> None:
        """Take in what signals here, or another rank, ask for."""
        if board is not None:
            if requested > self.phase:
                board.request_stop(requested)
            requested = ServicePhase(max(requested, board.requested_stop()))
        if requested <= self.phase or self.failure is not None:
            return
        self.phase = requested
        if self._control is None:
            # The main thread may be anywhere: the signal ends a sleep or a system call, and its handler raises Stopped.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            _exit_after(START_STOP_S, 0, "stopped while starting")
        elif requested is ServicePhase.DRAIN:
            limit = self._control.drain_timeout + GRACE_S + 1.5
            _exit_after(limit, 1, f"the drain did not end within {limit:g} s")
        else:
            _exit_after(GRACE_S, 1, "stopped by a second signal")
        self._wake()

    def _tick(self, board: Board) -> None:
        now = time.monotonic()
        late = now - self._last_tick - 2.0
        if late > 0:  # this very process was suspended or starved: that is no silence of the others
            self._heard = {rank: heard + late for rank, heard in self._heard.items()}
        self._last_tick = now
        self._publish_beat(board, now)
        if self._control is not None:
            board.store.set_timeout(timedelta(seconds=self._control.control_timeout))
        if self._settled.is_set() or self._leaving:
            return
        failure = board.failure()
        if failure is not None:
            self._settle(failure)
        elif self._report is not None:
            self._settle(board.fail(self._report))
        else:
            self._read_beats(board, now)
            found = self._judge(board, now)
            if found is not None:
                counts = board.fail(found)
                self._settle(counts, found_here=counts == found)

    def _publish_beat(self, board: Board, now: float) -> None:
        progress = self._progress
        self._count += 1
        age = now - progress.since
        where, waits = _main_thread_location() if progress.busy and age > 1.0 else ("", False)
        beat = (
            self._count,
            -1 if progress.step is None else progress.step,
            progress.busy,
            age,
            progress.exchange_s,
            where,
            waits,
        )
        board.store.set(f"beat/{self._own.rank}", json.dumps(beat))
        self._beats[self._own.rank] = Beat(*beat)

    def _read_beats(self, board: Board, now: float) -> None:
        keys = {f"beat/{peer.rank}": peer.rank for peer in self._watched}
        if len(self._beats) <= len(self._watched):  # some have not been seen yet
            keys = {key: rank for key, rank in keys.items() if board.store.check([key])}
        if not keys:
            return
        for rank, text in zip(keys.values(), board.store.multi_get(list(keys)), strict=True):
            beat = Beat(*json.loads(text))
            if rank not in self._beats or self._beats[rank].count != beat.count:
                self._beats[rank] = beat
                self._heard[rank] = now
        if self._own.rank == 0:
            self.exchange_times = tuple(self._beats[rank].exchange_s for rank in sorted(self._beats))

    # ---- judgement -----------------------------------------------------------------------------------------------

    def _judge(self, board: Board, now: float) -> Failure | None:
        """The rank that is dead, silent or stuck, if there is one."""
        dead = [peer for peer in self._neighbours if _is_dead(peer.pid)]
        if dead:
            dead = [peer for peer in dead if peer.rank not in board.gone()]
        if dead:
            return _blame(dead[0], "lost", "its process is gone (killed, or out of memory?)" + self._last_seen(dead[0]))
        limit = START_SILENCE_S
        if self._control is not None:
            limit = min(self._control.step_timeout, self._control.control_timeout)
        if self._suspects:
            limit = SUSPECT_SILENCE_S
        silent = sorted(self._watched, key=lambda peer: self._heard[peer.rank])
        if silent and now - self._heard[silent[0].rank] > limit:
            quiet = now - self._heard[silent[0].rank]
            return _blame(silent[0], "lost", f"no sign of life for {quiet:.1f} s" + self._last_seen(silent[0]))
        stuck = (
            self._progress.busy
            and self._control is not None
            and now - self._progress.since > self._control.step_timeout
        )
        return self._name_stuck() if stuck and self._own.rank == 0 else None

    def _name_stuck(self) -> Failure:
        """Rank 0's step does not end: the culprit is a rank that does not wait for others, or else the one furthest behind."""
        assert self._control is not None
        peers = self._main_board.peers
        culprit = min(
            (peer for peer in peers if peer.rank in self._beats),
            key=lambda peer: (
                self._beats[peer.rank].waits or not self._beats[peer.rank].busy,
                self._beats[peer.rank].step,
                peer.rank,
            ),
        )
        beat = self._beats[culprit.rank]
        alone = "" if not beat.waits else "; all ranks wait for each other"
        return _blame(
            culprit,
            "hangs",
            f"step {beat.step} for {beat.age:.1f} s (--step-timeout is {self._control.step_timeout:g}) at {beat.where}{alone}",
        )

    def _last_seen(self, peer: Peer) -> str:
        beat = self._beats.get(peer.rank)
        return "" if beat is None or beat.step < 0 else f"; last seen in step {beat.step}"

    def _store_failure(self, exc: RuntimeError) -> Failure:
        ranks = self._main_board.ranks
        reason = str(exc).splitlines()[0]
        message = f"no answer from the job's store at {ranks.store_host}:{ranks.store_port} ({reason})"
        return _blame(
            self._main_board.peers[0], "lost", message + "; the head node, its torchrun or the network is gone"
        )

    def _settle(self, failure: Failure, found_here: bool = False) -> None:
        """The job has failed: say so, end what hangs, and see to it that this process ends."""
        if self._settled.is_set():
            return
        self.failure = failure
        is_own = failure.rank == self._own.rank and failure.kind in ("refused", "error")  # the main thread speaks then
        if not is_own and (self._own.rank == 0 or found_here):
            logger.error("%s", failure)
        if failure.exit_code == 1:
            _record_for_torchrun(failure)
        if self._own.rank == 0:
            self.on_failure(str(failure))
        self._settled.set()
        _exit_after(GRACE_S + 2 * is_own, failure.exit_code, "")
        for peer in self._neighbours:
            # A stopped process would keep torchrun waiting for 30 s. Only this job's own: the same parent started it.
            if peer.rank == failure.rank and failure.kind == "lost" and _parent(peer.pid) == os.getppid():
                os.kill(peer.pid, signal.SIGKILL)


def _blame(peer: Peer, kind: str, message: str) -> Failure:
    return Failure(peer.rank, peer.hostname, kind, message)


def _record_for_torchrun(failure: Failure) -> None:
    """torchrun ends its log with the error file of the rank that it takes for the first one: all ranks name the culprit."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            raise RankLostError(f"{failure}\n{failure.details}")
        except RankLostError as exc:
            get_error_handler().record_exception(exc)


def _exit_after(seconds: float, code: int, why: str) -> None:
    """End this process by force unless it has ended by then."""

    def force() -> None:
        if why:
            logger.warning("%s; leaving by force", why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(seconds, force)
    timer.daemon = True
    timer.start()


def _process_stat(pid: int) -> list[str] | None:
    """State, parent... of a process, or None when there is none (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_dead(pid: int) -> bool:
    stat = _process_stat(pid)
    return stat[0] in "ZX" if stat is not None else os.path.isdir("/proc/self")


def _parent(pid: int) -> int | None:
    stat = _process_stat(pid)
    return None if stat is None else int(stat[1])


def _main_thread_location() -> tuple[str, bool]:
    """Where the main thread is ("file.py:12 in function"), and whether it waits for other ranks in a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = ""
    waits = False
    while frame is not None:
        name = frame.f_code.co_filename
        waits = waits or "/torch/distributed/" in name
        if not place and "/site-packages/" not in name and not name.startswith(STDLIB):
            place = f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return place, waits
