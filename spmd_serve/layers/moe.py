"""Mixture of experts: who goes to which expert, and the experts that live on this rank.

Experts are dealt to ranks whole. Every rank routes all tokens alike and computes what its own experts add; the partial
sums meet in the MLP's all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_serve.kernels.activation import gated_activation
from spmd_serve.kernels.linear import linear
from spmd_serve.kernels.packed import CpuWeight, pack

# Older releases of torch have it under a private name.
_grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token.

    Args:
        logits: the router's output, [tokens, experts].
        normalize: whether a token's weights sum to 1.

    Returns:
        weights, float32 [tokens, top_k], and expert numbers, int64 [tokens, top_k].
    """
    weights, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


class Experts:
    """Gated MLPs, `owned` of the model's experts.

    gate_up: [owned, 2 * width, hidden], gate first; down: [owned, hidden, width].
    """

    def __init__(
        self, owned: range, hidden: int, width: int, *, activation: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._owned = owned
        self._activation = activation
        self.gate_up = torch.empty(len(owned), 2 * width, hidden, dtype=dtype, device=device)
        self.down = torch.empty(len(owned), hidden, width, dtype=dtype, device=device)
        self._packed: list[tuple[CpuWeight, CpuWeight]] = []

    def pack(self) -> None:
        """On a CPU: bring the loaded weights into the form that is fastest; gate_up and down are gone then."""
        if self.gate_up.device.type == "cpu":
            self._packed = [(pack(up), pack(down)) for up, down in zip(self.gate_up, self.down, strict=True)]
            self.gate_up, self.down = self.gate_up.new_empty(0), self.down.new_empty(0)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x: [tokens, hidden]; weights and experts from `route` -> this rank's partial sum, [tokens, hidden]."""
        if not self._owned:
            return torch.zeros_like(x)
        return (self._grouped if x.is_cuda else self._one_by_one)(x, weights, experts)

    def _one_by_one(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Each expert that is asked for multiplies its tokens."""
        out = torch.zeros_like(x)
        for expert in torch.unique(experts).tolist():
            if expert not in self._owned:
                continue
            local = expert - self._owned.start
            rows, choices = (experts == expert).nonzero(as_tuple=True)
            gate_up, down = self._packed[local] if self._packed else (self.gate_up[local], self.down[local])
            hidden = linear(x[rows], gate_up, activation=self._activation)
            weight = weights[rows, choices, None].to(x.dtype)
            out.index_add_(0, rows, linear(hidden, down) * weight)
        return out

    def _grouped(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Two grouped products over tokens sorted by expert. Nothing is read back, so it can be captured in a graph."""
        top_k, count = experts.shape[1], len(self._owned)
        local = experts.reshape(-1) - self._owned.start
        group = torch.where((local >= 0) & (local < count), local, count)  # tokens of other ranks come last
        sorted_group, order = group.sort(stable=True)
        numbers = torch.arange(count, device=x.device)
        ends = torch.searchsorted(sorted_group, numbers, right=True).to(torch.int32)
        inputs = x[order // top_k]
        hidden = gated_activation(_grouped_mm(inputs, self.gate_up.transpose(1, 2), offs=ends), self._activation)
        outputs = _grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        # Rows behind the last group are whatever was in memory.
        outputs = torch.where(sorted_group[:, None] < count, outputs, 0)
        back = torch.empty_like(outputs)
        back[order] = outputs
        weighted = back.view(-1, top_k, x.shape[1]).float() * weights[..., None]
        return weighted.sum(dim=1).to(x.dtype)
