"""Vocabulary-parallel embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.kernels.rows import lookup


class Embedding:
    """Rows `vocab` of the embedding table live on this rank; a lookup is summed over ranks."""

    def __init__(
        self, vocab: range, hidden_size: int, *, dtype: torch.dtype, device: torch.device, comm: Communicator
    ) -> None:
        self.weight = torch.empty(len(vocab), hidden_size, dtype=dtype, device=device)
        self._vocab = vocab
        self._comm = comm

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [tokens] -> [tokens, hidden]. Collective."""
        rows = lookup(self.weight, tokens, self._vocab.start, whole=self._comm.world_size == 1)
        return self._comm.all_reduce(rows)
