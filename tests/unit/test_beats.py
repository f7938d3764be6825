"""Signs of life, and what counts as time in a step."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from spmd_serve.distributed import beats as module
from spmd_serve.distributed.beats import Messenger, Progress
from spmd_serve.distributed.board import Board, Peer
from spmd_serve.distributed.ranks import RankInfo


def test_a_beat_comes_at_once_after_a_round_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is suspended for most of the time, and in the midst of its rounds, is still heard whenever it runs."""
    monkeypatch.setattr(module, "TICK_S", 3600.0)
    rounds = threading.Semaphore(0)
    end = threading.Event()

    class SuspendedBoard(Board):
        away = 0.0

        def requested_stop(self) -> int:
            rounds.release()
            if end.is_set():
                raise RuntimeError("the store is gone")
            self.away += 7200.0  # in this round
            return 0

    store = HashStore()
    board = SuspendedBoard(store, RankInfo(0, 1, 0, 1, "host"), [Peer(0, 1, 0, "host", 1, "")], lambda: store)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + board.away))
    monkeypatch.setattr(board, "reopen", lambda: board)
    Messenger(board, Progress()).start()
    try:
        for _ in range(3):
            assert rounds.acquire(timeout=10)
    finally:
        end.set()


def test_a_step_is_as_old_as_the_time_in_which_it_could_go_on() -> None:
    progress = Progress()
    progress.begin(7)
    began = progress.since
    progress.excuse(5.0)
    assert progress.since == began + 5.0
