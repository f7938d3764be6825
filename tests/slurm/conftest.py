from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM cluster of two nodes with two fake GPUs each."""
    reason = why_not()
    if reason:
        pytest.skip(f"no SLURM cluster: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
