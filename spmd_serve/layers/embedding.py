"""Vocabulary-parallel embedding and LM head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_serve.distributed.collectives import Communicator


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
        if self._comm.world_size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self._vocab.start
        mine = (local >= 0) & (local < len(self._vocab))
        if len(self._vocab) == 0:
            rows = self.weight.new_zeros(tokens.shape[0], self.weight.shape[1])
        else:
            rows = F.embedding(local.clamp(0, len(self._vocab) - 1), self.weight) * mine[:, None]
        return self._comm.all_reduce(rows)
