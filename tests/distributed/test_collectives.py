"""The data plane's collectives between real processes, against gloo's."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="memory is shared on Linux on x86-64 alone"
)
def test_shared_memory_of_2_3_and_4_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(Path(__file__).with_name("collective_ranks.py"))]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} done" in done.stdout for rank in range(4))
