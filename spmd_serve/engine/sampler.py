"""Drawing tokens from vocabulary-sharded logits.

A token is a pure function of (logits, sampling params, seed, position): argmax of logit / T + Gumbel noise, where the
noise is a function of seed, position and vocabulary index (kernels/gumbel.py). Each rank takes its shard's best; the
ranks exchange (value, index) pairs and the best pair wins, the lowest index on ties. top-k, top-p and min-p become a
threshold per row, worked out from each rank's best candidates; logits below it are filtered on every rank alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def sample(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """Greedy (temperature 0) or temperature sampling. Collective.

        Args:
            logits: float32 [rows, vocabulary rows of this rank].
            temperature, seeds, positions: [rows]; position is the index of the token being drawn in its sequence.
            slots: [rows]: temperature and seeds are tables, and these are the rows' places in them.

        Returns:
            int64 [rows], equal on all ranks.
        """
        values, indices = gumbel_argmax(logits, temperature, seeds, positions, self._vocab.start, slots)
        return self._comm.best_index(values, indices)  # collective; of equals the lowest rank's, so the lowest index

    def filter_(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        """Set logits outside each row's top-k, top-p and min-p to -inf, in place. Collective if any row asks.

        Ties with the last one kept are kept. Probabilities are those after temperature; top-p follows top-k.
        """
        rows = [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p > 0)]
        if not rows:
            return
        chosen = [params[i] for i in rows]
        index = torch.tensor(rows, device=logits.device)
        filters = _Filters.create(chosen, self._vocab_size, logits)
        scaled = logits[index] / filters.temperature[:, None]
        count = max(max(p.top_k if p.top_k < self._vocab_size else 0 for p in chosen), 1)
        if any(p.top_p < 1 and not p.top_k for p in chosen):
            count = max(count, _CANDIDATES)
        thresholds, enough = self._thresholds(scaled, filters, min(count, self._vocab_size))
        if not enough:  # the same on all ranks: it follows from gathered data
            thresholds, _ = self._thresholds(scaled, filters, self._vocab_size)
        logits[index] = logits[index].masked_fill(scaled < thresholds[:, None], float("-inf"))

    def _thresholds(self, scaled: Tensor, filters: _Filters, count: int) -> tuple[Tensor, bool]:
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
        ordered = candidates.transpose(0, 1).reshape(rows, -1).sort(dim=-1, descending=True).values
        width = ordered.shape[1]
        kept = filters.top_k.clamp(max=width)
        # CUDA's scan of a single row adds in an order that depends on timing: ranks could disagree about what is enough, and
        # one of them would gather alone. Of two rows it is the same order every time.
        up_to = (ordered if rows > 1 else ordered.expand(2, -1)).logcumsumexp(dim=-1)[:rows]
        # top-p is a share of what top-k keeps, or of everything.
        total = gathered[..., count].logsumexp(dim=0)
        mass = torch.where(filters.has_top_k, up_to.gather(1, kept[:, None] - 1)[:, 0], total)
        before = (up_to - mass[:, None]).exp().roll(1, dims=-1)  # probability of all better ones
        before[:, 0] = 0
        in_nucleus = (before < filters.top_p[:, None]).sum(dim=-1).clamp(min=1)
        kept = torch.minimum(kept, in_nucleus)
        thresholds = ordered.gather(1, kept[:, None] - 1)[:, 0]
        open_ended = ~filters.has_top_k & (filters.top_p >= 1)
        thresholds = thresholds.masked_fill(open_ended, float("-inf"))
        thresholds = torch.maximum(thresholds, ordered[:, 0] + filters.min_p.log())
        if count >= self._vocab_size or not filters.any_bare_top_p:
            return thresholds, True
        # Values above every rank's last candidate are all known; a nucleus that reaches below them is not.
        horizon = candidates[..., -1].amax(dim=0)
        unsure = ~filters.has_top_k & (filters.top_p < 1) & ((kept == width) | (thresholds < horizon))
        return thresholds, not bool(unsure.any())


@dataclass(frozen=True)
class _Filters:
    """The filters of some rows, all [rows]. `top_k` is the vocabulary size where there is none."""

    temperature: Tensor
    top_k: Tensor
    has_top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    any_bare_top_p: bool  # some row has top-p without top-k

    @classmethod
    def create(cls, params: Sequence[SamplingParams], vocab_size: int, like: Tensor) -> _Filters:
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        return cls(
            temperature=like.new_tensor([p.temperature for p in params]),
            top_k=torch.tensor(top_k, device=like.device),
            has_top_k=torch.tensor([k < vocab_size for k in top_k], device=like.device),
            top_p=like.new_tensor([p.top_p for p in params]),
            min_p=like.new_tensor([p.min_p for p in params]),
            any_bare_top_p=any(p.top_p < 1 and k == vocab_size for p, k in zip(params, top_k, strict=True)),
        )
