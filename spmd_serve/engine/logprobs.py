"""Log-probabilities from vocabulary-sharded logits, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.types import TokenLogprobs


@dataclass(frozen=True)
class LogprobTensors:
    """Results on the device: `read` waits for them. All [rows], the top ones [rows, n] with the best first."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    top: Sequence[int]

    def read(self) -> list[TokenLogprobs]:
        """Per row."""
        columns = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        rows = zip(self.top, *(column.tolist() for column in columns), strict=True)
        return [TokenLogprobs(own, rank, ids[:n], values[:n]) for n, own, rank, ids, values in rows]


def token_logprobs(
    logits: Tensor, tokens: Tensor, top: Sequence[int], comm: Communicator, vocab: range
) -> LogprobTensors:
    """The log-probability, rank and top-n of one token per row. Collective; does not wait for the device.

    Args:
        logits: float32 [rows, vocabulary rows of this rank].
        tokens: int64 [rows], vocabulary indices.
        top: n of each row.
    """
    rows, shard = logits.shape
    local = tokens - vocab.start
    mine = (local >= 0) & (local < shard)
    # One all-reduce for what is a sum over ranks: the chosen token's logit, which one rank has.
    chosen = logits.new_zeros(rows)
    if shard:
        chosen = torch.where(mine, logits.gather(1, local.clamp(0, shard - 1)[:, None])[:, 0], 0.0)
    chosen = comm.all_reduce(chosen)
    better = comm.all_reduce((logits > chosen[:, None]).sum(dim=1))
    most = max(top)
    best = logits.new_full((rows, 2 * most + 1), float("-inf"), dtype=torch.float64)
    if shard:
        take = min(most, shard)
        values, indices = logits.topk(take, dim=-1)
        best[:, :take] = values.double()
        best[:, most : most + take] = (indices + vocab.start).double()
        best[:, -1] = logits.logsumexp(dim=-1).double()
    gathered = comm.all_gather(best)
    total = gathered[..., -1].logsumexp(dim=0)
    values = gathered[..., :most].transpose(0, 1).reshape(rows, -1)
    indices = gathered[..., most:-1].transpose(0, 1).reshape(rows, -1)
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :most]
    return LogprobTensors(
        logprobs=chosen.double() - total,
        ranks=better + 1,
        top_ids=indices.gather(1, order).long(),
        top_logprobs=values.gather(1, order) - total[:, None],
        top=top,
    )
