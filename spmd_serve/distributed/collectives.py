"""Collectives on tensors (the data plane). Control messages go through channel.py, never through here.

Every rank calls the same method the same number of times in the same order. With one rank nothing is sent. The reduced
values are the same bits on every rank, so decisions that follow from them are too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """The tensor-parallel group. `world_size` 1 needs no process group at all."""

    def __init__(self, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        assert world_size == 1 or group is not None
        self.rank = rank
        self.world_size = world_size
        self._group = group

    @classmethod
    def create(cls, rank: int, world_size: int, device: torch.device) -> Communicator:
        """Join a new group over all ranks: NCCL for CUDA tensors, gloo for CPU tensors. Collective."""
        if world_size == 1:
            return cls()
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        return cls(rank, world_size, dist.new_group(backend=backend, device_id=device_id))

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; returns `tensor`. Collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] on every rank -> [world_size, ...], rank order. Shapes must be equal. Collective."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        out = tensor.new_empty(self.world_size * tensor.numel())
        _all_gather(out, tensor.contiguous().view(-1), group=self._group)
        return out.view(self.world_size, *tensor.shape)

    def all_reduce_min_(self, tensor: Tensor) -> Tensor:
        """Minimum over ranks, in place; returns `tensor`. Collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return tensor
