"""Collectives on tensors (the data plane). Control messages go through channel.py, never through here.

Every rank calls the same method the same number of times in the same order. With one rank nothing is sent. The reduced
values are the same bits on every rank, so decisions that follow from them are too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_serve.distributed.copied_sums import CopiedSums, pays
from spmd_serve.distributed.host_memory import HostMemory
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.distributed.symmetric import Choice, SymmetricAllReduce

logger = logging.getLogger(__name__)

# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """The tensor-parallel group. `world_size` 1 needs no process group at all."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None, *, one_host: bool = True
    ) -> None:
        assert world_size == 1 or group is not None
        self.one_host = one_host
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._symmetric: SymmetricAllReduce | None = None
        self._copied: CopiedSums | None = None
        self._host_memory: HostMemory | None = None

    @classmethod
    def create(cls, ranks: RankInfo, device: torch.device, timeout_s: float = 60.0) -> Communicator:
        """Join a new group over all ranks. Collective.

        CUDA tensors go through NCCL; CPU tensors through memory that the ranks share, or gloo with several hosts.

        Args:
            timeout_s: how long a rank may wait for another one in the shared memory.
        """
        if ranks.world_size == 1:
            return cls()
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        group = dist.new_group(backend=backend, device_id=device_id)
        comm = cls(ranks.rank, ranks.world_size, group, one_host=ranks.one_host)
        if device.type == "cpu" and ranks.one_host:
            comm._host_memory = HostMemory.create(group, timeout_s)
        return comm

    def use_symmetric_memory(self, dtype: torch.dtype, device: torch.device, largest: tuple[int, int] = (0, 0)) -> None:
        """From now on sum tensors of `dtype` over the GPUs' mapped memory where that is faster. One host only. Collective.

        largest: [tokens, size] of the largest step, for `overlaps`.
        """
        assert self._group is not None
        try:
            symmetric = SymmetricAllReduce(self._group, dtype, device)
            if symmetric.peers is not None and pays(self.world_size, largest, dtype):
                self._copied = CopiedSums(self._group, symmetric.peers, largest, dtype, device)
        except RuntimeError as exc:
            # GPUs differ in what they can map, but all GPUs of a host are alike in it, so all ranks come here or none.
            logger.warning("NCCL sums all tensors: symmetric memory is not available (%s)", str(exc).splitlines()[0])
            return
        self._symmetric = symmetric

    @property
    def choices(self) -> list[Choice]:
        """Which way sums tensors of GPUs, by size; empty where NCCL sums all of them."""
        return [] if self._symmetric is None else self._symmetric.choices

    @property
    def shares_memory(self) -> bool:
        """Whether CPU tensors are summed in memory that the ranks share."""
        return self._host_memory is not None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks. `tensor` may be overwritten, and the result may or may not be `tensor`. Collective."""
        if self.world_size == 1:
            return tensor
        if self._symmetric is not None:
            return self._symmetric(tensor)
        if self._host_memory is not None:
            return self._host_memory.all_reduce_(tensor.contiguous())
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_reduce_add_(self, tensor: Tensor, residual: Tensor) -> Tensor:
        """residual += the sum over ranks of `tensor`, which may be overwritten; returns `residual`. Collective."""
        added = None if self._symmetric is None else self._symmetric.add_(tensor, residual)
        return residual.add_(self.all_reduce(tensor)) if added is None else added

    def adds_at_once(self, tensor: Tensor) -> bool:
        """Whether `all_reduce_add_` of such a tensor costs no more than its sum alone."""
        return self.world_size == 1 or (self._symmetric is not None and self._symmetric.takes_add(tensor))

    def overlaps(self, tensor: Tensor) -> bool:
        """Whether sums of such a tensor's halves are best taken beside the other half's products: `start_all_reduce_add_`."""
        return self._copied is not None and self._copied.fits(tensor) and self.adds_at_once(tensor)

    def start_all_reduce_add_(self, tensor: Tensor, residual: Tensor) -> Callable[[], object]:
        """`all_reduce_add_` whose sum travels while other kernels run; to be called for its end. Collective, both times.

        Two may be on their way at most, and `tensor` stays as it is until the end.
        """
        assert self._copied is not None, "`overlaps` says where"
        return partial(self._copied.add_, self._copied.start(tensor), residual)

    def best_index(self, values: Tensor, indices: Tensor) -> Tensor:
        """The index of the rank with the largest value, the lowest rank's of equals. Collective.

        values: float32 [rows]; indices: int64 [rows], below 2**32. Returns int64 [rows].
        """
        if self.world_size == 1:
            return indices
        best = None if self._symmetric is None else self._symmetric.best_index(values, indices)
        if best is not None:
            return best
        pairs = self.all_gather(torch.stack((values.double(), indices.double())))
        winner = pairs[:, 0].argmax(dim=0)  # the first of equals
        return pairs[:, 1].gather(0, winner[None])[0].long()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] on every rank -> [world_size, ...], rank order. Shapes must be equal. Collective."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        if self._host_memory is not None:
            return self._host_memory.all_gather(tensor)
        out = tensor.new_empty(self.world_size * tensor.numel())
        _all_gather(out, tensor.contiguous().view(-1), group=self._group)
        return out.view(self.world_size, *tensor.shape)

    def all_reduce_min_(self, tensor: Tensor) -> Tensor:
        """Minimum over ranks, in place; returns `tensor`. Collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return tensor
