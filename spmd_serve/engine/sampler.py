"""Drawing tokens from vocabulary-sharded logits.

A token is a pure function of (logits, sampling params, seed, position): argmax of logit / T + Gumbel noise, where the
noise is a function of seed, position and vocabulary index (kernels/gumbel.py). Each rank takes its shard's best; the
ranks exchange (value, index) pairs and the best pair wins, the lowest index on ties. top-k, top-p and min-p become a
threshold per row, worked out from each rank's best candidates; logits below it are filtered on every rank alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.kernels.gumbel import gumbel_argmax
from spmd_serve.types import SamplingParams

_CANDIDATES = 1024  # per rank and row, before the whole shard is gathered for a top-p that needs more


class Sampler:
    """`vocab`: the vocabulary rows of this rank; `vocab_size`: of the whole model."""

    def __init__(self, comm: Communicator, vocab: range, vocab_size: int) -> None:
        self._comm = comm
        self._vocab = vocab
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Greedy (temperature 0) or temperature sampling. Collective.

        Args:
            logits: float32 [rows, vocabulary rows of this rank].
            temperature, seeds, positions: [rows]; position is the index of the token being drawn in its sequence.

        Returns:
            int64 [rows], equal on all ranks.
        """
        values, indices = gumbel_argmax(logits, temperature, seeds, positions, self._vocab.start)
        if self._comm.world_size == 1:
            return indices
        pairs = self._comm.all_gather(torch.stack((values.double(), indices.double())))
        winner = pairs[:, 0].argmax(dim=0)  # the first of equals, so the lowest index
        return pairs[:, 1].gather(0, winner[None])[0].long()

    def filter_(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        """Set logits outside each row's top-k, top-p and min-p to -inf, in place. Collective if any row asks.

        Ties with the last one kept are kept. Probabilities are those after temperature; top-p follows top-k.
        """
        rows = [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p > 0)]
        if not rows:
            return
        chosen = [params[i] for i in rows]
        index = torch.tensor(rows, device=logits.device)
        temperature = logits.new_tensor([p.temperature for p in chosen])[:, None]
        scaled = logits[index] / temperature
        largest_k = max((p.top_k for p in chosen if p.top_k < self._vocab_size), default=0)
        wants_mass = any(p.top_p < 1 and not p.top_k for p in chosen)
        count = max(largest_k, _CANDIDATES if wants_mass else 1)
        thresholds, complete = self._thresholds(scaled, chosen, min(count, self._vocab_size))
        if not complete:  # the same on all ranks: it follows from gathered data
            thresholds, _ = self._thresholds(scaled, chosen, self._vocab_size)
        logits[index] = logits[index].masked_fill(scaled < thresholds[:, None], float("-inf"))

    def _thresholds(self, scaled: Tensor, params: Sequence[SamplingParams], count: int) -> tuple[Tensor, bool]:
        """Each row's lowest kept value of `scaled` [rows, shard], from the `count` best of every rank.

        Returns the thresholds [rows] and whether `count` candidates were enough to know them.
        """
        rows, shard = scaled.shape
        best = scaled.new_full((rows, count + 1), float("-inf"))
        if shard:
            best[:, : min(count, shard)] = scaled.topk(min(count, shard), dim=-1).values
            best[:, count] = scaled.logsumexp(dim=-1)
        gathered = self._comm.all_gather(best)
        candidates = gathered[..., :count]
        # Values above every rank's last candidate are all known.
        horizon = (
            candidates[..., -1].amax(dim=0) if count < self._vocab_size else scaled.new_full((rows,), float("-inf"))
        )
        total = gathered[..., count].logsumexp(dim=0)
        ordered = candidates.transpose(0, 1).reshape(rows, -1).sort(dim=-1, descending=True).values
        thresholds = scaled.new_full((rows,), float("-inf"))
        complete = True
        for i, p in enumerate(params):
            row, limit, mass = ordered[i], float("-inf"), total[i]
            if 0 < p.top_k < self._vocab_size:
                limit = float(row[p.top_k - 1])
                row = row[: p.top_k]
                mass = row.logsumexp(dim=-1)
            if p.top_p < 1:
                before = (row - mass).exp().cumsum(dim=-1).roll(1)
                before[0] = 0
                kept = max(int((before < p.top_p).sum()), 1)
                limit = max(limit, float(row[kept - 1]))
                if not p.top_k and (kept == len(row) or limit < float(horizon[i])):
                    complete = count >= self._vocab_size
            if p.min_p > 0:
                limit = max(limit, float(ordered[i, 0] + torch.tensor(p.min_p).log()))
            thresholds[i] = limit
        return thresholds, complete
