"""What ranks compute together, in one job of four: collectives against gloo's, the families' logits, what loading reads.

Every family's logits against transformers in float32: prefill, chunked prefill and decode, on 2 and 3 ranks (on one rank:
tests/unit/test_families.py). The tiny models have 2 KV heads, so that three ranks share a KV head unevenly, and sizes that two
and three do not divide.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import families
from support.plain_job import torchrun

from spmd_serve.config import ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.models.resolve import resolve_model

RANKS = 4

Differences = list[dict[str, dict[str, float]]]  # of each rank: family -> way of computing -> largest difference


@dataclass
class Outcome:
    """Of the job: what it printed, and number of ranks -> differences."""

    output: str
    differences: dict[int, Differences]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in families.FAMILIES:
        families.write_family(name, root / name)
    return root


@pytest.fixture(scope="module")
def outcome(models: Path) -> Outcome:
    out = models.parent / "differences.json"
    script = str(Path(__file__).with_name("data_plane_ranks.py"))
    done = subprocess.run(
        torchrun(RANKS, script, str(models), str(out)),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},  # `support` too
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {int(ranks): of_ranks for ranks, of_ranks in json.loads(out.read_text()).items()}
    return Outcome(done.stdout, found)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="memory is shared on Linux on x86-64 alone"
)
def test_shared_memory_of_2_3_and_4_ranks(outcome: Outcome) -> None:
    assert all(f"rank {rank} done" in outcome.output for rank in range(RANKS))


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_logits_equal_transformers(outcome: Outcome, ranks: int, family: str) -> None:
    differences = outcome.differences[ranks]
    assert len(differences) == ranks
    for rank, found in enumerate(differences):
        assert set(found[family]) == {"prefill", "kept", "chunked", "decode"}
        for way, difference in found[family].items():
            assert difference < families.TOLERANCE, f"rank {rank}, {way}"


def test_all_ranks_read_about_one_model(outcome: Outcome) -> None:
    """By `bench load`; although one KV head lies on two of the ranks."""
    folder = resolve_model(ModelOptions(), RankInfo())
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    loads = [json.loads(line) for line in outcome.output.splitlines() if line.startswith("{")]
    by_rank = {load["rank"]: load["bytes_read"] for load in loads if load["cached"]}
    assert by_rank.pop(None) <= stored
    assert sorted(by_rank) == list(range(RANKS))
    assert 0.99 * stored < sum(by_rank.values()) <= 1.1 * stored
    assert max(by_rank.values()) < 0.5 * stored
