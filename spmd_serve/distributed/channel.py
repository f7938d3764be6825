"""The control channel: the only place with a control collective. Rank 0's StepInput reaches every rank.

An exchange has two halves: `post` starts it, and `receive` waits for its end, so that it can travel while a step runs.
Every rank calls both the same number of times, whatever is in it. A follower that waits here uses no CPU.

One broadcast carries most inputs, because its latency is what an exchange costs: a message of a fixed size with the length
in front. `broadcast_object_list` needs two, and returns when both are done: 351 us against 93 between two GPUs' processes.
"""

from __future__ import annotations

import pickle
import queue
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import ControlTimeoutError, RankLostError
from spmd_serve.types import StepInput

MESSAGE_BYTES = 4096  # of the one broadcast that is always made; what is longer follows in a second one
_LENGTH_BYTES = 8


class StepChannel(ABC):
    """Hands rank 0's StepInput to all ranks."""

    @abstractmethod
    def post(self, step_input: StepInput | None) -> None:
        """Start an exchange: rank 0 passes the step's input, the others None. Collective; one at a time."""

    @abstractmethod
    def receive(self) -> StepInput:
        """Wait for the exchange that was posted: rank 0's input. Collective.

        Raises:
            RankLostError: a rank has died.
            ControlTimeoutError: a rank did not come within the control timeout.
        """

    def exchange(self, step_input: StepInput | None) -> StepInput:
        """Both halves. Collective."""
        self.post(step_input)
        return self.receive()


class SoloChannel(StepChannel):
    """World size 1: no collective at all."""

    def __init__(self) -> None:
        self._posted: StepInput | None = None

    def post(self, step_input: StepInput | None) -> None:
        self._posted = step_input

    def receive(self) -> StepInput:
        assert self._posted is not None
        return self._posted


class GlooChannel(StepChannel):
    """Broadcasts from rank 0 over the default process group, whose timeout is the control timeout."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        self._view = self._message.numpy().data
        self._posted: StepInput | None = None
        self._rest = b""
        self._work: Any = None

    def post(self, step_input: StepInput | None) -> None:
        assert (step_input is not None) == (self._rank == 0)
        assert self._work is None, "one exchange at a time"
        self._posted = step_input
        if step_input is not None:
            data = pickle.dumps(step_input, protocol=pickle.HIGHEST_PROTOCOL)
            first = data[: MESSAGE_BYTES - _LENGTH_BYTES]
            self._rest = data[len(first) :]
            self._view[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
            self._view[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first
        try:
            self._work = dist.broadcast(self._message, src=0, async_op=True)  # collective
        except RuntimeError as exc:
            raise peer_error(exc) from exc

    def receive(self) -> StepInput:
        work, self._work = self._work, None
        try:
            work.wait()
            length = int.from_bytes(self._view[:_LENGTH_BYTES], "little")
            rest = max(0, length + _LENGTH_BYTES - MESSAGE_BYTES)
            received = self._posted
            if received is None:
                data = bytes(self._view[_LENGTH_BYTES : _LENGTH_BYTES + length]) + self._broadcast_rest(rest)
                # Pickle is safe here: it comes from rank 0 of this very job.
                received = pickle.loads(data)
            elif rest:
                self._broadcast_rest(rest)
        except RuntimeError as exc:
            raise peer_error(exc) from exc
        assert isinstance(received, StepInput)
        return received

    def _broadcast_rest(self, size: int) -> bytes:
        """What did not fit into the message. Collective if there is such, which the message says."""
        if size == 0:
            return b""
        rest = torch.frombuffer(bytearray(self._rest or size), dtype=torch.uint8)
        dist.broadcast(rest, src=0)  # collective
        return rest.numpy().tobytes()


def make_channel(ranks: RankInfo) -> StepChannel:
    """The channel of these ranks; one alone needs no process group."""
    return SoloChannel() if ranks.world_size == 1 else GlooChannel(ranks.rank)


class MemoryChannel(StepChannel):
    """The in-memory fake for tests: ranks are threads of one process, each with its own MemoryChannel.

    A StepInput is handed over as it is: it is frozen.
    """

    def __init__(self, rank: int, queues: list[queue.Queue[StepInput]], timeout_s: float = 10.0) -> None:
        self._rank = rank
        self._queues = queues
        self._timeout_s = timeout_s
        self._posted: StepInput | None = None

    @classmethod
    def connect(cls, world_size: int, timeout_s: float = 10.0) -> list[MemoryChannel]:
        """One channel for each rank."""
        queues: list[queue.Queue[StepInput]] = [queue.Queue() for _ in range(world_size - 1)]
        return [cls(rank, queues, timeout_s) for rank in range(world_size)]

    def post(self, step_input: StepInput | None) -> None:
        assert (step_input is not None) == (self._rank == 0)
        self._posted = step_input
        if step_input is not None:
            for follower in self._queues:
                follower.put(step_input)

    def receive(self) -> StepInput:
        if self._posted is not None:
            return self._posted
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


def is_timeout(exc: BaseException) -> bool:
    """Whether an exception, of those that `is_peer_error` knows, says that a rank did not come in time."""
    first_line = str(exc).partition("\n")[0].lower()
    return isinstance(exc, ControlTimeoutError) or any(sign in first_line for sign in _TIMEOUT_SIGNS)


def peer_error(exc: RuntimeError) -> RankLostError | ControlTimeoutError:
    """The error of ours for what a collective raised."""
    first_line = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
    if is_timeout(exc):
        return ControlTimeoutError(f"the other ranks did not answer within --control-timeout ({first_line})")
    return RankLostError(f"the connection to another rank broke ({first_line})")
