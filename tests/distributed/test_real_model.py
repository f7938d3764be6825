"""Faults in the midst of real work: the bundled model on two ranks."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable

from torchrun_job import Job

StartJob = Callable[..., Job]
REAL = ("-m", "spmd_serve")


def test_a_killed_rank_ends_the_streams_and_the_job(start_job: StartJob) -> None:
    job = start_job(entry=REAL).await_ready()
    streams = [job.stream() for _ in range(4)]
    for stream in streams:
        stream.await_chunks()
    began = time.monotonic()
    job.signal_rank(1, signal.SIGKILL)
    assert [stream.await_end(6) for stream in streams] == ["error"] * 4
    assert job.await_end(10) != 0
    job.note("kill -9 of rank 1, real model, 4 streams", time.monotonic() - began)
    assert f"rank 1 ({socket.gethostname()}) is lost: its process is gone" in job.log


def test_sigterm_lets_streams_finish(start_job: StartJob) -> None:
    job = start_job(entry=REAL).await_ready()
    stream = job.stream(max_tokens=40).await_chunks()
    began = time.monotonic()
    job.signal(signal.SIGTERM)
    assert stream.await_end(20) == "length"
    assert job.await_end(25) == 1  # torchrun's own, whenever it is signalled
    job.note("SIGTERM to torchrun, real model, until all ranks have exited 0", time.monotonic() - began)
    assert job.log.count("stopped: all 2 ranks") == 1
    assert "exitcode" not in job.log
