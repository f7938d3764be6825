"""RMSNorm, alone and fused with the residual add that comes before it."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_serve.kernels.norm import add_rms_norm_, rms_norm


class RMSNorm:
    """x / rms(x) * (offset + weight). `weight` is loaded as in the checkpoint; Gemma's offset is 1."""

    def __init__(self, size: int, *, eps: float, offset: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.zeros(size, dtype=dtype, device=device)
        self.eps = eps
        self.offset = offset
        self._scale: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """offset + weight, made once after loading."""
        if self._scale is None:
            self._scale = self.weight if self.offset == 0.0 else self.weight + self.offset
        return self._scale

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> same shape and dtype; the mean square is taken in float32."""
        return rms_norm(x, self.scale, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), the sum in place of `residual`; both [tokens, size]."""
        return add_rms_norm_(x, residual, self.scale, self.eps)
