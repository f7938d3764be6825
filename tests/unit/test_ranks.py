"""Where a rank is, which interface it uses, its signs of life, what signals ask for, who runs other software."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from spmd_serve.distributed.beats import Messenger, Progress, main_thread_location
from spmd_serve.distributed.board import Board, Peer
from spmd_serve.distributed.channel import is_peer_error, peer_error
from spmd_serve.distributed.fingerprint import check_fingerprints
from spmd_serve.distributed.liveness import Liveness
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
        ({"RANK": "²"}, "RANK is '²'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "8"}, "RANK 8 of WORLD_SIZE 8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK 4 of LOCAL_WORLD_SIZE 4"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536, which is no port"),
    ],
)
def test_an_impossible_environment(change: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rank_info(TORCHRUN | change)


def test_a_rank_without_a_world_size() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is not set"):
        rank_info({"RANK": "0"})


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
        (ONE_HOST, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}, None, "lo"),
        (ONE_HOST, {"eth0": ["10.0.0.1"]}, None, None),
        (TWO_HOSTS, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]}, "10.1.0.1", "ib0"),
        (TWO_HOSTS, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}, "127.0.0.1", "eth0"),
        (TWO_HOSTS, {"lo": ["127.0.0.1", "::1"], "eth0": ["fd77::1"]}, None, "eth0"),
        (TWO_HOSTS, {"lo": ["::1"], "eth0": ["10.0.0.1", "fd77::1"], "ib0": ["10.1.0.1"]}, "fd77::1", "eth0"),
        (TWO_HOSTS, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "br0": ["fd78::1"]}, "127.0.0.1", "eth0"),
        (ONE_HOST, {"lo": ["::1"], "eth0": ["fd77::1"]}, None, "lo"),
    ],
)
def test_the_interface_that_others_can_reach(
    ranks: RankInfo, own: dict[str, list[str]], towards_head: str | None, expected: str | None
) -> None:
    assert choose_interface(ranks, own, towards_head) == expected


def test_several_interfaces_and_a_loopback_name_is_an_error_that_names_the_variable() -> None:
    own = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]}
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME.*eth0 10\.0\.0\.1, ib0 10\.1\.0\.1"):
        choose_interface(TWO_HOSTS, own, "127.0.1.1")


def test_this_machine_has_a_loopback_interface() -> None:
    assert ["127.0.0.1"] in [addresses[:1] for addresses in interfaces().values()]


# ---- signs of life


def failing_device() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


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


def test_a_watcher_that_comes_late_holds_it_against_nobody(signals: StopSignals) -> None:
    """Who was suspended, or had no core, did not hear the others."""
    store, peers = HashStore(), [Peer(rank, 2, rank, host, os.getpid(), "") for rank, host in enumerate("ab")]
    liveness = Liveness(Board(store, RankInfo(0, 2), peers, lambda: store), Progress(), signals)
    an_hour_later = time.monotonic() + 3600
    liveness._look(an_hour_later)
    assert liveness._messenger.report is None
    assert max(liveness._evidence(an_hour_later).silence[1], liveness._evidence(an_hour_later).store_silence) < 5


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
