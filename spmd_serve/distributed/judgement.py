"""Who is dead, silent or stuck, by what one rank knows of the others. No clock, no thread and no store: numbers in, a name out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmd_serve.config import ControlOptions
from spmd_serve.distributed.beats import SLOW_S, TICK_S, Beat
from spmd_serve.distributed.board import Failure, Peer
from spmd_serve.distributed.channel import is_timeout
from spmd_serve.distributed.ranks import RankInfo

START_SILENCE_S = 60.0  # while weights load, a thread may keep the interpreter for long
SUSPECT_SILENCE_S = 1.2  # once a connection broke, the rank that is silent this long is the one
STOP_SILENCE_S = 10.0  # a rank that is silent this long once all are to stop does not leave by itself


@dataclass(frozen=True)
class Evidence:
    """What a rank knows at one moment; times are in seconds.

    Attributes:
        control: the options; None while starting.
        stopping: all are to stop.
        peer_error: what the main thread got from a collective, if it says that another rank has gone or does not answer.
        busy, step_age: the main thread is in a step that must end; how long ago it began its latest one.
        gone: a rank of this host whose process does not live.
        store_silence, store_error: how long nothing has come from the job's store, and why nothing will.
        beats, silence: of the ranks that this one hears: the last sign of life, and how long ago it came. Of itself a rank
            has a beat alone.
    """

    control: ControlOptions | None = None
    stopping: bool = False
    peer_error: BaseException | None = None
    busy: bool = False
    step_age: float = 0.0
    gone: Peer | None = None
    store_silence: float = 0.0
    store_error: BaseException | None = None
    beats: Mapping[int, Beat] = field(default_factory=dict)
    silence: Mapping[int, float] = field(default_factory=dict)


class Judge:
    """One rank's: rank 0's judges everybody, the others' rank 0, and each the processes of its host.

    Args:
        ranks: where this rank is.
        peers: every rank, in order.
    """

    def __init__(self, ranks: RankInfo, peers: Sequence[Peer]) -> None:
        self._ranks = ranks
        self._peers = peers

    def find(self, seen: Evidence) -> Failure | None:
        """The rank that is dead, silent or stuck, if there is one."""
        if seen.gone is not None:
            return self._lost(seen, seen.gone.rank, "its process is gone (killed, or out of memory?)")
        limit = _silence_limit(seen)
        if seen.store_error is not None or seen.store_silence > limit:
            return self._store_lost(seen)
        quietest = max(seen.silence, key=seen.silence.__getitem__, default=None)
        if quietest is not None and seen.silence[quietest] > limit:
            return self._silent(seen, quietest)
        control = seen.control
        if control is None:
            return None
        if seen.peer_error is not None and is_timeout(seen.peer_error):
            return self._stuck(seen, "--control-timeout", control.control_timeout)
        if self._ranks.rank == 0 and seen.busy and seen.step_age > control.step_timeout:
            return self._stuck(seen, "--step-timeout", control.step_timeout)
        return None

    def _stuck(self, seen: Evidence, option: str, limit: float) -> Failure | None:
        """The step does not end: who holds it up. None if that cannot be told yet, or (on followers) it is not rank 0."""
        if not seen.beats:
            return None
        rank = holds_up(seen.beats)
        beat = seen.beats[rank]
        if self._ranks.rank > 0 and (beat.waits or not beat.busy):
            return None
        if seen.silence.get(rank, 0.0) > min(SUSPECT_SILENCE_S, limit - 2 * TICK_S):
            # Stopped in this step, so its silence is not quite as old as the step. It cannot end itself: lost, not hanging.
            return self._silent(seen, rank)
        if beat.busy and beat.age <= SLOW_S and seen.step_age <= limit + SLOW_S:
            return None  # too young to say whether it waits itself
        others = "; all ranks wait for each other" if beat.waits else ""
        place = f" at {beat.where}" if beat.where else ""  # not yet known of a job that was suspended as a whole
        message = f"step {beat.step} for {beat.age:.1f} s ({option} is {limit:g}){place}{others}"
        return self._blame(rank, "hangs", message)

    def _store_lost(self, seen: Evidence) -> Failure:
        reason = str(seen.store_error).splitlines()[0] if seen.store_error else f"for {seen.store_silence:.1f} s"
        store = f"{self._ranks.store_host}:{self._ranks.store_port}"
        message = (
            f"no answer from the job's store at {store} ({reason}); the head node, its torchrun or the network is gone"
        )
        return self._blame(0, "lost", message)

    def _silent(self, seen: Evidence, rank: int) -> Failure:
        return self._lost(seen, rank, f"no sign of life for {seen.silence[rank]:.1f} s")

    def _lost(self, seen: Evidence, rank: int, message: str) -> Failure:
        beat = seen.beats.get(rank)
        last_seen = "" if beat is None or beat.step < 0 else f"; last seen in step {beat.step}"
        return self._blame(rank, "lost", message + last_seen)

    def _blame(self, rank: int, kind: str, message: str) -> Failure:
        return Failure(rank, self._peers[rank].hostname, kind, message)


def _silence_limit(seen: Evidence) -> float:
    """How long a rank, or the store, may be silent."""
    if seen.peer_error is not None:
        return SUSPECT_SILENCE_S
    control = seen.control
    limit = START_SILENCE_S if control is None else min(control.step_timeout, control.control_timeout)
    return min(limit, STOP_SILENCE_S) if seen.stopping else limit


def holds_up(beats: Mapping[int, Beat]) -> int:
    """The rank that the others wait for: one that is not itself inside a collective, or else the one furthest behind."""
    return min(beats, key=lambda rank: (beats[rank].waits or not beats[rank].busy, beats[rank].step, rank))
