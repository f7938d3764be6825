"""Gated activations: act(gate) * up."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """gate_up: [tokens, 2 * n], gate first -> [tokens, n]. kind: silu or gelu_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
