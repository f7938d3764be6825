"""Every family's logits against transformers in float32: prefill, chunked prefill and decode, on 1, 2 and 3 ranks.

The tiny models have 2 KV heads, so that three ranks share a KV head unevenly, and sizes that two and three do not divide.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import families

from spmd_serve.distributed.collectives import Communicator

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in families.FAMILIES:
        families.write_family(name, root / name)
    return root


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n}-ranks")
def differences(request: pytest.FixtureRequest, models: Path) -> list[dict[str, dict[str, float]]]:
    """Of each rank: family -> way of computing -> largest difference."""
    ranks: int = request.param
    if ranks == 1:
        return [{folder.name: families.largest_difference(folder, Communicator()) for folder in models.iterdir()}]
    out = models.parent / f"differences-{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [families.__file__, str(models), str(out)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    everywhere: list[Any] = json.loads(out.read_text())
    assert len(everywhere) == ranks
    return everywhere


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_equal_transformers(differences: list[dict[str, dict[str, float]]], family: str) -> None:
    for rank, found in enumerate(differences):
        assert set(found[family]) == {"prefill", "chunked", "decode"}
        for way, difference in found[family].items():
            assert difference < TOLERANCE, f"rank {rank}, {way}"
