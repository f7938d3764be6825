"""RMSNorm, alone and fused with the residual add before it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) * scale over the last dimension, in float32 inside.

    Args:
        x: [..., size], float32, float16 or bfloat16.
        scale: [size]; for Gemma, 1 + weight.

    Returns:
        x's shape and dtype.
    """
    if x.is_cuda:
        from spmd_serve.kernels.gpu import norm as gpu

        return gpu.rms_norm(x, scale, eps)
    return rms_norm_torch(x, scale, eps)


def add_rms_norm_(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x); the sum is rounded to residual's dtype and stored in `residual`.

    Args:
        x, residual: [tokens, size]; rows may be strided.
        scale: [size].
    """
    if x.is_cuda:
        from spmd_serve.kernels.gpu import norm as gpu

        return gpu.add_rms_norm_(x, residual, scale, eps)
    return add_rms_norm_torch_(x, residual, scale, eps)


def rms_norm_torch(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch. In 16 bits, scaling after the rounding, as transformers does."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], scale, eps)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * scale


def add_rms_norm_torch_(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_` in plain torch."""
    residual += x
    return rms_norm_torch(residual, scale, eps), residual
