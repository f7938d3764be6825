"""SIGTERM and SIGINT, at every time and to every process: a clean end."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable

import pytest
from torchrun_job import Job, wait_until

StartJob = Callable[..., Job]
HOST = socket.gethostname()


def stop(job: Job, told: int | None) -> None:
    """SIGTERM to a rank; None: to torchrun."""
    if told is None:
        job.signal(signal.SIGTERM)
    else:
        job.signal_rank(told, signal.SIGTERM)


def test_sigterm_to_torchrun_ends_what_does_not_finish_in_time(start_job: StartJob) -> None:
    job = start_job("--drain-timeout", "1").await_ready()
    endless = job.stream().await_chunks()
    began = time.monotonic()
    job.signal(signal.SIGTERM)
    assert endless.await_end(6) == "error"
    assert job.await_end(25) == 1  # torchrun's own, whenever it is signalled
    job.note("SIGTERM to torchrun mid-stream, --drain-timeout 1", time.monotonic() - began)
    assert "stopped: all 2 ranks" in job.log
    assert "exitcode" not in job.log  # torchrun lists ranks that did not exit 0


def test_only_a_deliberate_second_signal_stops_at_once(start_job: StartJob) -> None:
    job = start_job(bare=[{}, {}]).await_ready()
    endless = job.stream().await_chunks()
    for _ in range(2):  # SLURM and torchrun deliver it twice
        job.signal_rank(0, signal.SIGINT)
        job.signal_rank(1, signal.SIGINT)
    chunks = endless.chunks
    time.sleep(1.2)
    assert endless.chunks > chunks and not endless.ended
    began = time.monotonic()
    job.signal_rank(1, signal.SIGINT)
    assert endless.await_end(3) == "error"
    assert job.await_end(6) == 0
    job.note("second SIGINT", time.monotonic() - began)


def test_sigterm_while_loading(start_job: StartJob) -> None:
    job = start_job(env={"FAULT": "slowload"})
    assert wait_until(lambda: "loading slowly" in job.log and job.health() == 503, 60), job.log
    began = time.monotonic()
    job.signal(signal.SIGTERM)
    job.await_end(8)
    job.note("SIGTERM to torchrun while loading", time.monotonic() - began)
    assert "exitcode" not in job.log
    assert "ERROR" not in job.log


def test_sigterm_to_one_rank_while_loading(start_job: StartJob) -> None:
    job = start_job(env={"FAULT": "slowload"}, bare=[{}, {}])
    assert wait_until(lambda: "loading slowly" in job.log, 60), job.log
    job.signal_rank(1, signal.SIGTERM)
    job.await_end(10)
    assert [process.returncode for process in job.processes] == [0, 0], job.log
    assert "ERROR" not in job.log


@pytest.mark.parametrize(
    ("suspended", "load", "told"),
    [(1, "slowload", 0), (0, "slowload", 1), (1, "stuckload", 0), (1, "slowload", None)],
)
def test_a_rank_that_is_suspended_does_not_keep_the_others_while_loading(
    start_job: StartJob, suspended: int, load: str, told: int | None
) -> None:
    """torchrun waits for every rank: those that can leave name the one that cannot, and end it."""
    job = start_job(env={"FAULT": load, "FAULT_RANK": str(1 - suspended), "SILENCE_S": "2"})
    assert wait_until(lambda: "loading slowly" in job.log and job.health() == 503, 60), job.log
    began = time.monotonic()
    job.signal_rank(suspended, signal.SIGSTOP)
    stop(job, told)
    assert job.await_end(12) != 0
    job.note(f"SIGTERM to {told} while loading ({load}), {suspended} suspended", time.monotonic() - began)
    assert f"rank {suspended} ({HOST}) is lost: no sign of life for" in job.log


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_loading_is_named(start_job: StartJob, rank: int) -> None:
    """torchrun's SIGTERM is mostly the first that the others hear of it."""
    job = start_job(env={"FAULT": "slowload", "FAULT_RANK": str(1 - rank)})
    assert wait_until(lambda: "loading slowly" in job.log and job.health() == 503, 60), job.log
    job.signal_rank(rank, signal.SIGKILL)
    assert job.await_end(8) != 0
    assert f"rank {rank} ({HOST}) is lost: its process is gone" in job.log
    assert "stopped while starting" not in job.log


def test_sigterm_to_one_rank_before_the_ranks_have_met(start_job: StartJob) -> None:
    """The others do not know it yet, and would wait for it."""
    job = start_job(env={"FAULT": "latemeet"})
    assert wait_until(lambda: "meeting late" in job.log, 60), job.log
    job.signal_rank(1, signal.SIGTERM)
    assert job.await_end(20) == 0, job.log
    assert "stopped while starting" in job.log


def test_sigterm_when_some_ranks_serve_and_others_do_not_yet(start_job: StartJob) -> None:
    """Those that serve wait for the others in their first step: it is no stop while starting any more, on no rank."""
    job = start_job(env={"FAULT": "lateready"}).await_ready()
    job.signal_rank(0, signal.SIGTERM)
    assert job.await_end(12) == 0, job.log
    assert "stopped: all 2 ranks" in job.log
    assert "stopped while starting" not in job.log


@pytest.mark.parametrize(
    ("fault", "suspended", "told"),
    [("stopclose", 0, 1), ("stopclose", 1, 0), ("stopclose", 1, None), ("stopleave", 1, 1)],
)
def test_a_rank_that_is_suspended_after_the_step_loop_does_not_keep_the_others(
    start_job: StartJob, fault: str, suspended: int, told: int | None
) -> None:
    """The others have nothing left to do, and nobody else could tell torchrun what it waits for."""
    # The main thread is not to be gone before the suspended rank is ended, and torchrun has the reason.
    slow = {"SILENCE_S": "2", "REPORT_S": "0.5"}
    job = start_job(env={"FAULT": fault, "FAULT_RANK": str(suspended)} | slow).await_ready()
    assert job.complete().status_code == 200
    began = time.monotonic()
    stop(job, told)
    assert job.await_end(12) != 0
    job.note(f"SIGTERM to {told}, {suspended} suspended after the step loop ({fault})", time.monotonic() - began)
    assert f"rank {suspended} ({HOST}) is lost: no sign of life for" in job.log


def test_a_rank_that_is_suspended_in_a_drain_is_named(start_job: StartJob) -> None:
    """Sooner than a step may take, and than the drain may last."""
    job = start_job(env={"SILENCE_S": "2"}).await_ready()
    endless = job.stream().await_chunks()
    job.signal_rank(0, signal.SIGTERM)
    assert wait_until(lambda: job.complete().status_code == 503, 5)
    began = time.monotonic()
    job.signal_rank(1, signal.SIGSTOP)
    assert endless.await_end(8) == "error"
    assert job.await_end(12) != 0
    job.note("SIGSTOP of a rank in a drain", time.monotonic() - began)
    assert f"rank 1 ({HOST}) is lost: no sign of life for" in job.log
