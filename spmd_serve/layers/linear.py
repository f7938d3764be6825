"""Linear layers over a rank's shard of the weights.

A column-parallel layer owns some output rows of the weight; a row-parallel layer owns some input columns and returns
partial sums that the caller all-reduces. Fused layers (QKV, gate+up) are one matrix; models/blocks.py tells the loader which
slice of which checkpoint tensor goes where.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_serve.kernels.fp8 import Fp8Format, Fp8Weight, fp8_linear, takes_gate
from spmd_serve.kernels.linear import Norm, linear, takes_following
from spmd_serve.kernels.packed import CpuWeight, pack
from spmd_serve.kernels.scripted import ScriptWeight, script_weight
from spmd_serve.layers.norm import RMSNorm


class Linear:
    """y = x @ weight.T (+ bias). weight: [out, in] of this rank's shard, in the compute type or in FP8."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        fp8: Fp8Format | None = None,
    ) -> None:
        self._dtype = dtype
        self.weight: Tensor | Fp8Weight
        self._packed: CpuWeight | None = None
        self.script_weight: ScriptWeight | None = None  # made by `pack`, where kernels/scripted.py can take it
        if fp8 is None:
            self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        else:
            self.weight = Fp8Weight.empty(out_features, in_features, fp8, device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def pack(self) -> None:
        """Bring the loaded weight into the form that is fastest here; `weight` is gone then."""
        weight = self.weight
        if isinstance(weight, Fp8Weight):
            if weight.values.device.type != "cpu":
                return  # the GPU's kernels read it as it is
            weight = weight.dequantize(self._dtype)  # CPUs have no arithmetic for it
        self._packed = pack(weight)
        self.script_weight = script_weight(self._packed, self.bias)
        self.weight = weight.new_empty(0)

    def __call__(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        gate: str | None = None,
        following: RMSNorm | None = None,
    ) -> Tensor:
        """residual + activation(norm(x) @ weight.T + bias); x: [tokens, in] -> [tokens, out].

        activation (silu or gelu_tanh) is the gated one and halves the output. `residual` is updated in place and
        returned. One kernel where that pays, several elsewhere. gate: the gated activation of x ([tokens, 2 * in]) that
        comes first, where `takes_gate` says so. following: the norm of the updated residual is returned in its place, where
        `takes_following` says so.
        """
        before = None if norm is None else Norm(norm.scale, norm.eps)
        if isinstance(self.weight, Fp8Weight):
            assert following is None
            return fp8_linear(
                x, self.weight, bias=self.bias, norm=before, activation=activation, residual=residual, gate=gate
            )
        assert gate is None
        weight = self.weight if self._packed is None else self._packed
        after = None if following is None else Norm(following.scale, following.eps)
        return linear(x, weight, bias=self.bias, norm=before, activation=activation, residual=residual, following=after)

    def takes_following(self, x: Tensor) -> bool:
        """Whether, for as many tokens as x has, the norm after this layer costs no kernel of its own."""
        weight = self.weight if self._packed is None else self._packed
        return not isinstance(weight, Fp8Weight) and takes_following(x, weight)

    def takes_gate(self, x: Tensor) -> bool:
        """Whether, for as many tokens as x has, the activation before this layer is better left to it."""
        return isinstance(self.weight, Fp8Weight) and takes_gate(x, self.weight)
