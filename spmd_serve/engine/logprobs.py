"""Log-probabilities from vocabulary-sharded logits, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.types import TokenLogprobs


def token_logprobs(
    logits: Tensor, tokens: Tensor, top: Sequence[int], comm: Communicator, vocab: range
) -> list[TokenLogprobs]:
    """The log-probability, rank and top-n of one token per row. Collective.

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
    chosen = comm.all_reduce_(chosen)
    better = comm.all_reduce_((logits > chosen[:, None]).sum(dim=1))
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
    top_values = (values.gather(1, order) - total[:, None]).tolist()
    top_indices = indices.gather(1, order).tolist()
    own = (chosen.double() - total).tolist()
    ranks = (better + 1).tolist()
    return [
        TokenLogprobs(
            logprob=own[i],
            rank=ranks[i],
            top_ids=[int(t) for t in top_indices[i][:n]],
            top_logprobs=top_values[i][:n],
        )
        for i, n in enumerate(top)
    ]
