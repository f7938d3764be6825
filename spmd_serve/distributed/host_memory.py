"""Collectives of ranks of one host over memory that all of them map: for CPU tensors, 10 to 30 times as fast as gloo.

Each rank has two slots and a turn counter. In turn t it copies its tensor into its slot t % 2, sets its counter to t, and
waits until every counter has reached t; then all slots hold the turn's tensors. Two slots are enough: a rank that
comes to turn t + 2 has seen everybody's counter at t + 1, so nobody still reads the slots of turn t. Every rank adds
the slots in rank order, so all hold the same bits.

The order of the stores (tensor, then counter) is what x86 guarantees; elsewhere gloo is used.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_serve.distributed.process import is_dead
from spmd_serve.errors import ControlTimeoutError, RankLostError

logger = logging.getLogger(__name__)

SLOT_BYTES = 2 * 2**20  # larger tensors go in parts
_LINE = 64  # bytes of a cache line; one counter in each
_POLLS = 50  # looks at a counter before the interpreter lock is offered to other threads
_YIELDS = 300  # then looks before sleeping: some 0.5 ms, more than ranks of equal work are apart
_SLEEP_S = 50e-6
_CHECK_S = 0.1  # how often a long wait looks whether its peer lives
_VIEWS = 1024  # tensor sizes whose views are kept

Views = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # of both slots, one per rank


def memory_size(world_size: int) -> int:
    """Bytes that `HostMemory` needs."""
    return world_size * (_LINE + 2 * SLOT_BYTES)


class HostMemory:
    """One rank's access to the memory. All ranks call the same methods with tensors of the same shape and type.

    Args:
        memory: `memory_size` bytes, zero at first, mapped by all ranks.
        pids: of the ranks' processes, so that a wait for a dead one ends; empty: not looked at.
        timeout_s: how long one wait may take.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, world_size: int, *, pids: Sequence[int] = (), timeout_s: float
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._pids = pids
        self._timeout_s = timeout_s
        self._turn = 0
        self._counters = memoryview(memory)[: world_size * _LINE].cast("Q")
        self._own = rank * _LINE // 8
        self._others = [(peer, peer * _LINE // 8) for peer in range(world_size) if peer != rank]
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=world_size * _LINE)
        self._slots = self._slots.view(2, world_size, SLOT_BYTES)
        self._views: dict[tuple[torch.dtype, int], Views] = {}

    @classmethod
    def create(cls, group: dist.ProcessGroup, timeout_s: float) -> HostMemory | None:
        """Map memory together with the other ranks of `group`, all of this host; None where that is not possible. Collective.

        The memory has no name (memfd), so nothing is left behind however the ranks end.
        """
        rank, world_size = group.rank(), group.size()
        file, memory, problem = -1, None, ""
        try:
            file = _open(memory_size(world_size)) if rank == 0 else -1
        except OSError as exc:
            problem = f"rank {rank}: {exc}"
        places: list[tuple[int, int]] = [(0, 0)] * world_size
        dist.all_gather_object(places, (os.getpid(), file), group=group)  # collective
        try:
            memory = _map(*places[0], memory_size(world_size))
        except OSError as exc:
            problem = problem or f"rank {rank}: {exc}"
        problems = [""] * world_size
        # Collective. A rank that cannot map it tells the others, and all go without.
        dist.all_gather_object(problems, problem, group=group)
        if file >= 0:
            os.close(file)
        if any(problems) or memory is None:
            if rank == 0:
                logger.warning("gloo sums all tensors: no shared memory (%s)", next(filter(None, problems)))
            return None
        return cls(memory, rank, world_size, pids=[pid for pid, _ in places], timeout_s=timeout_s)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in rank order, in place; contiguous. Collective."""
        flat = tensor.view(-1)
        size = SLOT_BYTES // flat.itemsize
        for part in (flat,) if flat.numel() <= size else torch.split(flat, size):
            first, second, *rest = self._exchange(part)
            torch.add(first, second, out=part)
            for other in rest:
                part += other
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] on every rank -> [world_size, ...], rank order. Collective."""
        flat = tensor.reshape(-1)
        size = SLOT_BYTES // flat.itemsize
        parts = [torch.stack(self._exchange(part)) for part in torch.split(flat, size)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return whole.view(self._world_size, *tensor.shape)

    def _exchange(self, part: Tensor) -> tuple[Tensor, ...]:
        """Every rank's part, flat; to be read before the next exchange. At most SLOT_BYTES."""
        key = (part.dtype, part.numel())
        views = self._views.get(key) or self._make_views(*key)
        self._turn += 1
        slots = views[self._turn & 1]
        slots[self._rank].copy_(part)
        self._counters[self._own] = self._turn
        for peer, place in self._others:
            if self._counters[place] < self._turn:
                self._wait(peer, place)
        return slots

    def _make_views(self, dtype: torch.dtype, numel: int) -> Views:
        if len(self._views) >= _VIEWS:
            self._views.clear()
        of_all = self._slots[:, :, : numel * dtype.itemsize].view(dtype)
        views = self._views[dtype, numel] = (of_all[0].unbind(), of_all[1].unbind())
        return views

    def _wait(self, peer: int, place: int) -> None:
        counters, turn = self._counters, self._turn
        for _ in range(_POLLS):
            if counters[place] >= turn:
                return
        for _ in range(_YIELDS):
            time.sleep(0)  # lets this process's other threads run
            os.sched_yield()  # and, where cores are fewer than ranks, the peer
            if counters[place] >= turn:
                return
        began = checked = time.monotonic()
        while counters[place] < turn:
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                if self._pids and is_dead(self._pids[peer]) and counters[place] < turn:
                    raise RankLostError(f"rank {peer} is gone: its process {self._pids[peer]} has ended")
                if now - began > self._timeout_s:
                    raise ControlTimeoutError(f"rank {peer} did not come to a collective within {self._timeout_s:g} s")


def _open(size: int) -> int:
    """A new file of `size` bytes in memory. Raises OSError where there is none, or a limit is in the way (`ulimit -f`, seccomp)."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError("this is for Linux on x86-64")
    file = os.memfd_create("spmd_serve")
    try:
        os.ftruncate(file, size)
    except OSError:
        os.close(file)
        raise
    return file


def _map(pid: int, file: int, size: int) -> mmap.mmap:
    """Map the open file `file` of process `pid`."""
    if file < 0:
        raise OSError("rank 0 has none")
    if pid == os.getpid():
        return mmap.mmap(file, size)
    own = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    try:
        return mmap.mmap(own, size)
    finally:
        os.close(own)
