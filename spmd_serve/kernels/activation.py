"""Gated activation: act(gate) * up."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """act(gate) * up.

    Args:
        gate_up: [tokens, 2 * n], gate first; contiguous.
        kind: silu, or gelu_tanh (GELU's tanh approximation).

    Returns:
        [tokens, n] in gate_up's dtype.
    """
    if gate_up.is_cuda:
        from spmd_serve.kernels.gpu import activation as gpu

        return gpu.gated_activation(gate_up, kind)
    return gated_activation_torch(gate_up, kind)


def gated_activation_torch(gate_up: Tensor, kind: str) -> Tensor:
    """`gated_activation` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
