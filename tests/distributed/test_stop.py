"""SIGTERM and SIGINT, at every time and to every process: a clean end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from torchrun_job import Job, wait_until

StartJob = Callable[..., Job]


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
