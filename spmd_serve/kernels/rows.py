"""What a step reads from and writes to tables, in one kernel each.

The tensors of the table of running sequences are indexed by slot. The padding slot stands for rows that a captured step
carries along unused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def decode_inputs(
    slots: Tensor, last_token: Tensor, length: Tensor, rope_offset: Tensor, padding_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather a decode step's inputs.

    Args:
        slots: int64 [n].
        last_token, length, rope_offset: int64 [rows].

    Returns:
        tokens int64 [n]; positions int64 [n], rows of the rotary tables: length + rope_offset; lengths int64 [n], the new token
        included, 0 for padding.
    """
    if slots.is_cuda:
        from spmd_serve.kernels.gpu import rows as gpu

        return gpu.decode_inputs(slots, last_token, length, rope_offset, padding_slot)
    before = length[slots]
    return last_token[slots], before + rope_offset[slots], torch.where(slots == padding_slot, 0, before + 1)


def lookup(table: Tensor, index: Tensor, first: int, *, whole: bool) -> Tensor:
    """Rows of a table of which this is a part; zeros for those that another part holds.

    Args:
        table: [rows, width], contiguous; its first row is number `first`.
        index: int64 [n].
        whole: nothing is outside but NOT_A_TOKEN, for which any row will do.

    Returns:
        [n, width].
    """
    if table.is_cuda:
        from spmd_serve.kernels.gpu import rows as gpu

        return gpu.lookup(table, index, first)
    if whole:
        return F.embedding(index.clamp(max=table.shape[0] - 1), table)
    local = index - first
    mine = (local >= 0) & (local < table.shape[0])
    if table.shape[0] == 0:
        return table.new_zeros(index.shape[0], table.shape[1])
    return F.embedding(local.clamp(0, table.shape[0] - 1), table) * mine[:, None]


def advance_rows_(
    slots: Tensor, tokens: Tensor, lengths: Tensor, last_token: Tensor, length: Tensor, drawn: Tensor
) -> None:
    """last_token[slots] = tokens; length[slots] = lengths; drawn[lengths % len(drawn), slots] = tokens. All int64.

    drawn: [depth, rows]; on a GPU in pinned memory of the host, which needs no copy then.
    """
    if slots.is_cuda:
        from spmd_serve.kernels.gpu import rows as gpu

        gpu.advance_rows_(slots, tokens, lengths, last_token, length, drawn)
        return
    last_token.index_copy_(0, slots, tokens)
    length.index_copy_(0, slots, lengths)
    drawn[lengths % len(drawn), slots] = tokens
