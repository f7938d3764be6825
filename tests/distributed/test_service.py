"""A job whose ranks differ in everything that must not matter: hash seeds, clocks, speed. One job, used up by the tests in order."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from torchrun_job import Job, wait_until

CONTROL_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    options = ("--control-timeout", f"{CONTROL_TIMEOUT_S}", "--heartbeat-interval", "0.5", "--max-num-seqs", "4")
    job = Job(
        tmp_path_factory.mktemp("job"),
        *options,
        *("--request-timeout", f"{REQUEST_TIMEOUT_S}"),
        env={"HASHSEEDS": "1", "SKEW": "60", "FAULT": "slow", "FAULT_RANK": "1"},
    )
    try:
        yield job.await_ready()
    finally:
        job.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_beyond_the_control_timeout_costs_nothing(job: Job) -> None:
    job.complete()
    idle_s = 2.5 * CONTROL_TIMEOUT_S
    before = {pid: cpu_seconds(pid) for pid in job.pids().values()}
    time.sleep(idle_s)
    shares = {pid: (cpu_seconds(pid) - used) / idle_s for pid, used in before.items()}
    assert job.complete().status_code == 200
    assert max(shares.values()) < 0.05, shares
    job.note("idle: largest share of a core per rank, in percent", 100 * max(shares.values()))


def test_an_idle_service_answers_as_fast_as_a_busy_one(job: Job) -> None:
    def first_token_s() -> float:
        began = time.monotonic()
        assert job.complete(max_tokens=1).status_code == 200
        return time.monotonic() - began

    def idle_first_token_s() -> float:
        time.sleep(0.05)
        return first_token_s()

    idle = statistics.median(idle_first_token_s() for _ in range(9))
    running = job.stream().await_chunks()
    busy = statistics.median(first_token_s() for _ in range(9))
    running.await_end(REQUEST_TIMEOUT_S + 3)
    assert idle < busy + 0.05, (idle, busy)
    job.note("first token when idle, ms", 1000 * idle)
    job.note("first token when busy, ms", 1000 * busy)


def test_deadlines_under_overload_are_rank_0s(job: Job) -> None:
    began = time.monotonic()
    streams = [job.stream() for _ in range(12)]  # three times what runs at once, and none can finish in time
    ends = [(stream.await_end(REQUEST_TIMEOUT_S + 5), stream.status) for stream in streams]
    # Those that ran have an error in their stream; those whose time was up in the queue, a status.
    assert set(ends) <= {("error", 200), ("refused", 504)} and ends.count(("error", 200)) >= 4, ends
    assert time.monotonic() - began >= REQUEST_TIMEOUT_S
    assert job.complete().status_code == 200


def test_sigterm_to_one_rank_drains_the_job(job: Job) -> None:
    running = job.stream(max_tokens=60).await_chunks()
    job.signal_rank(1, signal.SIGTERM)
    assert wait_until(lambda: job.health() == 503, 5)
    refused = job.complete()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert running.await_end(10) == "length"
    assert job.await_end(25) == 0
    assert job.log.count("stopped: all 2 ranks") == 1
    assert "Traceback" not in job.log


def test_metrics_know_the_pages_as_soon_as_the_service_is_ready(start_job: Callable[..., Job]) -> None:
    job = start_job("--num-pages", "64", "--heartbeat-interval", "30", "--control-timeout", "90").await_ready()
    metrics = httpx.get(f"{job.url}/metrics", timeout=5, verify=False).text
    assert 'spmd_serve_kv_pages{state="free"} 64.0' in metrics.splitlines()
