"""Linear layers over a rank's shard of the weights.

A column-parallel layer owns some output rows of the weight; a row-parallel layer owns some input columns and returns
partial sums that the caller all-reduces. Fused layers (QKV, gate+up) are one matrix; `pieces` tells the loader which
slice of which checkpoint tensor goes where.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """y = x @ weight.T (+ bias). weight: [out, in] of this rank's shard."""

    def __init__(
        self, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        self.weight = torch.zeros(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in] -> [tokens, out]."""
        return F.linear(x, self.weight, self.bias)
