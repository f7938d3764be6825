"""What a decode step reads from and writes to the table of running sequences, in one kernel each.

The table's tensors are indexed by slot. The padding slot stands for rows that a captured step carries along unused.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_inputs(
    slots: Tensor, last_token: Tensor, length: Tensor, padding_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather a decode step's inputs.

    Args:
        slots: int64 [n].
        last_token, length: int64 [rows].

    Returns:
        tokens int64 [n]; positions int64 [n]; lengths int64 [n], the new token included, 0 for padding.
    """
    if slots.is_cuda:
        from spmd_serve.kernels.gpu import rows as gpu

        return gpu.decode_inputs(slots, last_token, length, padding_slot)
    positions = length[slots]
    return last_token[slots], positions, torch.where(slots == padding_slot, 0, positions + 1)


def advance_rows_(slots: Tensor, tokens: Tensor, lengths: Tensor, last_token: Tensor, length: Tensor) -> None:
    """last_token[slots] = tokens; length[slots] = lengths. All int64."""
    if slots.is_cuda:
        from spmd_serve.kernels.gpu import rows as gpu

        gpu.advance_rows_(slots, tokens, lengths, last_token, length)
        return
    last_token.index_copy_(0, slots, tokens)
    length.index_copy_(0, slots, lengths)
