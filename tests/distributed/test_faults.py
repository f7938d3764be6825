"""One rank goes wrong while clients read streams: the job ends in time, names the rank, and leaves nobody waiting."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable

import pytest
from faulty import TRIGGER_SEED
from torchrun_job import Job, wait_until

StartJob = Callable[..., Job]
SHORT = ("--step-timeout", "3", "--control-timeout", "5", "--heartbeat-interval", "0.5")
HOST = socket.gethostname()
ALIVE = ("error",)  # rank 0 lives: its clients hear of the failure
DEAD = ("error", "broken")  # rank 0 is the one that is gone: the connection may just end


@pytest.mark.parametrize(
    ("fault", "rank", "says", "clients_see", "limit_s"),
    [
        ("token", 1, "RankDivergenceError: rank 1 ({host}) decided otherwise than rank 0", ALIVE, 12),
        ("raise", 1, "ZeroDivisionError: injected into the forward pass", ALIVE, 12),
        ("raise", 0, "ZeroDivisionError: injected into the forward pass", ALIVE, 12),
        ("hang", 1, "rank 1 ({host}) hangs: step", ALIVE, 15),
        ("hang", 0, "rank 0 ({host}) hangs: step", ALIVE, 15),
        ("stop", 1, "rank 1 ({host}) is lost: no sign of life", ALIVE, 12),
        ("stop", 0, "rank 0 ({host}) is lost: no sign of life", DEAD, 12),
        ("kill", 1, "rank 1 ({host}) is lost: its process is gone", ALIVE, 10),
        ("kill", 0, "rank 0 ({host}) is lost: its process is gone", DEAD, 10),
    ],
)
def test_a_fault_in_a_step(
    start_job: StartJob, fault: str, rank: int, says: str, clients_see: tuple[str, ...], limit_s: float
) -> None:
    timeouts = SHORT if fault in ("hang", "stop") else ()  # the others are noticed at once
    job = start_job(*timeouts, env={"FAULT": fault, "FAULT_RANK": str(rank)}).await_ready()
    running = job.stream().await_chunks()
    began = time.monotonic()
    trigger = job.stream(seed=TRIGGER_SEED)
    if fault == "hang":
        assert wait_until(lambda: job.health() in (503, 0), 10)
    assert job.await_end(limit_s) != 0
    job.note(f"{fault} on rank {rank}", time.monotonic() - began)
    assert says.format(host=HOST) in job.log, job.log
    if fault == "raise":  # as the last thing in the log, also in torchrun's own summary
        assert "ZeroDivisionError: injected into the forward pass" in job.log.splitlines()[-6:][
            0
        ] or job.log.rstrip().endswith("=")
    assert running.await_end(1) in clients_see, running.detail
    assert trigger.await_end(1) in (*clients_see, "refused"), trigger.detail


def test_an_event_loop_that_stands_still(start_job: StartJob) -> None:
    job = start_job(*SHORT, env={"FAULT": "http", "FAULT_RANK": "0"}).await_ready()
    began = time.monotonic()
    stream = job.stream(seed=TRIGGER_SEED)
    assert job.await_end(12) != 0
    job.note("an HTTP event loop that stands still", time.monotonic() - began)
    said = rf"ERROR rank 0 step .* rank 0 \({HOST}\) failed: FrontendError: the HTTP frontend has given no sign of life for"
    assert re.search(said, job.log), job.log
    assert stream.await_end(1) == "broken", stream.detail


@pytest.mark.parametrize("fault", ["watcher", "messenger"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_watch_no_more_ends(start_job: StartJob, fault: str, rank: int) -> None:
    """It would hear neither signals nor of other ranks' ends."""
    job = start_job(env={"FAULT": fault, "FAULT_RANK": str(rank)}).await_ready()
    began = time.monotonic()
    stream = job.stream(seed=TRIGGER_SEED)
    assert job.await_end(10) != 0
    job.note(f"an exception in the {fault} of rank {rank}", time.monotonic() - began)
    assert f"rank {rank} ({HOST}) failed: MemoryError: injected into a thread" in job.log
    assert stream.await_end(1) in ("error", "broken"), stream.detail


@pytest.mark.parametrize(
    ("number", "says", "limit_s"),
    [
        (signal.SIGKILL, "ended with code -9", 6),
        (signal.SIGSTOP, "has given no sign of life for", 9),
    ],
)
@pytest.mark.parametrize("loading", [False, True])
def test_a_frontend_process_that_is_gone_or_stopped(
    start_job: StartJob, number: int, says: str, limit_s: float, loading: bool
) -> None:
    fault = {"FAULT": "slowload", "FAULT_RANK": "0"} if loading else {}
    job = start_job("--frontend", "process", *SHORT, env=fault)
    if loading:
        assert wait_until(lambda: "loading slowly" in job.log and job.health() == 503, 60), job.log
        streams = []
    else:
        streams = [job.await_ready().stream().await_chunks()]
    began = time.monotonic()
    (frontend,) = job.frontends()
    os.kill(frontend, number)
    assert job.await_end(limit_s) != 0
    job.note(f"{signal.Signals(number).name} of a frontend process, {loading=}", time.monotonic() - began)
    said = f"rank 0 ({HOST}) failed: FrontendError: HTTP frontend process 0 {says}"
    assert [said in line for line in job.log.splitlines() if " ERROR rank " in line] == [True]
    assert [stream.await_end(1) for stream in streams] == ["broken"] * len(streams)


def test_several_suspended_ranks(start_job: StartJob) -> None:
    """One is named; none of them can end itself, nor hears torchrun, which would wait for 30 s."""
    job = start_job(*SHORT, ranks=3).await_ready()
    stream = job.stream().await_chunks()
    began = time.monotonic()
    for rank in (1, 2):
        job.signal_rank(rank, signal.SIGSTOP)
    assert job.await_end(10) != 0
    job.note("SIGSTOP of two of three ranks", time.monotonic() - began)
    assert "is lost: no sign of life" in job.log
    assert stream.await_end(1) == "error", stream.detail


def test_a_job_that_is_suspended_as_a_whole_goes_on(start_job: StartJob) -> None:
    """As a debugger, a container's pause or Ctrl-Z does it, for longer than a step or a silence may last."""
    job = start_job("--step-timeout", "3", env={"STEP_TIME": "0.05"}).await_ready()
    stream = job.stream(max_tokens=100).await_chunks()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in job.pids().values():
            os.kill(pid, number)
        time.sleep(5)
    assert stream.await_end(30) == "length", job.log
    assert job.complete().status_code == 200


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_leaves_no_survivor_even_without_torchrun(start_job: StartJob, rank: int) -> None:
    job = start_job(bare=[{}, {}]).await_ready()  # idle, with default timeouts
    began = time.monotonic()
    job.signal_rank(rank, signal.SIGKILL)
    job.await_end(10)
    job.note(f"kill -9 of idle rank {rank} without torchrun", time.monotonic() - began)
    assert f"rank {rank} ({HOST}) is lost: its process is gone" in job.log


def test_a_rank_that_is_killed_while_the_others_stop_is_named(start_job: StartJob) -> None:
    """torchrun's SIGTERM may be the first that an idle rank hears of another one's end."""
    job = start_job(ranks=3).await_ready()
    began = time.monotonic()
    job.signal_rank(2, signal.SIGKILL)
    job.signal_rank(0, signal.SIGTERM)
    assert job.await_end(10) != 0
    job.note("kill -9 of a rank in a job that stops", time.monotonic() - began)
    assert f"rank 2 ({HOST}) is lost: its process is gone" in job.log
    assert "RankLostError: rank 2" not in job.log.split("ChildFailedError")[0]  # nobody takes the blame for it


def test_a_killed_agent_leaves_no_orphan(start_job: StartJob) -> None:
    job = start_job().await_ready()
    began = time.monotonic()
    job.signal(signal.SIGKILL)
    job.await_end(10)
    job.note("kill -9 of the torchrun agent", time.monotonic() - began)


def test_torchrun_restarts_the_service_on_the_same_port(start_job: StartJob) -> None:
    job = start_job(torchrun=("--max-restarts=2",)).await_ready()
    for rank in (1, 0):
        began = time.monotonic()
        job.signal_rank(rank, signal.SIGKILL)
        assert wait_until(lambda: job.health() == 0, 10), job.log
        job.await_ready()
        job.note(f"serving again after kill -9 of rank {rank}", time.monotonic() - began)
        assert job.complete().status_code == 200
    job.signal_rank(0, signal.SIGKILL)  # no restart is left
    assert job.await_end(15) != 0


def test_a_killed_rank_in_the_midst_of_real_work(start_job: StartJob) -> None:
    job = start_job(entry=("-m", "spmd_serve")).await_ready()  # the bundled model
    streams = [job.stream() for _ in range(4)]
    for stream in streams:
        stream.await_chunks()
    began = time.monotonic()
    job.signal_rank(1, signal.SIGKILL)
    assert [stream.await_end(6) for stream in streams] == ["error"] * 4
    assert job.await_end(10) != 0
    job.note("kill -9 of rank 1, real model, 4 streams", time.monotonic() - began)
    assert f"rank 1 ({HOST}) is lost: its process is gone" in job.log
