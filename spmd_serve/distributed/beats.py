"""Signs of life: what each rank's main thread is doing, told over the board by a thread of its own.

The messenger is the only one that touches the store while steps run. Its calls may block for as long as the network likes;
nobody waits for it, and the watcher notices when it makes no more rounds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spmd_serve.distributed.board import Board, Failure
from spmd_serve.types import ServicePhase

TICK_S = 0.2
SLOW_S = 1.0  # a step that takes longer is published with the place where it is
# Code that waits for other ranks; or for the device, in whose queue a collective waits for them.
COLLECTIVES = (
    "/torch/distributed/",
    "/torch/cuda/",
    "/spmd_serve/distributed/host_memory.py",
    "/spmd_serve/distributed/channel.py",
)
STDLIB = os.path.dirname(os.__file__) + "/"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"  # may itself be in site-packages


class Progress:
    """What the main thread is doing. It writes; messenger, watcher and log read. The watcher excuses."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.since = time.monotonic()  # when it began that
        self.busy = False  # in a step that must end, as opposed to waiting for work
        self.exchange_s = 0.0  # how long the last exchange took
        # Whether the device has work that does not end: another rank's part of a collective is missing. Asked in slow steps.
        self.device_waits: Callable[[], bool] = lambda: False

    def begin(self, step: int) -> None:
        """The main thread works on `step` from now on."""
        self.step = step
        self.since = time.monotonic()
        self.busy = True

    def idle(self) -> None:
        """The main thread waits for work or, on a follower, for rank 0."""
        self.busy = False

    def excuse(self, seconds: float) -> None:
        """This process was suspended for so long, in which no step could go on."""
        self.since += seconds


@dataclass(frozen=True)
class Beat:
    """One sign of life of a rank.

    Attributes:
        step: -1 before the first.
        age: seconds in this step.
        where: the place in the code, when it takes long.
        waits: the main thread or the device is inside a collective, waiting for others.
    """

    count: int
    step: int
    busy: bool
    age: float
    exchange_s: float
    where: str = ""
    waits: bool = False


class Messenger:
    """Exchanges beats, failures and stop requests with the board, five times a second.

    Rank 0 reads everybody's beats, the others rank 0's.

    Attributes (others write to `request` alone; times are this process's time.monotonic()):
        beats, heard: by rank, the last beat and when it came.
        failure, stop: what the board says.
        round_at: when the last round was complete.
        error: why there will be no more rounds: the store is gone.
        defect: the same, but the fault is this process's own.
        report, report_at: a failure to be put on the board, and since when; None again when it turned out to be none.
        request: a stop to be asked for.
    """

    def __init__(self, board: Board, progress: Progress) -> None:
        self._board = board
        self._progress = progress
        self._own = board.ranks.rank
        self._watched = [peer.rank for peer in (board.peers if self._own == 0 else board.peers[:1])]
        now = time.monotonic()
        self.beats: dict[int, Beat] = {}
        self.heard = {rank: now for rank in self._watched if rank != self._own}
        self.failure: Failure | None = None
        self.stop = ServicePhase.RUN
        self.round_at = now
        self.error: RuntimeError | None = None
        self.defect: Exception | None = None
        self.report: Failure | None = None
        self.report_at = now
        self.request = ServicePhase.RUN
        self._count = 0
        self._poked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="messenger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Make the next round begin now; from any thread."""
        self._poked.set()

    def accuse(self, failure: Failure) -> None:
        """Put it on the board in the next round, which begins now, if there is no report yet; from any thread."""
        if self.report is None:
            self.report_at = time.monotonic()
            self.report = failure
            self.poke()

    def excuse(self, seconds: float) -> None:
        """All silence is shorter by so much, in which this process was not there to hear."""
        self.round_at += seconds
        self.heard = {rank: heard + seconds for rank, heard in self.heard.items()}

    def begin_anew(self) -> None:
        """The silence of the other ranks begins now."""
        self.heard = dict.fromkeys(self.heard, time.monotonic())

    def _run(self) -> None:
        try:
            board = self._board.reopen()
            while True:
                began = time.monotonic()
                self._poked.clear()
                self._round(board)
                self.round_at = time.monotonic()
                # Less after a round that took long: a process that is suspended again and again may have just the time for a
                # beat in between, and none to wait first.
                self._poked.wait(began + TICK_S - self.round_at)
        except RuntimeError as exc:  # the store is gone
            self.error = exc
        except Exception as exc:
            self.defect = exc

    def _round(self, board: Board) -> None:
        self._put_beat(board)
        self._get_beats(board)
        if self.request > self.stop:
            board.request_stop(self.request)
        self.stop = ServicePhase(board.requested_stop())
        report = self.report
        if report is not None and self.failure is None:
            if report.kind == "lost" and board.is_gone(report.rank):  # it has left as it should
                self.report = None
            else:
                self.failure = board.fail(report)
        self.failure = self.failure or board.failure()

    def _put_beat(self, board: Board) -> None:
        progress = self._progress
        self._count += 1
        step = -1 if progress.step is None else progress.step
        age = time.monotonic() - progress.since
        where, waits = "", False
        if progress.busy and age > SLOW_S:
            where, waits = main_thread_location()
            waits = waits or self._device_waits()
        beat = (self._count, step, progress.busy, age, progress.exchange_s, where, waits)
        board.store.set(f"beat/{self._own}", json.dumps(beat))

    def _device_waits(self) -> bool:
        try:
            return self._progress.device_waits()
        except RuntimeError:  # the device has failed, which the main thread will say
            return False

    def _get_beats(self, board: Board) -> None:
        keys = {f"beat/{rank}": rank for rank in self._watched}
        if len(self.beats) < len(keys):  # some have not been seen yet
            keys = {key: rank for key, rank in keys.items() if board.store.check([key])}
        if not keys:
            return
        texts = board.store.multi_get(list(keys))
        now = time.monotonic()
        for rank, text in zip(keys.values(), texts, strict=True):
            beat = Beat(*json.loads(text))
            if rank not in self.beats or self.beats[rank].count != beat.count:
                self.beats[rank] = beat
                if rank in self.heard:
                    self.heard[rank] = now


def main_thread_location() -> tuple[str, bool]:
    """Where the main thread is ("file.py:12 in function"), and whether it waits for other ranks in a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = ""
    waits = False
    while frame is not None:
        name = frame.f_code.co_filename
        waits = waits or any(part in name for part in COLLECTIVES)
        foreign = "/site-packages/" in name or name.startswith((STDLIB, "<"))  # "<frozen runpy>"
        if not place and (name.startswith(PACKAGE) or not foreign):
            place = f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return place, waits
