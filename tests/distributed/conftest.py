from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
