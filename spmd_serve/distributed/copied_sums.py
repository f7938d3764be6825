"""Sums over the GPUs of one host that travel while other kernels run: copy engines bring each rank's part to the others.

A kernel that moves the bytes takes multiprocessors from the products beside it; a copy engine takes none. So a prefill's tokens
are halved, and one half's sum is on its way while the other half's products run. What is left is the addition itself.

Every sum has a number, which is copied behind its parts; who adds waits for that. Two sums may be on their way at a time, so
that a place is written again after three other sums: a rank starts sum k only once it has added sum k - 2, for which every rank
had sent its part, and that a rank does once it has added sum k - 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from spmd_serve.kernels.gpu.peers import Peers

MAX_RANKS = 4  # every rank gets all others' parts: with more, that is more than the products beside it can hide
MIN_BYTES = 32 * 2**20  # of all tokens: below, launching almost twice as many kernels costs more
_PLACES = 4
_NUMBERS = 2**16  # then they begin again


def pays(ranks: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether halving tokens of [tokens, size] gains anything."""
    return 1 < ranks <= MAX_RANKS and math.prod(shape) * dtype.itemsize >= MIN_BYTES


@dataclass(frozen=True)
class TravellingSum:
    """This rank's part, which stays as it is until `CopiedSums.add_`."""

    number: int
    part: Tensor


class CopiedSums:
    """All calls are collective, in the same order on all ranks: `start`s and `add_`s of the same sums, two on their way at most.

    Args:
        largest: the shape of all tokens, [tokens, size], of the largest step. 2 * ranks times its bytes are taken of every GPU.

    Raises:
        RuntimeError: these GPUs cannot map each other's memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, peers: Peers, largest: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._rank, ranks = group.rank(), group.size()
        self._peers = peers
        self._half = -(-_half_of(largest) // 8) * 8
        parts = symm_mem.empty((_PLACES, ranks, self._half), dtype=dtype, device=device)
        arrived = symm_mem.empty((_PLACES, ranks), dtype=torch.int32, device=device)
        handles = [symm_mem.rendezvous(tensor, group.group_name) for tensor in (parts, arrived)]
        arrived.fill_(-1)
        self._memory = parts, arrived  # what follows are views, which keep nothing alive
        self._parts = [handles[0].get_buffer(rank, parts.shape, dtype) for rank in range(ranks)]
        self._arrived = [handles[1].get_buffer(rank, arrived.shape, torch.int32) for rank in range(ranks)]
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=device)  # where the copies find them
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._started = 0
        torch.cuda.synchronize()
        dist.barrier(group)  # collective: nobody writes before all are set up

    def fits(self, tensor: Tensor) -> bool:
        """Whether such a tensor, [tokens, size], is best halved."""
        fits = len(tensor) > 1 and tensor.shape[1] % 8 == 0 and _half_of(tensor.shape) <= self._half
        return fits and pays(len(self._parts), tensor.shape, tensor.dtype)

    def start(self, part: Tensor) -> TravellingSum:
        """Send this rank's part to all others. Collective."""
        number = self._started % _NUMBERS
        place = self._started % _PLACES
        self._started += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for i in range(1, len(self._parts)):
                to = (self._rank + i) % len(self._parts)  # not all ranks to the same one first
                self._parts[to][place, self._rank, : part.numel()].copy_(part.view(-1), non_blocking=True)
                self._arrived[to][place, self._rank].copy_(self._numbers[number], non_blocking=True)
        part.record_stream(self._stream)
        return TravellingSum(number, part)

    def add_(self, travelling: TravellingSum, residual: Tensor) -> Tensor:
        """residual += the sum over ranks, in rank order, rounded once. Collective."""
        place = travelling.number % _PLACES
        received, arrived = self._parts[self._rank][place], self._arrived[self._rank][place]
        return self._peers.add_copied(travelling.part, received, arrived, travelling.number, residual)


def _half_of(shape: Sequence[int]) -> int:
    """Numbers of the larger half of [tokens, size]."""
    tokens, size = shape
    return (tokens + 1) // 2 * size
