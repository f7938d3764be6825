"""The scheduler under random lives: whatever arrives, is aborted, times out or is preempted, the books balance after every step
and every text is the oracle's."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from toy_engine import POISON, SCHEDULES, VOCAB, ToyLoop, make_loop, random_traffic

from spmd_serve.types import Abort, FinishReason, Request, ServicePhase

TOKEN = st.one_of(st.integers(1, VOCAB - 1), st.integers(1, VOCAB - 1), st.integers(POISON, POISON + 20))
SHARED = [list(range(1, 20)), [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9, 9]]  # prompts begin with a part of one of these


@st.composite
def loops(draw: st.DrawFn) -> ToyLoop:
    """A scheduler with a starved or a roomy pool, page sizes 1 and up, all policies, chunks of 1 token and up."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    return ToyLoop(
        page_size=page_size,
        num_pages=max(2, draw(st.sampled_from([24, 32, 48, 64, 400])) // page_size),
        max_num_seqs=draw(st.sampled_from([8, 3, 1])),
        max_batch_tokens=draw(st.sampled_from([64, 16, 5, 1])),
        max_model_len=draw(st.sampled_from([200, 30])),
        prefix_cache=draw(st.sampled_from([True, True, False])),
        overlap=draw(st.booleans()),
        schedule=draw(st.sampled_from(SCHEDULES)),
        prefill_share=draw(st.sampled_from([0.01, 0.75, 1.0])),
        max_queue=draw(st.sampled_from([2, 1000])),
        request_timeout=draw(st.sampled_from([None, 20.0])),
        short_context=draw(st.sampled_from([0, 0, 9, 16])),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    shared = draw(st.sampled_from(SHARED))
    own = draw(st.lists(TOKEN, min_size=0, max_size=12))
    return shared[: draw(st.integers(0 if own else 1, len(shared)))] + own


class Lives(RuleBasedStateMachine):
    """Rules are what the outside may do; ToyLoop.step checks all invariants after each step."""

    runs = 0
    steps = 0
    preempted = 0
    cached = 0

    @initialize(loop=loops(), prompt=prompts(), crowd=st.sampled_from([6, 3, 0]))
    def start(self, loop: ToyLoop, prompt: list[int], crowd: int) -> None:
        """A crowd of long answers comes first: most pools are too small for it."""
        self.loop = loop
        self.uid = crowd
        self._step([loop.request(uid, [*prompt, uid + 1], max_tokens=30, ignore_eos=True) for uid in range(crowd)], [])

    def _step(self, arrivals: list[Request], aborts: list[Abort]) -> None:
        self.loop.now += 1.0
        self.loop.step(arrivals, aborts)

    @rule(
        prompt=prompts(),
        copies=st.integers(1, 4),
        max_tokens=st.sampled_from([30, 12, 3, 1, 0]),
        stop_token_ids=st.sampled_from([(), (), (5, 6)]),
        ignore_eos=st.sampled_from([True, True, False]),
        min_tokens=st.sampled_from([0, 0, 4]),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(["", "", "tenant"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        grammar=st.sampled_from([None, None, None, "g"]),
        lifetime=st.sampled_from([None, None, None, 2.0, 9.0]),
    )
    def arrive(self, prompt: list[int], copies: int, lifetime: float | None, **fields: object) -> None:
        deadline = None if lifetime is None else self.loop.now + lifetime
        requests = [self.loop.request(self.uid + i, prompt, deadline=deadline, **fields) for i in range(copies)]  # type: ignore[arg-type]
        self.uid += copies
        self._step(requests, [])

    @rule(back=st.integers(0, 6), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def abort(self, back: int, reason: FinishReason) -> None:
        self._step([], [Abort(self.uid - back, reason)])

    @rule(count=st.integers(1, 8))
    def run(self, count: int) -> None:
        for _ in range(count):
            self._step([], [])

    def teardown(self) -> None:
        loop = self.loop
        loop.phase = ServicePhase.DRAIN  # who waits and runs goes on to its end
        loop.run()
        loop.check_texts()
        Lives.runs += 1
        Lives.steps += loop.step_number
        Lives.preempted += loop.scheduler.stats().preempted_total
        Lives.cached += sum(loop.cached.values())


def test_random_lives() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=200,
            stateful_step_count=15,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Lives.runs >= 200 and Lives.steps >= 2000
    print(
        f"{Lives.runs} lives, {Lives.steps} steps, {Lives.preempted} preemptions, {Lives.cached} tokens from the cache"
    )
    assert Lives.preempted > 20, "the pools were hardly short: the test shows little"
    assert Lives.cached > 500, "the cache was hardly hit: the test shows little"


def test_starved_pools() -> None:
    """Fixed traffic that preempts all the time, in all settings: as above, but with a known amount of distress."""
    preempted = 0
    for seed in range(60):
        loop = make_loop(seed)
        for arrivals, aborts in random_traffic(loop, seed, steps=25):
            loop.step(arrivals, aborts)
        loop.run()
        loop.check_texts()
        preempted += loop.scheduler.stats().preempted_total
    assert preempted > 150
