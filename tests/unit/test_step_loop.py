"""The step loop on ranks that are threads, over the in-memory channel: every rank does the same, whatever the loop does."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from spmd_serve.config import ControlOptions, SchedulerOptions
from spmd_serve.distributed.beats import Progress
from spmd_serve.distributed.channel import MemoryChannel, SoloChannel, StepChannel
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import RankDivergenceError
from spmd_serve.scheduler.scheduler import Scheduler
from spmd_serve.step_loop import MAX_FREE_STEPS, POST_AHEAD, StepLoop
from spmd_serve.types import (
    Abort,
    FinishReason,
    Request,
    SamplingParams,
    ScheduledBatch,
    ServicePhase,
    ServiceState,
    StepInput,
    StepOutput,
    StepTokens,
)

CONTROL = ControlOptions(heartbeat_interval=0.05, sync_latency=0.0)


def request(uid: int, max_tokens: int = 8, prompt: int = 5) -> Request:
    return Request(uid, array("i", range(1, prompt + 1)).tobytes(), SamplingParams(max_tokens, ignore_eos=True))


class Runner:
    """Tokens are a function of the row and its place; `wrong_at` changes one, from that step on. A step takes `step_time` s."""

    def __init__(self, wrong_at: int | None = None, step_time: float = 0.0) -> None:
        self.wrong_at = wrong_at
        self.step_time = step_time
        self.steps = 0

    def launch(self, batch: ScheduledBatch) -> Runner.Pending:
        self.steps += 1
        time.sleep(self.step_time)
        slots = [*batch.decode_slots, *(chunk.slot for chunk in batch.chunks if chunk.samples)]
        tokens = [10 + slot for slot in slots]
        if self.wrong_at is not None and batch.step >= self.wrong_at and tokens:
            tokens[0] += 1
        return Runner.Pending(tokens)

    class Pending:
        def __init__(self, tokens: list[int]) -> None:
            self._tokens = tokens

        def wait(self) -> StepTokens:
            return StepTokens(self._tokens)


class Link:
    """Requests by the number of the drain that brings them. Asks for the stop when all of them have ended, or when told."""

    def __init__(self, script: dict[int, list[Request]], stop_after: int | None = None) -> None:
        self.script = dict(script)
        self.stop_after = stop_after
        self.expected = {r.uid for requests in script.values() for r in requests}
        self.drains = 0
        self.waits = 0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, tuple[FinishReason, str]] = {}
        self.states: list[ServiceState] = []
        self.exchange_times: list[float] = []  # of the steps that computed

    def drain(self) -> tuple[list[Request], list[Abort]]:
        self.drains += 1
        return self.script.pop(self.drains, []), []

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        coming = {r.uid for requests in self.script.values() for r in requests}
        assert self.expected - coming <= self.finished.keys(), "rank 0 waits, and somebody waits for what it has"
        return False

    def publish(self, output: StepOutput) -> None:
        assert output.stats is not None
        if output.stats.step_time:
            self.exchange_times.append(output.stats.exchange_time)
        for uid, token in zip(output.uids, output.tokens, strict=True):
            self.tokens.setdefault(uid, []).append(token)
        for finish in output.finished:
            assert finish.uid not in self.finished
            self.finished[finish.uid] = (finish.reason, finish.code)

    def set_state(self, state: ServiceState, reason: str = "") -> None:
        self.states.append(state)

    def phase(self) -> ServicePhase:
        if self.stop_after is not None:
            return ServicePhase.DRAIN if self.drains >= self.stop_after else ServicePhase.RUN
        return ServicePhase.DRAIN if self.expected <= self.finished.keys() else ServicePhase.RUN


class Counting(StepChannel):
    """A channel that keeps the inputs, and how many steps were launched while each was under way."""

    def __init__(self, channel: StepChannel, launched: Callable[[], int]) -> None:
        self._channel = channel
        self._launched = launched
        self._posted_at = 0
        self.inputs: list[StepInput] = []
        self.leads: list[int] = []

    def post(self, step_input: StepInput | None) -> None:
        self._posted_at = self._launched()
        self._channel.post(step_input)

    def receive(self) -> StepInput:
        self.inputs.append(self._channel.receive())
        self.leads.append(self._launched() - self._posted_at)
        return self.inputs[-1]


class Ranks:
    """Runs the loop on every rank to its end."""

    def __init__(
        self,
        world_size: int,
        link: Link,
        *,
        overlap: bool = False,
        control: ControlOptions = CONTROL,
        runner: Callable[[int], Runner] = lambda rank: Runner(),
    ) -> None:
        channels: list[StepChannel] = [SoloChannel()] if world_size == 1 else [*MemoryChannel.connect(world_size, 5.0)]
        self.link = link
        self.runners = [runner(rank) for rank in range(world_size)]
        self.channels = [
            Counting(channel, lambda rank=rank: self.runners[rank].steps)  # type: ignore[misc]
            for rank, channel in enumerate(channels)
        ]
        self.schedulers = [self._scheduler(overlap) for _ in range(world_size)]
        self.errors: dict[int, BaseException] = {}
        self.loops = [
            StepLoop(
                RankInfo(rank, world_size, rank, world_size, "host"),
                self.channels[rank],
                self.schedulers[rank],
                self.runners[rank],
                control,
                overlap=overlap,
                progress=Progress(),
                link=link if rank == 0 else None,
                requested_phase=link.phase,
            )
            for rank in range(world_size)
        ]

    @staticmethod
    def _scheduler(overlap: bool) -> Scheduler:
        return Scheduler(
            SchedulerOptions(max_num_seqs=4, max_batch_tokens=16),
            page_size=4,
            num_pages=64,
            prefix_cache=True,
            max_model_len=128,
            eos_token_ids=(2,),
            overlap=overlap,
        )

    def run(self) -> Ranks:
        def rank_main(rank: int) -> None:
            try:
                self.loops[rank].run()
            except BaseException as exc:
                self.errors[rank] = exc

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(self.loops))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return self


SCRIPT = {1: [request(1, 20), request(2, 3, prompt=30)], 4: [request(3, 9)], 9: [request(u, 6) for u in range(4, 12)]}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sync_latency", [0.0, 10.0])
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_decide_alike_and_everything_ends_once(world_size: int, sync_latency: float, overlap: bool) -> None:
    link = Link(SCRIPT)
    ranks = Ranks(world_size, link, overlap=overlap, control=replace(CONTROL, sync_latency=sync_latency)).run()
    assert not ranks.errors
    assert {uid: len(tokens) for uid, tokens in link.tokens.items()} == {
        r.uid: r.params.max_tokens for requests in SCRIPT.values() for r in requests
    }
    assert all(finish == (FinishReason.LENGTH, "") for finish in link.finished.values())
    assert len({runner.steps for runner in ranks.runners}) == 1
    assert len({scheduler.digest for scheduler in ranks.schedulers}) == 1
    assert len({len(channel.inputs) for channel in ranks.channels}) == 1
    assert link.states == [ServiceState.DRAINING]


def test_pure_decode_skips_exchanges_and_arrivals_are_seen_in_time() -> None:
    link = Link({1: [request(1, 100)], 6: [request(2, 5)]})
    ranks = Ranks(2, link, control=replace(CONTROL, sync_latency=10.0)).run()
    inputs = ranks.channels[1].inputs
    assert ranks.runners[1].steps >= 100
    assert len(inputs) < 30
    assert max(step_input.free_steps for step_input in inputs) == MAX_FREE_STEPS
    assert all(not (step_input.arrivals and step_input.free_steps) for step_input in inputs)
    # While the last of 32 free steps runs, the next exchange is under way; where the work ends before, there is none to wait for.
    leads = [lead for before, lead in zip(inputs, ranks.channels[1].leads[1:], strict=False) if before.free_steps]
    assert leads[:2] == [1, 1] and set(leads[2:]) <= {0, 1}
    assert link.finished.keys() == {1, 2}
    # Statistics have each exchange once, and none of the steps that went without.
    assert 0 < sum(time > 0.0 for time in link.exchange_times) <= len(inputs)
    assert len(link.exchange_times) >= 100


@pytest.mark.parametrize("overlap", [False, True])
def test_a_deadline_is_told_at_once_though_exchanges_set_out_ahead(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Also where the exchange that ends the last request leaves no more steps than the next one sets out ahead."""
    monkeypatch.setattr(StepLoop, "_rank0_free_steps", lambda self: POST_AHEAD)
    link = Link({1: [replace(request(1, 100), deadline=time.monotonic() + 0.1)]})
    ranks = Ranks(2, link, overlap=overlap, runner=lambda rank: Runner(step_time=0.005)).run()
    assert not ranks.errors
    assert link.finished[1] == (FinishReason.ERROR, "timeout")


def test_alone_no_stretch_is_announced() -> None:
    ranks = Ranks(1, Link({1: [request(1, 50)]}), control=replace(CONTROL, sync_latency=10.0)).run()
    assert {step_input.free_steps for step_input in ranks.channels[0].inputs} == {0}


@pytest.mark.parametrize("overlap", [False, True])
def test_another_token_is_found_out_and_named(overlap: bool) -> None:
    link = Link({1: [request(1, 30)]}, stop_after=20)
    ranks = Ranks(2, link, overlap=overlap, runner=lambda rank: Runner(wrong_at=5 if rank == 1 else None)).run()
    error = ranks.errors[1]
    assert isinstance(error, RankDivergenceError)
    assert "rank 1 (host) decided otherwise than rank 0 by step 5: first difference in tokens" in str(error)


def test_a_drain_lets_running_requests_end_and_refuses_new_ones() -> None:
    link = Link({1: [request(1, 12)], 6: [request(2, 12)]}, stop_after=5)
    ranks = Ranks(2, link).run()
    assert link.finished[1] == (FinishReason.LENGTH, "")
    assert link.finished[2] == (FinishReason.ERROR, "draining")
    phases = [step_input.phase for step_input in ranks.channels[1].inputs]
    assert phases == sorted(phases)
    assert set(phases) == set(ServicePhase)


def test_a_drain_without_work_waits_for_nothing() -> None:
    link = Link({1: [request(1)]}, stop_after=1)  # the request comes together with the signal, and is refused
    Ranks(2, link).run()
    assert link.finished == {1: (FinishReason.ERROR, "draining")}
    assert link.waits == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_what_does_not_end_within_the_drain_ends_with_an_error(overlap: bool) -> None:
    link = Link({1: [request(1, 100)]}, stop_after=5)
    ranks = Ranks(2, link, overlap=overlap, control=replace(CONTROL, drain_timeout=0.0)).run()
    assert not ranks.errors
    assert link.finished[1] == (FinishReason.ERROR, "shutdown")


def test_an_idle_rank_0_sends_heartbeats() -> None:
    link = Link({}, stop_after=4)
    ranks = Ranks(2, link).run()
    assert link.waits == 4
    assert len(ranks.channels[1].inputs) == 4
