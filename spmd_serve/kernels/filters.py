"""top-k, top-p and min-p as one threshold a row: the lowest logit that may still be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filters:
    """What rows ask for: tables, by slot.

    Attributes:
        temperature: float32; 0 is greedy, which nothing is filtered for.
        top_k: int32; 0 is off.
        top_p: float32; 1 is off.
        min_p: float32; 0 is off.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def lowest_kept(parts: Tensor, filters: Filters, slots: Tensor) -> Tensor:
    """Each row's lowest logit that top-k, top-p and min-p all keep; -inf where nothing is filtered.

    Probabilities are those after temperature. top-p follows top-k: a token is kept if all better ones together have less
    than top_p of what the k best have. Ties with the last one kept are kept.

    Args:
        parts: [n, rows, width], any float dtype: the vocabulary in n parts, -inf where there is none.
        slots: int64 [rows], the rows' places in the tables.

    Returns:
        float32 [rows].
    """
    if parts.is_cuda:
        from spmd_serve.kernels.gpu import filters as gpu

        return gpu.lowest_kept(parts, filters, slots)
    return lowest_kept_torch(parts, filters, slots)


def lowest_kept_torch(parts: Tensor, filters: Filters, slots: Tensor) -> Tensor:
    """`lowest_kept` by sorting: the reference."""
    ordered = parts.transpose(0, 1).flatten(1).double().sort(dim=1, descending=True).values
    lowest = torch.full(ordered.shape[:1], float("-inf"), dtype=torch.float32, device=parts.device)
    for row, slot in enumerate(slots.tolist()):
        temperature, top_p, min_p = (
            float(table[slot]) for table in (filters.temperature, filters.top_p, filters.min_p)
        )
        top_k = int(filters.top_k[slot]) or ordered.shape[1]
        if temperature == 0 or (top_k >= ordered.shape[1] and top_p >= 1 and min_p <= 0):
            continue
        kept = ordered[row, :top_k]
        mass = ((kept - kept[0]) / temperature).exp()
        if top_p < 1:
            kept = kept[mass.cumsum(0) - mass < top_p * mass.sum()]
        floor = kept[0] + temperature * torch.tensor(min_p, dtype=torch.float64).log()
        lowest[row] = torch.maximum(kept[-1], floor)
    return lowest
