"""Drawing tokens from vocabulary-sharded logits.

A token is a pure function of (logits, sampling params, seed, position): argmax of logit / T + Gumbel noise, where the
noise is a function of seed, position and vocabulary index (kernels/gumbel.py). Each rank takes its shard's best; the
ranks exchange (value, index) pairs and the best pair wins, the lowest index on ties. top-k, top-p and min-p become a
threshold per row; logits below it are filtered on every rank alike. On GPUs one kernel finds it, over the gathered logits
(kernels/gpu/filters.py); CPUs work it out from each rank's best candidates (`Sampler._thresholds`). kernels/filters.py has the
definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.kernels.filters import Filters, lowest_kept
from spmd_serve.kernels.gumbel import gumbel_argmax

_CANDIDATES = 1024  # per rank and row, before the whole shard is gathered for a top-p that needs more


class Sampler:
    """`vocab`: the vocabulary rows of this rank; `vocab_size`: of the whole model."""

    def __init__(self, comm: Communicator, vocab: range, vocab_size: int) -> None:
        self._comm = comm
        self._vocab = vocab
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Greedy (temperature 0) or temperature sampling. Collective.

        Args:
            logits: float32 [rows, vocabulary rows of this rank].
            temperature, seeds: tables, by slot.
            positions: int64 [rows], the index of the token being drawn in its sequence.
            slots: int64 [rows], the rows' places in the tables.

        Returns:
            int64 [rows], equal on all ranks; NOT_A_TOKEN where the logits are not numbers.
        """
        values, indices = gumbel_argmax(logits, temperature, seeds, positions, self._vocab.start, slots)
        return self._comm.best_index(values, indices)  # collective; of equals the lowest rank's, so the lowest index

    def filter_(self, logits: Tensor, filters: Filters, slots: Tensor) -> None:
        """Set logits outside each row's top-k, top-p and min-p to -inf, in place. Collective if any row asks.

        Probabilities are those after temperature; top-p follows top-k. Ties with the last one kept are kept.

        Args:
            logits: [rows, vocabulary rows of this rank], any float dtype.
            slots: int64 [rows], the rows' places in the tables.
        """
        if logits.is_cuda:
            lowest = lowest_kept(self._gather(logits), filters, slots)
            logits.masked_fill_(logits < lowest[:, None], float("-inf"))
            return
        index, asked = _Asked.of(filters, slots, self._vocab_size)
        if not len(index):
            return
        scaled = logits[index].float() / asked.temperature[:, None]
        count = max(int(asked.top_k.where(asked.has_top_k, 0).amax()), 1)
        if asked.any_bare_top_p:
            count = max(count, _CANDIDATES)
        thresholds, enough = self._thresholds(scaled, asked, min(count, self._vocab_size))
        if not enough:  # the same on all ranks: it follows from gathered data
            thresholds, _ = self._thresholds(scaled, asked, self._vocab_size)
        logits[index] = logits[index].masked_fill(scaled < thresholds[:, None], float("-inf"))

    def _gather(self, logits: Tensor) -> Tensor:
        """[rows, shard] -> the whole vocabulary's, [ranks, rows, width], -inf where a rank has less. Collective."""
        ranks = self._comm.world_size
        if ranks == 1:
            return logits[None]
        width = -(-self._vocab_size // ranks // 16) * 16
        assert logits.shape[1] <= width, "the vocabulary is split evenly"
        return self._comm.all_gather(F.pad(logits, (0, width - logits.shape[1]), value=float("-inf")))

    def _thresholds(self, scaled: Tensor, asked: _Asked, count: int) -> tuple[Tensor, bool]:
        """Each row's lowest kept value of `scaled` [rows, shard], from the `count` best of every rank.

        Shares are taken relative to the best value: at low temperatures values are so large that the logarithm of a sum of
        them has few digits left for the shares.

        Returns the thresholds [rows] and whether `count` candidates were enough to know them.
        """
        rows, shard = scaled.shape
        best = scaled.new_full((rows, count + 1), float("-inf"))
        if shard:
            best[:, : min(count, shard)] = scaled.topk(min(count, shard), dim=-1).values
            own_best = best[:, :1].clamp(min=torch.finfo(torch.float32).min)  # all may be filtered
            best[:, count] = (scaled - own_best).logsumexp(dim=-1)
        gathered = self._comm.all_gather(best)
        candidates = gathered[..., :count]
        ordered = candidates.transpose(0, 1).reshape(rows, -1).sort(dim=-1, descending=True).values
        width = ordered.shape[1]
        relative = ordered - ordered[:, :1]
        kept = asked.top_k.clamp(max=width)
        # CUDA's scan of a single row adds in an order that depends on timing: ranks could disagree about what is enough, and
        # one of them would gather alone. Of two rows it is the same order every time.
        up_to = (relative if rows > 1 else relative.expand(2, -1)).logcumsumexp(dim=-1)[:rows]
        # top-p is a share of what top-k keeps, or of everything.
        total = (gathered[..., count] + (candidates[..., 0] - ordered[:, 0])).logsumexp(dim=0)
        mass = torch.where(asked.has_top_k, up_to.gather(1, kept[:, None] - 1)[:, 0], total)
        before = (up_to - mass[:, None]).exp().roll(1, dims=-1)  # probability of all better ones
        before[:, 0] = 0
        # Where top-p is off, rounding must not cut what is left of the tail.
        in_nucleus = ((before < asked.top_p[:, None]) | (asked.top_p >= 1)[:, None]).sum(dim=-1).clamp(min=1)
        kept = torch.minimum(kept, in_nucleus)
        thresholds = ordered.gather(1, kept[:, None] - 1)[:, 0]
        open_ended = ~asked.has_top_k & (asked.top_p >= 1)
        thresholds = thresholds.masked_fill(open_ended, float("-inf"))
        thresholds = torch.maximum(thresholds, ordered[:, 0] + asked.min_p.log())
        if count >= self._vocab_size or not asked.any_bare_top_p:
            return thresholds, True
        # Values above every rank's last candidate are all known; a nucleus that reaches below them is not.
        horizon = candidates[..., -1].amax(dim=0)
        unsure = ~asked.has_top_k & (asked.top_p < 1) & ((kept == width) | (thresholds < horizon))
        return thresholds, not bool(unsure.any())


@dataclass(frozen=True)
class _Asked:
    """The filters of the rows that have any, all [rows]. `top_k` is the vocabulary size where there is none."""

    temperature: Tensor
    top_k: Tensor
    has_top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    any_bare_top_p: bool  # some row has top-p without top-k

    @classmethod
    def of(cls, filters: Filters, slots: Tensor, vocab_size: int) -> tuple[Tensor, _Asked]:
        """Which rows have any, int64 [n], and what they ask for."""
        temperature, top_k = filters.temperature[slots], filters.top_k[slots].long()
        top_p, min_p = filters.top_p[slots], filters.min_p[slots]
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        index = ((temperature > 0) & (has_top_k | (top_p < 1) | (min_p > 0))).nonzero()[:, 0]
        top_k = top_k.where(has_top_k, vocab_size)
        any_bare_top_p = bool((~has_top_k[index] & (top_p[index] < 1)).any())
        return index, cls(
            temperature=temperature[index],
            top_k=top_k[index],
            has_top_k=has_top_k[index],
            top_p=top_p[index],
            min_p=min_p[index],
            any_bare_top_p=any_bare_top_p,
        )
