"""All-reduce over symmetric memory: the GPUs of one host read each other's buffers over NVLink.

For small tensors this takes half of NCCL's time and less, since nothing or one barrier stands between the ranks. The sum
is taken in rank order on every rank, so all hold the same bits. Which way is best for which size is measured once at the
start, on these GPUs, inside a CUDA graph as in the decode steps, and agreed over the ranks.

    cells, lines  each rank writes its part to all others and sums what it gets (kernels/gpu/peers.cu); can add to a residual
    one_shot      after a barrier each rank reads all parts
    two_shot      each rank sums its share, and the others read that
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from spmd_serve.kernels.gpu.peers import Peers

logger = logging.getLogger(__name__)

BUFFER_BYTES = 8 * 2**20  # of the ways that sum in a buffer
SIZES = tuple(2**power for power in range(11, 27))  # bytes that are measured: 2 KiB .. 64 MiB
_PUSHES = ("cells", "lines")
_REPEATS = 20  # all-reduces in one measured graph


@dataclass(frozen=True)
class Choice:
    """Microseconds of each way for tensors of up to `size` bytes, the slowest rank's; inf: not possible."""

    size: int
    times: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.times, key=self.times.__getitem__)


class SymmetricAllReduce:
    """Ways to sum a tensor over the ranks of one host, chosen by size. Collective like any all-reduce.

    Args:
        group: an NCCL group of all ranks.
        dtype: of the tensors to come; others go through NCCL.

    Raises:
        RuntimeError: these GPUs cannot map each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._group = group
        self._name = group.group_name
        self._dtype = dtype
        self._world_size = group.size()
        self._buffer: Tensor = symm_mem.empty(BUFFER_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symm_mem.rendezvous(self._buffer, self._name)
        self._ops: Any = torch.ops.symm_mem
        self._peers = _make_peers(group, device)
        self._ways: dict[str, Callable[[Tensor], Tensor]] = {
            "nccl": self._nccl,
            "one_shot": self._one_shot,
            "two_shot": self._two_shot,
            "cells": partial(self._push, form="cells"),
            "lines": partial(self._push, form="lines"),
        }
        self.choices: list[Choice] = [self._measure(size, device) for size in SIZES]
        logger.info("all-reduce by size: %s", self.describe())

    def __call__(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; may or may not be `tensor` itself."""
        return self._ways[self._way(tensor)](tensor)

    def takes_add(self, tensor: Tensor) -> bool:
        """Whether `add_` is the best way for such a tensor."""
        return self._way(tensor) in _PUSHES

    def add_(self, tensor: Tensor, residual: Tensor) -> Tensor | None:
        """residual += the sum over ranks, rounded once; None where another way is better."""
        way = self._way(tensor)
        if way not in _PUSHES:
            return None
        assert self._peers is not None
        return self._peers.all_reduce(tensor, way, residual)  # collective

    @property
    def peers(self) -> Peers | None:
        """The push kernels, where they are available: on all ranks or on none."""
        return self._peers

    def best_index(self, values: Tensor, indices: Tensor) -> Tensor | None:
        """See Communicator.best_index; None where the kernel is not available."""
        if self._peers is None or not self._peers.fits_rows(len(values)):
            return None
        return self._peers.best_index(values, indices)

    def _way(self, tensor: Tensor) -> str:
        """The way for a tensor, by its type, shape and layout, which are the same on all ranks."""
        if tensor.dtype == self._dtype and tensor.is_contiguous():
            best = next((c for c in self.choices if tensor.nbytes <= c.size), self.choices[-1]).best
            if self._fits(tensor, best):
                return best
        return "nccl"

    def describe(self) -> str:
        """The choices in one line, runs of equal ones together."""
        parts: list[str] = []
        for i, choice in enumerate(self.choices):
            if i + 1 == len(self.choices) or self.choices[i + 1].best != choice.best:
                parts.append(f"{choice.best} to {choice.size // 1024} KiB")
        return ", ".join(parts)

    def _fits(self, tensor: Tensor, way: str) -> bool:
        if way in _PUSHES:
            return self._peers is not None and self._peers.fits(tensor, way)
        # 16-byte accesses; two-shot gives each rank an equal part of them.
        unit = 16 * (self._world_size if way == "two_shot" else 1)
        return way == "nccl" or (tensor.nbytes <= BUFFER_BYTES and tensor.nbytes % unit == 0)

    def _push(self, tensor: Tensor, form: str) -> Tensor:
        assert self._peers is not None
        return self._peers.all_reduce(tensor, form)  # collective

    def _nccl(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._group)  # collective
        return tensor

    def _one_shot(self, tensor: Tensor) -> Tensor:
        part = self._buffer[: tensor.numel()]
        summed: Tensor = self._ops.one_shot_all_reduce_copy(part, tensor.view(-1), "sum", self._name)  # collective
        return summed.view(tensor.shape)

    def _two_shot(self, tensor: Tensor) -> Tensor:
        part = self._buffer[: tensor.numel()]
        part.copy_(tensor.view(-1))
        self._ops.two_shot_all_reduce_(part, "sum", self._name)  # collective
        # Copied out: the next all-reduce uses the buffer again.
        tensor.view(-1).copy_(part)
        return tensor

    def _measure(self, size: int, device: torch.device) -> Choice:
        """Time all ways for one size; the slowest rank's time counts. Collective."""
        tensor = torch.zeros(size // self._dtype.itemsize, dtype=self._dtype, device=device)
        times = torch.full((len(self._ways),), float("inf"), device=device)
        for i, (name, way) in enumerate(self._ways.items()):
            if self._fits(tensor, name):
                times[i] = _graph_time(way, tensor)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self._group)  # collective: all ranks choose alike
        return Choice(size, dict(zip(self._ways, times.tolist(), strict=True)))


def _make_peers(group: dist.ProcessGroup, device: torch.device) -> Peers | None:
    """The push kernels over memory of their own; None, on all ranks, if one of them has no such kernels. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    from spmd_serve.kernels.gpu.peers import MAX_RANKS, Peers, memory_bytes

    if group.size() > MAX_RANKS:
        return None
    memory = symm_mem.empty(memory_bytes(group.size()), dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(memory, group.group_name)
    memory.zero_()
    try:
        peers = Peers(memory, handle.buffer_ptrs, group.rank())
    except RuntimeError:  # logged
        peers = None
    available = torch.tensor(int(peers is not None), device=device)
    # Collective: all ranks' memory is zero before anybody writes, and all ranks choose alike.
    dist.all_reduce(available, op=dist.ReduceOp.MIN, group=group)
    return peers if int(available) else None


def _graph_time(way: Callable[[Tensor], Tensor], tensor: Tensor) -> float:
    """Microseconds of one call inside a CUDA graph, the least of five rounds. Collective."""
    way(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            way(tensor)
    rounds = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) * 1000 / _REPEATS)
    return float(min(rounds))
