"""The step loop: the same on every rank, in lock step. `StepLoop.run` reads like the list in README.md.

Functions of rank 0 alone are named `rank0_*`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from spmd_serve.config import ControlOptions
from spmd_serve.distributed.beats import Progress
from spmd_serve.distributed.channel import StepChannel
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import RankDivergenceError
from spmd_serve.scheduler.digest import first_difference
from spmd_serve.scheduler.scheduler import Scheduler
from spmd_serve.types import (
    Abort,
    Request,
    ScheduledBatch,
    ServicePhase,
    ServiceState,
    StepDigest,
    StepInput,
    StepOutput,
    StepTokens,
)

logger = logging.getLogger(__name__)

MAX_FREE_STEPS = 32  # in a row without an exchange, however short they are
POST_AHEAD = 1  # free steps that are left when the next exchange sets out


class PendingStep(Protocol):
    """A launched step."""

    def wait(self) -> StepTokens:
        """Its tokens, when they have been sampled."""


class Runner(Protocol):
    """What the loop needs of the engine."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step; does not wait for its end where the device works by itself. Collective."""


class Link(Protocol):
    """What rank 0's loop needs of the side that the requests come from."""

    def drain(self) -> tuple[list[Request], list[Abort]]:
        """What has been queued, in order, but no more than a step should take in; does not wait."""

    def wait(self, timeout_s: float) -> bool:
        """Until there is something to drain, or the loop is to look anew; False after `timeout_s`."""

    def publish(self, output: StepOutput) -> None:
        """Take what a step produced; does not wait."""

    def set_state(self, state: ServiceState, reason: str = "") -> None:
        """Note what the service does from now on, and why."""


class GivenLink:
    """A Link whose requests are all there at once; a subclass says what becomes of the outputs (`publish`)."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def drain(self) -> tuple[list[Request], list[Abort]]:
        requests, self._requests = self._requests, []
        return requests, []

    def wait(self, timeout_s: float) -> bool:
        return bool(self._requests)

    def set_state(self, state: ServiceState, reason: str = "") -> None:
        pass


class StepLoop:
    """Runs steps until rank 0 announces the stop.

    Args:
        link: rank 0's requests and outputs; None on the others.
        requested_phase: what signals ask for; read on rank 0 only.
        exchange_times: per rank, for the statistics; read on rank 0 only.
        overlap: keep one step in flight while the next one is prepared.
    """

    def __init__(
        self,
        ranks: RankInfo,
        channel: StepChannel,
        scheduler: Scheduler,
        runner: Runner,
        control: ControlOptions,
        *,
        overlap: bool,
        progress: Progress,
        link: Link | None,
        requested_phase: Callable[[], ServicePhase] = lambda: ServicePhase.RUN,
        exchange_times: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        assert (link is not None) == (ranks.rank == 0)
        self._ranks = ranks
        self._channel = channel
        self._scheduler = scheduler
        self._runner = runner
        self._control = control
        self._depth = 1 if overlap else 0
        self._progress = progress
        self._link = link
        self._requested_phase = requested_phase
        self._exchange_times = exchange_times
        self._step = 0
        self._posted: tuple[int, StepDigest] | None = None  # an exchange under way: step and digest when it set out
        self._phase = ServicePhase.RUN
        self._drain_deadline = 0.0
        self._step_time = 0.0  # of rank 0's decode steps, smoothed; 0 is unknown

    def run(self, *, until_idle: bool = False) -> None:
        """Steps until the stop, or (offline use) until every request has ended. Every rank returns from the same step.

        Raises:
            RankDivergenceError: this rank decided otherwise than rank 0.
            RankLostError, ControlTimeoutError: from the exchange.
        """
        scheduler, link = self._scheduler, self._link
        in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        free_steps = 0  # steps to run before the next exchange, the same on all ranks
        while self._phase is not ServicePhase.STOP or in_flight:
            if free_steps > 0 and scheduler.has_work:
                free_steps -= 1
                self._progress.begin(self._step)
                exchange_time = 0.0
            else:
                step_input = self._receive()  # collective: all ranks, for the same steps
                exchange_time = self._progress.exchange_s
                scheduler.apply(step_input)
                self._phase = step_input.phase
                free_steps = step_input.free_steps
            began = time.monotonic()
            batch = scheduler.schedule()
            self._step += 1
            if batch is not None:
                in_flight.append((batch, self._runner.launch(batch)))  # tensor collectives: all ranks, the same batch
            # With no work left rank 0 would wait for requests here, before it publishes why the last one ended.
            if free_steps == POST_AHEAD and scheduler.has_work and self._posted is None:
                self._post()  # collective: all ranks, for the same steps
            if in_flight and (len(in_flight) > self._depth or batch is None):
                done, pending = in_flight.popleft()
                scheduler.commit(done, pending.wait())
            output = scheduler.take_output()
            if link is not None:
                self._rank0_publish(link, output, batch, time.monotonic() - began, exchange_time)
            if until_idle and not scheduler.has_work and self._posted is None:
                return

    def _post(self) -> None:
        """Send the next exchange on its way: with what rank 0 knows now, and each rank keeps its own digest to compare."""
        step_input = None
        if self._link is not None:
            step_input = self._rank0_input(self._link)
        self._posted = self._step, self._scheduler.digest
        self._channel.post(step_input)

    def _receive(self) -> StepInput:
        """Rank 0's input: of the exchange that is under way, or of a new one."""
        if self._posted is None:
            self._post()
        assert self._posted is not None
        (step, digest), self._posted = self._posted, None
        if self._link is None:
            self._progress.idle()
        else:
            self._progress.begin(self._step)
        began = time.monotonic()
        received = self._channel.receive()
        self._progress.exchange_s = time.monotonic() - began
        self._progress.begin(self._step)
        assert received.step == step, f"rank 0 was at step {received.step}, rank {self._ranks.rank} at {step}"
        self._check_digest(received, digest)
        return replace(received, step=self._step)

    def _check_digest(self, step_input: StepInput, own: StepDigest) -> None:
        """Compare rank 0's decisions, up to the last committed step, with this rank's at the same time."""
        if step_input.digest is None:
            return
        field = first_difference(own, step_input.digest)
        if field is not None:
            raise RankDivergenceError(
                f"rank {self._ranks.rank} ({self._ranks.hostname}) decided otherwise than rank 0 by step "
                f"{step_input.digest.step}: first difference in {field} ({getattr(own, field)} here, "
                f"{getattr(step_input.digest, field)} on rank 0)"
            )

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def _rank0_input(self, link: Link) -> StepInput:
        """The next step's input: waits while there is nothing to do, at most for the heartbeat interval."""
        scheduler = self._scheduler
        # A drain waits for nobody: its wake may have come together with the last request.
        if not scheduler.has_work and self._phase is self._requested_phase() is ServicePhase.RUN:
            self._progress.idle()
            link.wait(self._control.heartbeat_interval)
        arrivals, aborts = link.drain()
        phase = self._rank0_phase(link, idle=not scheduler.has_work and not arrivals)
        quiet = not arrivals and not aborts and phase is ServicePhase.RUN
        return StepInput(
            step=self._step,
            now=time.monotonic(),
            arrivals=tuple(arrivals),
            aborts=tuple(aborts),
            phase=phase,
            free_steps=self._rank0_free_steps() if quiet and scheduler.is_pure_decode else 0,
            digest=scheduler.digest if self._control.digest != "off" else None,
        )

    def _rank0_free_steps(self) -> int:
        """Decode steps that fit into the latency that an arrival may wait; rank 0's measurement decides for all.

        An arrival that comes too late for an exchange waits for those that follow its setting out, too.
        """
        if self._step_time == 0.0 or self._ranks.world_size == 1:
            return 0
        return max(0, min(MAX_FREE_STEPS, int(self._control.sync_latency / self._step_time) - POST_AHEAD))

    def _rank0_phase(self, link: Link, idle: bool) -> ServicePhase:
        """RUN; after a stop request DRAIN until nothing runs or time is up; then STOP."""
        now = time.monotonic()
        requested = self._requested_phase()
        if self._phase is ServicePhase.RUN and requested is not ServicePhase.RUN:
            self._drain_deadline = now + self._control.drain_timeout
            link.set_state(ServiceState.DRAINING, "the server is shutting down")
            logger.info("stop requested: no new requests, %g s for the running ones", self._control.drain_timeout)
        elif self._phase is ServicePhase.RUN:
            return ServicePhase.RUN
        if idle or requested is ServicePhase.STOP or now >= self._drain_deadline:
            return ServicePhase.STOP
        return ServicePhase.DRAIN

    def _rank0_publish(
        self, link: Link, output: StepOutput, batch: ScheduledBatch | None, took: float, exchange_time: float
    ) -> None:
        """Hand out what the step produced, with statistics. `took`: seconds without the exchange."""
        if batch is not None and not batch.chunks:
            self._step_time = took if self._step_time == 0.0 else 0.8 * self._step_time + 0.2 * took
        output.stats = replace(
            self._scheduler.stats(),
            step_time=took if batch is not None else 0.0,
            exchange_time=exchange_time,
            rank_exchange_times=self._exchange_times(),
        )
        link.publish(output)
