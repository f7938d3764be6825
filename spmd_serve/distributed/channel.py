"""The control channel: the only place with a control collective. Rank 0's StepInput reaches every rank.

Every rank calls `exchange` the same number of times, whatever is in it. A follower that waits here uses no CPU.
"""

from __future__ import annotations

import queue
from typing import Protocol

import torch.distributed as dist

from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import ControlTimeoutError, RankLostError
from spmd_serve.types import StepInput


class StepChannel(Protocol):
    """Hands rank 0's StepInput to all ranks."""

    def exchange(self, step_input: StepInput | None) -> StepInput:
        """Rank 0 passes the step's input, the others None; all of them get rank 0's. Collective.

        Raises:
            RankLostError: a rank has died.
            ControlTimeoutError: a rank did not come within the control timeout.
        """
        ...


class SoloChannel:
    """World size 1: no collective at all."""

    def exchange(self, step_input: StepInput | None) -> StepInput:
        assert step_input is not None
        return step_input


class GlooChannel:
    """`broadcast_object_list` from rank 0 over a gloo group, whose timeout is the control timeout."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank = rank
        self._group = group

    def exchange(self, step_input: StepInput | None) -> StepInput:
        assert (step_input is not None) == (self._rank == 0)
        box = [step_input]
        try:
            # Collective: all ranks, once per exchange. Pickle is safe here: it comes from rank 0 of this very job.
            dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as exc:
            raise peer_error(exc) from exc
        received = box[0]
        assert received is not None
        return received


def make_channel(ranks: RankInfo) -> StepChannel:
    """The channel over the default process group; none is needed for one rank."""
    return SoloChannel() if ranks.world_size == 1 else GlooChannel(ranks.rank)


class MemoryChannel:
    """The in-memory fake for tests: ranks are threads of one process, each with its own MemoryChannel.

    Pickles like the real one would not be needed, since StepInput is frozen.
    """

    def __init__(self, rank: int, queues: list[queue.Queue[StepInput]], timeout_s: float = 10.0) -> None:
        self._rank = rank
        self._queues = queues
        self._timeout_s = timeout_s

    @classmethod
    def connect(cls, world_size: int, timeout_s: float = 10.0) -> list[MemoryChannel]:
        """One channel for each rank."""
        queues: list[queue.Queue[StepInput]] = [queue.Queue() for _ in range(world_size - 1)]
        return [cls(rank, queues, timeout_s) for rank in range(world_size)]

    def exchange(self, step_input: StepInput | None) -> StepInput:
        assert (step_input is not None) == (self._rank == 0)
        if step_input is not None:
            for follower in self._queues:
                follower.put(step_input)
            return step_input
        try:
            return self._queues[self._rank - 1].get(timeout=self._timeout_s)
        except queue.Empty:
            raise ControlTimeoutError(f"rank {self._rank} waited {self._timeout_s:g} s for rank 0") from None


_TIMEOUT_SIGNS = ("timed out", "timeout")
_LOSS_SIGNS = ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "remote process")


def is_peer_error(exc: BaseException) -> bool:
    """Whether an exception only says that another rank has gone or does not answer."""
    if isinstance(exc, (RankLostError, ControlTimeoutError, dist.DistError)):
        return True
    return isinstance(exc, RuntimeError) and any(sign in str(exc).lower() for sign in _LOSS_SIGNS)


def peer_error(exc: RuntimeError) -> RankLostError | ControlTimeoutError:
    """The error of ours for what a collective raised."""
    first_line = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
    if any(sign in first_line.lower() for sign in _TIMEOUT_SIGNS):
        return ControlTimeoutError(f"the other ranks did not answer within --control-timeout ({first_line})")
    return RankLostError(f"the connection to another rank broke ({first_line})")
