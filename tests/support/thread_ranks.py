"""Ranks as threads of one process: what a collective does, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator

T = TypeVar("T")
_WAIT_S = 20.0  # a rank that makes fewer collectives than the others ends the test


class _Meeting:
    """Where the ranks put their tensors down and look at those of the others."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=_WAIT_S)
        self.slots: list[Tensor] = [torch.empty(0)] * world_size

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        """[...] -> [world_size, ...]"""
        self.slots[rank] = tensor.clone()
        self.barrier.wait()
        together = torch.stack(self.slots)  # fails where shapes or types differ
        self.barrier.wait()
        return together


class ThreadCommunicator(Communicator):
    """A Communicator of one thread among `world_size` ones."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self._meeting = meeting
        self.collectives = 0

    def _exchange(self, tensor: Tensor) -> Tensor:
        self.collectives += 1
        return self._meeting.exchange(self.rank, tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor).sum(dim=0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor)

    def all_reduce_min_(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._exchange(tensor).amin(dim=0))


def on_ranks(world_size: int, work: Callable[[Communicator], T]) -> list[T]:
    """`work(communicator)` on every rank at once; the results in rank order. Every rank must make as many collectives."""
    meeting = _Meeting(world_size)
    communicators = [ThreadCommunicator(rank, world_size, meeting) for rank in range(world_size)]

    def run(comm: ThreadCommunicator) -> T:
        try:
            return work(comm)
        except BaseException:
            meeting.barrier.abort()  # nobody waits for a rank that has failed
            raise

    with ThreadPoolExecutor(world_size) as threads:
        futures = [threads.submit(run, comm) for comm in communicators]
    failures = [e for f in futures if (e := f.exception()) is not None]
    for failure in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise failure
    assert len({comm.collectives for comm in communicators}) == 1, "ranks made different numbers of collectives"
    return [future.result() for future in futures]
