"""FP8 (e4m3) weights with float32 scales: quantising, and the linear layer over them.

A scale belongs to a row (output channel) of the weight, or to `block` consecutive columns of a row. Checkpoints with
128 x 128 blocks or one scale a tensor are cases of that with equal scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_serve.kernels.activation import gated_activation
from spmd_serve.kernels.linear import Norm, linear_torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_TOPS = (448, 416, 384, 352, 320, 288, 256, 240)  # an octave of FP8's values


@dataclass(frozen=True)
class Fp8Format:
    """block: columns of a row that share a scale; None: the whole row (output channel)."""

    block: int | None = None


@dataclass(frozen=True)
class Fp8Weight:
    """weight[i, j] = values[i, j] * scales[i, j // block].

    Attributes:
        values: float8_e4m3fn [out, in], contiguous.
        scales: float32 [out, blocks].
        block: columns that share a scale; None: all of a row, blocks = 1.
    """

    values: Tensor
    scales: Tensor
    block: int | None = None

    @classmethod
    def empty(cls, out_features: int, in_features: int, kind: Fp8Format, device: torch.device) -> Fp8Weight:
        """To be filled: the values are whatever was in the memory, the scales zero."""
        block = kind.block
        blocks = 1 if block is None else -(-in_features // block)
        values = torch.empty(out_features, in_features, dtype=FP8, device=device)
        return cls(values, torch.zeros(out_features, blocks, device=device), block)

    def __getitem__(self, rows: slice) -> Fp8Weight:
        """A view of some rows."""
        return Fp8Weight(self.values[rows], self.scales[rows], self.block)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales; 0 without values, so that the loader passes over it."""
        return self.values.nbytes and self.values.nbytes + self.scales.nbytes

    def quantize_(self, weight: Tensor) -> None:
        """Fill with the nearest values, at the scales of least squared error. weight: [out, in], any float type and device.

        How near a row's values lie to FP8's depends on the scale, alike in each octave. Of the scales that turn the
        largest value into one of FP8's, the best halves what FP8 costs in perplexity (bundled model, against the
        smallest one), and a row that was FP8 stays as it was.
        """
        weight = weight.to(device=self.values.device, dtype=torch.float32)
        out_features, in_features = weight.shape
        blocks, block = self.scales.shape[1], self.block or max(in_features, 1)
        padded = torch.nn.functional.pad(weight, (0, blocks * block - in_features)).view(out_features, blocks, block)
        largest = padded.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12)
        scales, least = largest, torch.full_like(largest, math.inf)
        for top in _TOPS:
            tried = largest / top
            error = ((padded / tried).to(FP8).float().mul_(tried) - padded).square_().sum(dim=-1, keepdim=True)
            scales, least = torch.where(error < least, tried, scales), torch.minimum(error, least)
        scaled = (padded / scales).view(out_features, -1)[:, :in_features]
        self.values.copy_(scaled.clamp_(-FP8_MAX, FP8_MAX))
        self.scales.copy_(scales[..., 0])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in]; the product is rounded once, from float32."""
        scales = self.scales
        if self.block is not None:
            scales = scales.repeat_interleave(self.block, dim=1)[:, : self.values.shape[1]]
        return (self.values.float() * scales).to(dtype)


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
) -> Tensor:
    """`kernels.linear.linear` over an FP8 weight. x, bias and residual are in the compute type.

    gate: a gated activation of x, which is [tokens, 2 * in] then; not together with norm. See `takes_gate`.
    """
    assert gate is None or norm is None
    if x.is_cuda:
        from spmd_serve.kernels.gpu import fp8 as gpu

        scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
        return gpu.fp8_linear(x, weight, bias, scale, eps, activation, residual, gate)
    if gate is not None:
        x = gated_activation(x, gate)
    return fp8_linear_torch(x, weight, bias, norm, activation, residual)


def takes_gate(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether a layer over `weight`, with as many tokens as x, applies the activation before it at no cost."""
    if not x.is_cuda:
        return False
    from spmd_serve.kernels.gpu import fp8 as gpu

    return gpu.takes_gate(x, weight)


def fp8_linear_torch(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """`fp8_linear` over the dequantised weight: the path of a CPU, and the reference."""
    return linear_torch(x, weight.dequantize(x.dtype), bias, norm, activation, residual)
