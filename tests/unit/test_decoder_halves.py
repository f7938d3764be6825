"""A prefill whose tokens are halved, so that one half's sum over ranks travels beside the other half's products."""

from pathlib import Path

import pytest
from support import families
from support.thread_ranks import ThreadCommunicator, on_ranks
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator


@pytest.mark.parametrize("ranks", [2, 3, 7])  # seven: one has no heads
@pytest.mark.parametrize("family", ["llama", "llama-tied-biased", "qwen3", "qwen3-moe", "smollm3"])
def test_halves_give_the_same_logits(family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def start(self: Communicator, tensor: Tensor, residual: Tensor) -> object:
        """Adds at the end alone: whoever reads a half before it has called for its sum reads something else."""
        started.append(len(tensor))
        return lambda: residual.add_(self.all_reduce(tensor))

    monkeypatch.setattr(ThreadCommunicator, "adds_at_once", lambda self, x: True)
    monkeypatch.setattr(ThreadCommunicator, "overlaps", lambda self, x: len(x) > 1)
    monkeypatch.setattr(ThreadCommunicator, "start_all_reduce_add_", start)
    families.write_family(family, tmp_path)
    found = on_ranks(ranks, lambda comm: families.largest_difference(tmp_path, comm))
    assert max(max(of_rank.values()) for of_rank in found) < families.TOLERANCE
    longest = sum(families.LENGTHS)
    assert {longest // 2, -(-longest // 2)} <= set(started)
