"""The blackboard of the job: what ranks tell each other outside of the step, in torchrun's key-value store.

It carries start-up agreement (`share`, `gather`), failures (the first one counts) and requests to stop. Waiting on it
ends as soon as a rank reports a failure, so nobody waits for a rank that will never come.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from spmd_serve.distributed.process import is_dead
from spmd_serve.distributed.ranks import CONNECT_TIMEOUT_S, RankInfo
from spmd_serve.errors import REFUSED, DistributedError, RankLostError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S = 0.02
_PEERS_GONE_S = 2.0  # how long a failed rank lets the others read why
_REMIND_S = 20.0  # a line about who is missing, this often
_STOPPED_S = 5.0  # how long the ranks wait for each other once they are to stop
_EPOCH = "spmd_serve/epoch"


@dataclass(frozen=True)
class Peer:
    """A rank as it registered. `ticket` tells this process from its predecessor before a restart."""

    rank: int
    world_size: int
    node: int
    hostname: str
    pid: int
    ticket: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.hostname})"


@dataclass(frozen=True)
class Failure:
    """Why the job ends. The first one on the board counts.

    Attributes:
        rank: the rank at fault.
        kind: "help" (no failure: there was nothing to run), "refused" (what the user asked for cannot be), "error" (an
            exception), "lost" (the process is gone or does not answer) or "hangs" (it answers, but its step does not end).
        message: one line, without the rank's name.
        details: the traceback of that rank, if there is one.
    """

    rank: int
    hostname: str
    kind: str
    message: str
    details: str = ""

    @property
    def exit_code(self) -> int:
        return {"help": 0, "refused": REFUSED}.get(self.kind, 1)

    def __str__(self) -> str:
        verb = {"error": " failed", "lost": " is lost", "hangs": " hangs"}.get(self.kind, "")
        return f"rank {self.rank} ({self.hostname}){verb}: {self.message}"


class Board:
    """The store, seen by one thread of one rank; `reopen` gives another thread its own connection.

    Args:
        store: private to this attempt of the job.
        peers: every rank, in order.
        connect: makes another connection to the same store.
    """

    def __init__(self, store: Store, ranks: RankInfo, peers: list[Peer], connect: Callable[[], Store]) -> None:
        self.store = store
        self.ranks = ranks
        self.peers = peers
        self._connect = connect

    def reopen(self) -> Board:
        """The same board on a connection of its own: calls on one connection wait for each other."""
        return Board(self._connect(), self.ranks, self.peers, self._connect)

    @property
    def neighbours(self) -> list[Peer]:
        """The other ranks of this host: without LOCAL_RANK all count as of node 0, and pids say nothing about other hosts."""
        own = self.peers[self.ranks.rank]
        return [p for p in self.peers if (p.node, p.hostname) == (own.node, own.hostname) and p.pid != own.pid]

    # ---- agreement -----------------------------------------------------------------------------------------------

    def share(self, name: str, value: T | None = None) -> T:
        """Rank 0's `value`, on every rank."""
        if self.ranks.rank == 0:
            _put(self.store, name, value)
        self._wait({name: self.peers[0]})
        shared: T = pickle.loads(self.store.get(name))
        return shared

    def gather(self, name: str, value: T) -> list[T]:
        """Every rank's `value`, by rank, on every rank. Waits without limit for ranks that live."""
        keys = {f"{name}/{peer.rank}": peer for peer in self.peers}
        _put(self.store, f"{name}/{self.ranks.rank}", value)
        self._wait(keys)
        return [pickle.loads(self.store.get(key)) for key in keys]

    def _wait(self, keys: dict[str, Peer]) -> None:
        remind = time.monotonic() + _REMIND_S
        while True:
            gone = next((peer for peer in self.neighbours if is_dead(peer.pid)), None)
            if self.store.check(list(keys)):  # asked after that: a rank may give its last value, and end
                return
            failure = self.failure()
            if failure is not None:
                raise RankLostError(str(failure))
            if gone is not None:
                raise RankLostError(f"{gone} is lost: its process is gone (killed, or out of memory?)")
            if time.monotonic() > remind:
                missing = [str(peer) for key, peer in keys.items() if not self.store.check([key])]
                logger.info("waiting for %s (%s)", ", ".join(missing[:8]), next(iter(keys)).split("/")[0])
                remind += _REMIND_S
            time.sleep(_POLL_S)

    # ---- failures and stop requests ------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> Failure:
        """Report a failure; returns the one that counts, which may be another rank's."""
        text = json.dumps(asdict(failure))
        return Failure(**json.loads(self.store.compare_set("failure", "", text)))

    def failure(self) -> Failure | None:
        """The failure that ends the job, if there is one."""
        if not self.store.check(["failure"]):
            return None
        return Failure(**json.loads(self.store.get("failure")))

    def request_stop(self, level: int) -> None:
        """Ask for a drain (1) or an immediate stop (2), from any rank."""
        self.store.set(f"stop/{level}", "1")

    def requested_stop(self) -> int:
        """What was asked for: 0, 1 or 2."""
        return 2 if self.store.check(["stop/2"]) else int(self.store.check(["stop/1"]))

    def decide(self, begin: str) -> str:
        """Whether the job begins to "serve" or is to "stop" before: what the first rank says that decides, on all ranks."""
        return str(self.store.compare_set("begin", "", begin).decode())

    def say_leaving(self) -> None:
        """This rank is ready to leave, as soon as all are."""
        self.store.set(f"leaving/{self.ranks.rank}", "1")

    def all_leave(self) -> bool:
        """Whether every rank has said so."""
        return self.store.check([f"leaving/{peer.rank}" for peer in self.peers])

    def say_gone(self) -> None:
        """This rank leaves; its silence from now on is no failure."""
        self.store.set(f"gone/{self.ranks.rank}", "1")

    def others_are_gone(self) -> bool:
        """Whether every other rank has said so."""
        return all(self.is_gone(peer.rank) for peer in self.peers if peer.rank != self.ranks.rank)

    def await_others(self) -> None:
        """Wait until every other rank has said so, but not for long."""
        deadline = time.monotonic() + _PEERS_GONE_S
        while not self.others_are_gone() and time.monotonic() < deadline:
            time.sleep(0.05)

    def is_gone(self, rank: int) -> bool:
        """Whether a rank has said so."""
        return self.store.check([f"gone/{rank}"])


def _put(store: Store, key: str, value: object) -> None:
    store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes are fine; torch's stub says str


# ---- opening it ---------------------------------------------------------------------------------------------------


def open_board(ranks: RankInfo, stopped_at: Callable[[], float | None] = lambda: None) -> Board:
    """Connect to the store and meet all ranks of this attempt.

    torchrun keeps one store over restarts, so each attempt works in a part of its own. Restart counts cannot name it, because
    those of two hosts may differ: rank 0 draws a name, the others register under it with a ticket of their own, and rank 0
    closes the list. A rank whose ticket is not on the list looks at an earlier attempt, and waits for the next name.

    Args:
        stopped_at: when this rank was told to stop, if it was. It meets the others all the same, who may not know it, but waits
            less long for them.

    Raises:
        DistributedError: the store cannot be reached, or ranks are missing, or disagree on how many there are.
    """
    if ranks.world_size == 1:
        store = HashStore()
        own = Peer(0, 1, 0, ranks.hostname, os.getpid(), "")
        return Board(store, ranks, [own], lambda: store)

    def connect() -> Store:
        return TCPStore(
            ranks.store_host,
            ranks.store_port,
            ranks.world_size,
            is_master=ranks.rank == 0 and not ranks.agent_store,
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        root = _connect_in_time(connect, _Patience(CONNECT_TIMEOUT_S, stopped_at))
    except (RuntimeError, TimeoutError) as exc:
        raise DistributedError(
            f"rank {ranks.rank} on host {ranks.hostname} cannot reach the job's store at {ranks.store_host}:{ranks.store_port} "
            f"({str(exc).splitlines()[0]}); check the head node's name, its port and the firewall"
        ) from exc
    own = Peer(ranks.rank, ranks.world_size, ranks.node, ranks.hostname, os.getpid(), uuid.uuid4().hex)
    patience = _Patience(CONNECT_TIMEOUT_S, stopped_at)
    try:
        epoch, peers = _call_roll(root, own, patience) if ranks.rank == 0 else _answer_roll(root, own, patience)
    except RuntimeError as exc:
        if isinstance(exc, DistributedError):
            raise
        raise RankLostError(f"the job's store went away ({str(exc).splitlines()[0]})") from exc

    def connect_epoch() -> Store:
        return PrefixStore(f"spmd_serve/{epoch}", connect())

    return Board(PrefixStore(f"spmd_serve/{epoch}", root), ranks, peers, connect_epoch)


@dataclass
class _Patience:
    """How long the ranks wait for each other: `limit_s`, but no longer than _STOPPED_S after `stopped_at`."""

    limit_s: float
    stopped_at: Callable[[], float | None] = lambda: None
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        stopped_at = self.stopped_at()
        if stopped_at is None:
            return self.limit_s
        return min(self.limit_s, max(0.0, stopped_at - self.began) + _STOPPED_S)

    def is_over(self, extra_s: float = 0.0) -> bool:
        return time.monotonic() > self.began + self.seconds + extra_s


def _connect_in_time(connect: Callable[[], Store], patience: _Patience) -> Store:
    """`connect()` in a thread of its own: it may be in C++ for a minute, where the main thread would hear no signal.

    Raises:
        TimeoutError: it takes too long.
    """
    connected: Future[Store] = Future()

    def run() -> None:
        try:
            connected.set_result(connect())
        except BaseException as exc:
            connected.set_exception(exc)

    threading.Thread(target=run, name="connect", daemon=True).start()
    while not wait([connected], timeout=_POLL_S).done:
        if patience.is_over(2.0):  # its own reason says more
            raise TimeoutError(f"no answer within {patience.seconds:.3g} s")
    return connected.result()


def _call_roll(root: Store, own: Peer, patience: _Patience) -> tuple[str, list[Peer]]:
    """Rank 0's part: a name for the attempt, and the list of those who came."""
    epoch = own.ticket
    came: dict[int, Peer] = {0: own}
    problem = ""
    root.set(_EPOCH, epoch)
    while len(came) < own.world_size and not problem:
        time.sleep(_POLL_S)
        for rank in range(1, own.world_size):
            if rank not in came and root.check([f"{epoch}/join/{rank}"]):
                came[rank] = pickle.loads(root.get(f"{epoch}/join/{rank}"))
                if came[rank].world_size != own.world_size:
                    problem = (
                        f"{came[rank]} was started with a world size of {came[rank].world_size} and {own} with one of "
                        f"{own.world_size}; start every host with the same number of hosts and ranks"
                    )
        if patience.is_over():
            missing = sorted(set(range(own.world_size)) - set(came))
            problem = (
                f"rank {', '.join(map(str, missing))} of {own.world_size} did not come within {patience.seconds:.3g} s (there are "
                f"ranks from {', '.join(sorted({p.hostname for p in came.values()}))}); check that the other hosts run and "
                "reach the head node"
            )
    peers = [came[rank] for rank in sorted(came)]
    _put(root, f"{epoch}/roll", (peers, problem))
    if problem:
        time.sleep(1.0)  # those who came read it, before this process, which may host the store, is gone
        raise DistributedError(problem)
    return epoch, peers


def _answer_roll(root: Store, own: Peer, patience: _Patience) -> tuple[str, list[Peer]]:
    """A follower's part: register under each name that appears, until a list has this process on it."""
    answered = ""
    while True:
        epoch = root.get(_EPOCH).decode() if root.check([_EPOCH]) else ""
        if epoch != answered:
            _put(root, f"{epoch}/join/{own.rank}", own)
            answered = epoch
        if epoch and root.check([f"{epoch}/roll"]):
            peers, problem = pickle.loads(root.get(f"{epoch}/roll"))
            if own in peers and problem:
                raise RankLostError(problem)  # rank 0 says so
            if own in peers:
                return epoch, peers
        if patience.is_over(2.0):  # rank 0 speaks first
            raise DistributedError(
                f"rank {own.rank} on host {own.hostname} did not hear from rank 0 within {patience.seconds:.3g} s; check that the "
                "head node runs the first ranks"
            )
        time.sleep(_POLL_S)
