"""The board on an in-process store: agreement, failures, and the roll call over restarts."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from spmd_serve.distributed import board as module
from spmd_serve.distributed.board import Board, Failure, Peer
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import DistributedError, RankLostError

FAILURE = Failure(1, "b", "error", "it broke", "Traceback...")


def peers(world_size: int) -> list[Peer]:
    return [Peer(rank, world_size, 0, "host", os.getpid(), f"t{rank}") for rank in range(world_size)]


def boards(world_size: int) -> list[Board]:
    store = HashStore()
    all_peers = peers(world_size)
    return [
        Board(store, RankInfo(rank, world_size, rank, world_size, "host"), all_peers, lambda: store)
        for rank in range(world_size)
    ]


def in_threads(calls: list[Callable[[], object]]) -> list[object]:
    """Results, or the exceptions, of calls that run at the same time."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as exc:
            results[index] = exc

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return results


def test_share_and_gather() -> None:
    ranks = boards(3)
    assert in_threads([lambda b=b: b.share("x", b.ranks.rank + 7) for b in ranks]) == [7, 7, 7]
    assert in_threads([lambda b=b: b.gather("y", b.ranks.rank) for b in ranks]) == [[0, 1, 2]] * 3


def test_a_wait_for_a_process_that_is_gone_ends() -> None:
    first, _ = boards(2)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    first.peers[1] = replace(first.peers[1], pid=gone.pid)
    with pytest.raises(RankLostError, match=r"rank 1 \(host\) is lost: its process is gone"):
        first.gather("x", 0)
    first.store.set("x/1", pickle.dumps(1))  # given before it ended
    assert first.gather("x", 0) == [0, 1]


def test_a_failure_ends_every_wait() -> None:
    first, second, third = boards(3)
    results = in_threads([lambda: first.gather("x", 0), lambda: second.fail(FAILURE), lambda: third.gather("x", 2)])
    assert isinstance(results[0], RankLostError) and "rank 1 (b) failed: it broke" in str(results[0])
    assert isinstance(results[2], RankLostError)


def test_the_first_failure_counts() -> None:
    first, second = boards(2)
    assert second.failure() is None
    assert first.fail(FAILURE) == FAILURE
    assert second.fail(Failure(0, "a", "lost", "gone")) == FAILURE
    assert second.failure() == FAILURE


@pytest.mark.parametrize(("kind", "code"), [("help", 0), ("refused", 2), ("error", 1), ("lost", 1), ("hangs", 1)])
def test_exit_codes(kind: str, code: int) -> None:
    assert Failure(0, "a", kind, "x").exit_code == code


def test_stop_requests_only_grow() -> None:
    first, second = boards(2)
    assert second.requested_stop() == 0
    first.request_stop(1)
    assert second.requested_stop() == 1
    second.request_stop(2)
    first.request_stop(1)
    assert first.requested_stop() == 2


# ---- roll call


def own(rank: int, ticket: str, world_size: int = 2) -> Peer:
    return Peer(rank, world_size, 0, "host", 1, ticket)


def roll(store: HashStore, *members: Peer, deadline_s: float = 5.0) -> list[object]:
    patience = module._Patience(deadline_s)
    return in_threads(
        [
            lambda m=m: (module._call_roll if m.rank == 0 else module._answer_roll)(store, m, patience)  # type: ignore[misc]
            for m in members
        ]
    )


def test_every_attempt_on_one_store_meets_anew() -> None:
    """torchrun keeps the store over restarts, and the follower of a new attempt may come before its rank 0."""
    store = HashStore()
    assert roll(store, own(0, "a0"), own(1, "a1")) == [("a0", [own(0, "a0"), own(1, "a1")])] * 2
    assert roll(store, own(1, "b1"), own(0, "b0")) == [("b0", [own(0, "b0"), own(1, "b1")])] * 2


def test_world_sizes_that_differ_are_told_to_everybody() -> None:
    results = roll(HashStore(), own(0, "a0", 2), own(1, "a1", 3))
    assert isinstance(results[0], DistributedError) and "rank 1 (host) was started with a world size of 3" in str(
        results[0]
    )
    assert isinstance(results[1], RankLostError)


def test_a_rank_that_does_not_come_is_named() -> None:
    (error,) = roll(HashStore(), own(0, "a0", 3), deadline_s=0.1)
    assert isinstance(error, DistributedError) and "rank 1, 2 of 3 did not come" in str(error)


def test_a_rank_that_is_to_stop_waits_less_long_for_the_others() -> None:
    stopped_at: list[float | None] = [None]
    patience = module._Patience(28.0, lambda: stopped_at[0])
    assert patience.seconds == 28.0 and not patience.is_over()
    stopped_at[0] = time.monotonic() + 10.0
    assert patience.seconds == pytest.approx(10.0 + module._STOPPED_S, abs=1.0)
    stopped_at[0] = time.monotonic() + 27.0
    assert patience.seconds == 28.0


def test_whether_the_job_begins_is_decided_once() -> None:
    one, other = boards(2)
    assert [one.decide("serve"), other.decide("stop"), one.decide("stop")] == ["serve"] * 3


def test_a_stop_is_heard_while_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting is a call into C++ of up to a minute, in which Python's signal handlers do not run."""
    monkeypatch.setattr(module, "_STOPPED_S", 0.2)
    stopped: list[float] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(time.monotonic())

    previous = signal.signal(signal.SIGALRM, stop)
    release = threading.Event()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        patience = module._Patience(60.0, lambda: stopped[0] if stopped else None)
        with pytest.raises(TimeoutError, match=r"no answer within 0\.4"):
            module._connect_in_time(lambda: release.wait(60) and HashStore(), patience)  # type: ignore[arg-type,return-value]
    finally:
        release.set()
        signal.signal(signal.SIGALRM, previous)


def test_a_store_that_refuses_says_why() -> None:
    def refuse() -> HashStore:
        raise RuntimeError("it refuses")

    with pytest.raises(RuntimeError, match="it refuses"):
        module._connect_in_time(refuse, module._Patience(60.0))
    store = HashStore()
    assert module._connect_in_time(lambda: store, module._Patience(60.0)) is store
