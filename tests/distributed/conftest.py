from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.two_hosts import TwoHosts, why_not
from torchrun_job import Job


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start_job(*options, **arguments)`: a Job, whose processes are gone after the test."""
    jobs: list[Job] = []

    def start(*options: str, **arguments: object) -> Job:
        jobs.append(Job(tmp_path, *options, **arguments))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two network namespaces; skips where there can be none."""
    if why_not():
        pytest.skip(why_not())
    hosts = TwoHosts()
    try:
        yield hosts
    finally:
        hosts.close()
