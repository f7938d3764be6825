"""Linear layers with what comes before and after them, for few tokens, where the weights' bytes are the cost.

A product with M tokens reads each weight once: below some tens of tokens its time is that of the bytes, and a general
matrix library leaves much of the bandwidth unused on small matrices. The GPU kernels here keep enough loads in flight
and take in the RMSNorm before, and the gated activation, bias or residual add after, so that fewer kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_serve.kernels.activation import gated_activation
from spmd_serve.kernels.norm import rms_norm
from spmd_serve.kernels.packed import CpuWeight, HalfWeight, packed_linear


@dataclass(frozen=True)
class Norm:
    """RMSNorm of the input: x / rms(x) * scale. scale: [in]."""

    scale: Tensor
    eps: float


def linear(
    x: Tensor,
    weight: CpuWeight,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    following: Norm | None = None,
) -> Tensor:
    """residual + activation(norm(x) @ weight.T + bias), where each of the four may be left out.

    Args:
        x: [tokens, in], rows may be strided. dtypes of all tensors are equal, but for packed weights and a bias on a CPU.
        weight: [out, in], contiguous, or what kernels/packed.py makes of it on a CPU.
        bias: [out].
        activation: silu or gelu_tanh: the gated one, act(gate) * up; the first half of weight's rows is the gate.
        residual: [tokens, out], contiguous; updated in place and returned. Not together with activation.
        following: the norm of the updated residual is returned in its place.

    Returns:
        [tokens, out], or [tokens, out / 2] with an activation.
    """
    assert residual is None or activation is None
    assert following is None or residual is not None
    if x.is_cuda and x.dtype == torch.bfloat16:
        from spmd_serve.kernels.gpu import linear as gpu

        scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
        assert isinstance(weight, Tensor)
        fused = gpu.skinny_linear(x, weight, bias, scale, eps, activation, residual, following)
        if fused is not None:
            return fused
    out = linear_torch(x, weight, bias, norm, activation, residual)
    return out if following is None else rms_norm(out, following.scale, following.eps)


def takes_following(x: Tensor, weight: CpuWeight) -> bool:
    """Whether the norm after a layer with a residual add costs no kernel of its own, for as many tokens as x has."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    from spmd_serve.kernels.gpu import linear as gpu

    assert isinstance(weight, Tensor)
    return gpu.wide_config(len(x), *weight.shape, gated=False, added=True) is not None


def linear_torch(
    x: Tensor,
    weight: CpuWeight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """`linear` by the matrix library: the path for many tokens, and the reference."""
    if norm is not None:
        x = rms_norm(x, norm.scale, norm.eps)
    if bias is not None:
        bias = bias.to(x.dtype)
    if isinstance(weight, HalfWeight) or weight.is_mkldnn:
        out = packed_linear(x, weight, bias)
    elif residual is not None and bias is None:
        return residual.addmm_(x, weight.t())
    else:
        out = F.linear(x, weight, bias)
    if activation is not None:
        return gated_activation(out, activation)
    return out if residual is None else residual.add_(out)
