"""Where a rank is, which interface it uses, who holds the others up, what signals ask for, who runs other software."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from spmd_serve.config import ControlOptions
from spmd_serve.distributed.beats import Beat, Messenger, Progress, main_thread_location
from spmd_serve.distributed.board import Board, Peer
from spmd_serve.distributed.channel import is_peer_error, peer_error
from spmd_serve.distributed.fingerprint import check_fingerprints
from spmd_serve.distributed.liveness import Liveness, holds_up
from spmd_serve.distributed.process import usable_cores
from spmd_serve.distributed.ranks import RankInfo, choose_interface, interfaces, rank_info, threads_per_rank
from spmd_serve.distributed.signals import REPEAT_S, Stopped, StopSignals
from spmd_serve.errors import ConfigError, ControlTimeoutError, FingerprintMismatchError, RankLostError
from spmd_serve.types import ServicePhase

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "x",
}


def test_torchruns_environment() -> None:
    info = rank_info(TORCHRUN)
    assert (info.rank, info.world_size, info.node, info.one_host) == (5, 8, 4, False)
    assert (info.store_host, info.store_port, info.agent_store, info.under_agent) == ("head", 29500, True, True)


def test_without_torchrun_there_is_one_rank() -> None:
    info = rank_info({"MASTER_ADDR": "left over"})
    assert (info.rank, info.world_size, info.one_host, info.under_agent) == (0, 1, True, False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "8"}, "RANK 8 of WORLD_SIZE 8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK 4 of LOCAL_WORLD_SIZE 4"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_an_impossible_environment(change: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rank_info(TORCHRUN | change)


def test_ranks_share_the_cores() -> None:
    cores = usable_cores()
    assert threads_per_rank(RankInfo()) == cores
    assert threads_per_rank(RankInfo(0, 64, 0, 64)) == max(1, cores // 64)


# ---- interfaces

ONE_HOST = RankInfo(0, 2, 0, 2, "a")
TWO_HOSTS = RankInfo(0, 2, 0, 1, "a", "head", 1)


@pytest.mark.parametrize(
    ("ranks", "own", "towards_head", "expected"),
    [
        (ONE_HOST, {"lo": "127.0.0.1", "eth0": "10.0.0.1"}, None, "lo"),
        (ONE_HOST, {"eth0": "10.0.0.1"}, None, None),
        (TWO_HOSTS, {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}, "10.1.0.1", "ib0"),
        (TWO_HOSTS, {"lo": "127.0.0.1", "eth0": "10.0.0.1"}, "127.0.0.1", "eth0"),
    ],
)
def test_the_interface_that_others_can_reach(
    ranks: RankInfo, own: dict[str, str], towards_head: str | None, expected: str | None
) -> None:
    assert choose_interface(ranks, own, towards_head) == expected


def test_several_interfaces_and_a_loopback_name_is_an_error_that_names_the_variable() -> None:
    own = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME.*eth0 10\.0\.0\.1, ib0 10\.1\.0\.1"):
        choose_interface(TWO_HOSTS, own, "127.0.1.1")


def test_this_machine_has_a_loopback_interface() -> None:
    assert "127.0.0.1" in interfaces().values()


# ---- who holds up


def failing_device() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def beat(step: int = 7, *, busy: bool = True, waits: bool = False, age: float = 5.0) -> Beat:
    return Beat(1, step, busy, age, 0.0, "x.py:1 in f", waits)


def watcher(signals: StopSignals, rank: int, step_time: float, **options: float) -> Liveness:
    """Of one of two ranks, in step 7 for `step_time` seconds."""
    store, progress = HashStore(), Progress()
    peers = [Peer(rank, 2, 0, host, os.getpid(), "") for rank, host in enumerate("ab")]
    liveness = Liveness(Board(store, RankInfo(rank, 2, rank, 2, "ab"[rank]), peers, lambda: store), progress, signals)
    liveness.serve(ControlOptions(**options), lambda: None)
    progress.begin(7)
    progress.since -= step_time
    return liveness


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ({0: beat(waits=True), 1: beat(), 2: beat(waits=True)}, 1),
        ({0: beat(), 1: beat(waits=True)}, 0),
        ({0: beat(waits=True), 1: beat(busy=False), 2: beat(6)}, 2),
        ({0: beat(8, waits=True), 1: beat(8, waits=True), 2: beat(7, waits=True)}, 2),
    ],
)
def test_who_holds_the_others_up(beats: dict[int, Beat], expected: int) -> None:
    assert holds_up(beats) == expected


@pytest.mark.parametrize(
    ("heard_before", "says"),
    [
        (0.1, "rank 1 (b) hangs: step 7 for 5.0 s"),  # it sends beats, from a step that does not end
        (1.9, "rank 1 (b) is lost: no sign of life for 1.9 s"),  # stopped just after its beat had been read
        (2.5, "rank 1 (b) is lost: no sign of life for 2.5 s"),
    ],
)
def test_a_stopped_rank_is_lost_however_late_it_was_heard(signals: StopSignals, heard_before: float, says: str) -> None:
    """A lost rank is killed by its neighbours; one that hangs ends itself, which a stopped one cannot."""
    now = time.monotonic()
    liveness = watcher(signals, 0, 2.05, step_timeout=2.0, control_timeout=4.0)
    liveness._messenger.beats = {0: beat(waits=True), 1: beat()}
    liveness._messenger.heard = {1: now - heard_before}
    assert str(liveness._judge(now)).startswith(says)


def test_nobody_is_named_before_its_beat_says_whether_it_waits(signals: StopSignals) -> None:
    """Beats are a little older than the step; with the shortest --step-timeout they say nothing yet when it is over."""
    liveness = watcher(signals, 0, 1.1, step_timeout=1.0)
    liveness._messenger.beats = {0: beat(age=0.9), 1: beat(age=0.9)}
    assert liveness._judge(time.monotonic()) is None
    liveness._messenger.beats = {0: beat(age=1.1, waits=True), 1: beat(age=1.1)}
    assert str(liveness._judge(time.monotonic())).startswith("rank 1 (b) hangs: step 7 for 1.1 s (--step-timeout is 1)")


@pytest.mark.parametrize(
    ("own", "beats", "says"),
    [
        (0, {0: beat(busy=False), 1: beat()}, "rank 1 (b) hangs: step 7 for 5.0 s (--control-timeout is 4)"),
        (1, {0: beat()}, "rank 0 (a) hangs: step 7 for 5.0 s (--control-timeout is 4)"),
        (1, {0: beat(waits=True)}, "None"),  # rank 0 knows more, and says so
        (1, {0: beat(busy=False)}, "None"),
        (1, {}, "None"),
    ],
)
def test_a_rank_whose_wait_was_too_long_names_the_one_it_waited_for(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch, own: int, beats: dict[int, Beat], says: str
) -> None:
    """Where --control-timeout is over before --step-timeout."""
    monkeypatch.setattr("spmd_serve.distributed.liveness.EXPLAIN_S", 0.0)
    liveness = watcher(signals, own, 4.1, step_timeout=30.0, control_timeout=4.0)
    liveness._messenger.beats = beats
    assert liveness._judge(time.monotonic()) is None
    liveness.conclude(ControlTimeoutError("rank x did not come to a collective within 4 s"))
    assert str(liveness._judge(time.monotonic())).startswith(says)


def test_the_place_of_a_hang_is_in_this_package_wherever_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = "/x/site-packages/spmd_serve/"
    monkeypatch.setattr("spmd_serve.distributed.beats.PACKAGE", package)
    found: dict[str, Any] = {}
    source = "def launch(pool, look):\n    return pool.submit(look).result()"
    exec(compile(source, package + "step_loop.py", "exec"), found)
    with ThreadPoolExecutor(1) as pool:
        assert found["launch"](pool, main_thread_location) == ("step_loop.py:2 in launch", False)


@pytest.mark.parametrize(
    ("device", "expected"), [(lambda: True, True), (lambda: False, False), (failing_device, False)]
)
def test_a_slow_rank_waits_if_its_device_does(device: Callable[[], bool], expected: bool) -> None:
    """A step may wait for the device in any line, and the device for another rank."""
    store, progress = HashStore(), Progress()
    messenger = Messenger(Board(store, RankInfo(), [Peer(0, 2, 0, "a", 1, "")], lambda: store), progress)
    progress.begin(3)
    progress.since -= 5.0
    progress.device_waits = device
    messenger._put_beat(messenger._board)
    messenger._get_beats(messenger._board)
    found = messenger.beats[0]
    assert (found.step, found.waits) == (3, expected)


# ---- signals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    installed = StopSignals()
    installed.install()
    yield installed
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_same_signal_twice_at_once_is_one_request(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    signals.interrupts = False
    assert signals.read(0) is ServicePhase.RUN
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.read(1) is ServicePhase.DRAIN
    monkeypatch.setattr("spmd_serve.distributed.signals.REPEAT_S", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.read(1) is ServicePhase.STOP
    assert REPEAT_S == 1.0


def test_a_closed_terminal_drains_unless_nohup_says_otherwise(signals: StopSignals) -> None:
    signals.interrupts = False
    os.kill(os.getpid(), signal.SIGHUP)
    assert signals.read(1) is ServicePhase.DRAIN
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.install()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_poke_is_no_signal(signals: StopSignals) -> None:
    signals.poke()
    assert signals.read(5) is ServicePhase.RUN


def test_a_signal_while_starting_interrupts_once(signals: StopSignals) -> None:
    with pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    os.kill(os.getpid(), signal.SIGTERM)  # the second does nothing: the way out is not interrupted
    assert signals.read(1) is ServicePhase.DRAIN


# ---- errors and fingerprints


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("[x] Timed out waiting 4000ms for recv operation; gloo"), True),
        (RankLostError("x"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("gloo"), False),
    ],
)
def test_what_only_says_that_a_peer_is_gone(exc: Exception, expected: bool) -> None:
    assert is_peer_error(exc) == expected


def test_a_timeout_and_a_loss_are_told_apart() -> None:
    assert isinstance(peer_error(RuntimeError("Timed out waiting 4000ms")), ControlTimeoutError)
    assert isinstance(peer_error(RuntimeError("Connection closed by peer")), RankLostError)


def test_a_differing_fingerprint_names_rank_host_and_field() -> None:
    peers = [Peer(rank, 3, 0, f"h{rank}", 1, "") for rank in range(3)]
    same = {"torch version": "2.13", "model.hidden_size": "64"}
    check_fingerprints([same, same, dict(same)], peers)
    with pytest.raises(
        FingerprintMismatchError, match=r"rank 2 \(h2\).*model.hidden_size is 32 there and 64 on rank 0"
    ):
        check_fingerprints([same, same, same | {"model.hidden_size": "32"}], peers)
    with pytest.raises(FingerprintMismatchError, match=r"rank 1 \(h1\).*tensor x is 3 there and missing on rank 0"):
        check_fingerprints([same, same | {"tensor x": "3"}, same], peers)
