"""What loading costs: all ranks together read about one model, although one KV head lies on two of them."""

import json
import os
import subprocess
import sys

from spmd_serve.config import ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.models.resolve import resolve_model

RANKS = 4


def test_all_ranks_read_about_one_model() -> None:
    folder = resolve_model(ModelOptions(), RankInfo())
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "spmd_serve.bench", "load", "--json", "--device", "cpu"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loads = [json.loads(line) for line in done.stdout.splitlines()]
    by_rank = {load["rank"]: load["bytes_read"] for load in loads if load["cached"]}
    assert by_rank.pop(None) <= stored
    assert sorted(by_rank) == list(range(RANKS))
    assert 0.99 * stored < sum(by_rank.values()) <= 1.1 * stored
    assert max(by_rank.values()) < 0.5 * stored
