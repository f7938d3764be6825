"""The scheduler: how requests end, time, queue and phases, and what the loop asks, with a toy model whose text shows every mistake with a page (see toy_engine.py)."""

from __future__ import annotations

import random

import pytest
from toy_engine import VOCAB, ToyLoop, prompts, random_prompt

from spmd_serve.types import Abort, FinishReason, ServicePhase

BOTH = pytest.mark.parametrize("overlap", [False, True])


# ---- ends ------------------------------------------------------------------------------------------------------------


@BOTH
def test_every_way_to_end(overlap: bool) -> None:
    """EOS, stop ids, ignore_eos, min_tokens and max_tokens 0 and 1 end as the oracle says, each exactly once."""
    loop = ToyLoop(overlap=overlap)
    fields = [
        {},
        {"ignore_eos": True},
        {"stop_token_ids": (3, 5)},
        {"stop_token_ids": (3,), "ignore_eos": True},
        {"min_tokens": 12},
        {"max_tokens": 0},
        {"max_tokens": 1},
    ]
    requests = [
        loop.request(uid, prompt, **{"max_tokens": 40, **fields[uid % len(fields)]})
        for uid, prompt in enumerate(prompts(70))
    ]
    loop.run(requests)
    loop.check_texts()
    reasons = {(uid % len(fields), finish.reason) for uid, finish in loop.ended.items()}
    for kind in (0, 2, 3, 4):
        assert (kind, FinishReason.STOP) in reasons, "the toy model never stopped here: the test shows nothing"
    assert {reason for kind, reason in reasons if kind in (1, 5)} == {FinishReason.LENGTH}
    assert all(len(loop.texts[uid]) > 12 or loop.ended[uid].reason == "length" for uid in range(4, 70, 7))
    assert loop.first_step.keys() == loop.requests.keys()


def test_min_tokens_come_before_any_stop() -> None:
    """The first token that may end a request is the one after `min_tokens`."""
    loop = ToyLoop()
    every = tuple(range(VOCAB))  # each token would stop it
    loop.run([loop.request(n, [n + 1], 10, stop_token_ids=every, min_tokens=n) for n in range(6)])
    assert [len(loop.texts[n]) for n in range(6)] == [n + 1 for n in range(6)]
    assert {finish.reason for finish in loop.ended.values()} == {FinishReason.STOP}


@BOTH
def test_rows_equal_solo_runs(overlap: bool) -> None:
    """Case "row order": 16 prompts of different lengths together; each says what it says alone."""
    loop = ToyLoop(overlap=overlap, max_num_seqs=16, max_batch_tokens=32, num_pages=200)
    texts = prompts(16, 1, 60)
    loop.run([loop.request(uid, prompt, 20) for uid, prompt in enumerate(texts)])
    loop.check_texts()
    for uid, prompt in enumerate(texts):
        alone = ToyLoop(overlap=overlap)
        alone.run([alone.request(uid, prompt, 20)])
        assert alone.texts == {uid: loop.texts[uid]}


@BOTH
def test_can_never_fit(overlap: bool) -> None:
    """A pool of 64 tokens: a prompt of 40 + 60 is cut by length, a prompt of 100 refused at once, the next one served."""
    loop = ToyLoop(page_size=4, num_pages=16, overlap=overlap)
    big, huge, small = prompts(3, 40, 40)
    loop.run(
        [
            loop.request(0, big, 60, ignore_eos=True),
            loop.request(1, huge + huge + huge[:20], 1),
            loop.request(2, small[:5], 5, ignore_eos=True),
        ]
    )
    loop.check_texts()
    assert loop.ended[0].reason == "length"
    assert len(loop.texts[0]) == 64 - 40
    assert loop.ended[1].code == "context_length_exceeded"
    assert "100" in loop.ended[1].message and "64" in loop.ended[1].message
    assert "maximum context length" in loop.ended[1].message  # the words, beside the code, by which clients know
    assert [f.uid for f in loop.outputs[0].finished] == [1], "refused at once"
    assert len(loop.texts[2]) == 5


def test_context_is_a_limit() -> None:
    loop = ToyLoop(max_model_len=50, num_pages=64)
    prompt = prompts(1, 50, 50)[0]
    loop.run(
        [
            loop.request(0, prompt[:45], 100, ignore_eos=True),
            loop.request(1, prompt, 1),
            loop.request(2, prompt, 0),  # nothing to generate: the whole context may be prompt
            loop.request(3, [], 1),
        ]
    )
    assert (len(loop.texts[0]), loop.ended[0].reason) == (5, "length")
    assert loop.ended[1].code == "context_length_exceeded"
    assert loop.ended[2].reason == "length" and 2 not in loop.texts
    assert loop.ended[3].code == "empty_prompt"


@BOTH
def test_abort_race(overlap: bool) -> None:
    """1,000 aborts at every point of a life, also on the step of its end: pages are conserved and neighbours undisturbed."""
    rng = random.Random(1)
    loop = ToyLoop(overlap=overlap, num_pages=40, max_num_seqs=4, max_batch_tokens=12)
    loop.requests[-1] = loop.request(-1, prompts(1)[0], 10**6, ignore_eos=True)
    uid = 0
    while uid < 1000:
        group = range(uid, uid + rng.randint(1, 6))  # more than there are rows: some are aborted in the queue
        uid = group.stop
        loop.step([loop.request(i, random_prompt(rng, 1, 20), rng.randint(0, 5)) for i in group])
        due = {i: rng.randrange(8) for i in group}
        for tick in range(8):
            loop.step(aborts=[Abort(i) for i in group if due[i] == tick])
        neighbour = [loop.request(10**6 + uid, random_prompt(rng, 1, 20), 6)]
        loop.step(neighbour)
        loop.step(aborts=[Abort(i) for i in group])  # again: ignored
        while loop.scheduler.has_work:
            loop.step()
        assert set(group) <= loop.ended.keys()
    del loop.requests[-1]
    loop.check_texts()
    reasons = [loop.ended[i].reason for i in range(1000)]
    assert {"abort", "stop", "length"} == set(reasons)
    assert all(loop.ended[i].reason in ("stop", "length") for i in loop.ended if i >= 10**6)
    stats = loop.scheduler.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


@BOTH
def test_abort_on_the_step_of_the_last_token(overlap: bool) -> None:
    """Whichever comes first wins; the other is nothing. For every offset around the end."""
    prompt = prompts(1, 6, 6)[0]
    for offset in range(14):
        loop = ToyLoop(overlap=overlap)
        request = loop.request(0, prompt, 6, ignore_eos=True)
        for tick in range(20):
            loop.step([request] if tick == 0 else [], [Abort(0, FinishReason.STOP)] if tick == offset else [])
        loop.check_texts()
        finish = loop.ended[0]
        # A frontend that saw a stop string ends it with STOP; after the last token the end is LENGTH already.
        assert finish.reason == ("length" if len(loop.texts.get(0, [])) == 6 else "stop")
        assert not loop.scheduler.has_work


def test_unknown_abort_is_ignored() -> None:
    loop = ToyLoop()
    output = loop.step(aborts=[Abort(77)])
    assert not output.uids and not output.finished and not loop.scheduler.has_work


def test_abort_in_the_step_of_arrival() -> None:
    loop = ToyLoop()
    loop.step([loop.request(0, [1, 2, 3])], [Abort(0)])
    assert loop.ended[0].reason == "abort" and not loop.scheduler.has_work and not loop.batches


# ---- time, queue, phases ---------------------------------------------------------------------------------------------


@BOTH
def test_deadline_comes_from_step_input(overlap: bool) -> None:
    """A request ends by rank 0's clock as StepInput carries it: running, queued, and not a step too early."""
    loop = ToyLoop(overlap=overlap, max_num_seqs=1)
    first, second, third = prompts(3, 4, 4)
    loop.now = 1000.0
    loop.step(
        [
            loop.request(0, first, 100, ignore_eos=True, deadline=1000.2),
            loop.request(1, second, 100, deadline=1000.3),
            loop.request(2, third, 3),
        ]
    )
    loop.now = 1000.1999
    loop.step()
    assert not loop.ended
    loop.now = 1000.2
    loop.step()
    assert list(loop.ended) == [0]
    loop.now = 1000.5
    loop.run()
    loop.check_texts()
    assert [(loop.ended[uid].reason, loop.ended[uid].code) for uid in (0, 1)] == [("error", "timeout")] * 2
    assert loop.ended[2].reason in ("stop", "length")


def test_request_timeout_is_the_default_deadline() -> None:
    loop = ToyLoop(request_timeout=2.0)
    loop.now = 50.0
    loop.step(
        [
            loop.request(0, [1, 2], 190, ignore_eos=True),
            loop.request(1, [1, 3], 190, ignore_eos=True, deadline=60.0),
        ]
    )
    loop.now = 51.9
    loop.step()
    assert not loop.ended
    loop.now = 52.0
    loop.step()
    assert [(f.uid, f.code) for f in loop.ended.values()] == [(0, "timeout")]
    loop.now = 60.0
    loop.step()
    assert loop.ended[1].code == "timeout"


def test_queue_limit() -> None:
    """Those that get a row at once do not wait; beyond the rows `max_queue` may wait, the rest is refused."""
    loop = ToyLoop(max_num_seqs=2, max_queue=3)
    loop.step([loop.request(uid, [1 + uid, 2, 3], 5) for uid in range(8)])
    assert {uid: f.code for uid, f in loop.ended.items()} == dict.fromkeys((5, 6, 7), "overloaded")
    assert "may wait (--max-queue)" in loop.ended[5].message
    loop.run()
    loop.check_texts()


def test_a_place_in_the_queue_is_free_in_the_step_of_the_abort() -> None:
    """The frontend counts a request that left as gone at once, and lets another one in."""
    loop = ToyLoop(max_num_seqs=1, max_queue=2)
    loop.step([loop.request(uid, [1 + uid, 2, 3], 5) for uid in range(3)])
    loop.step([loop.request(3, [4, 2, 3], 5)], [Abort(1)])
    loop.run()
    assert {uid: f.reason for uid, f in loop.ended.items() if uid != 1}.keys() == {0, 2, 3}
    assert not [f for f in loop.ended.values() if f.reason is FinishReason.ERROR]
    loop.check_texts()


@BOTH
def test_drain_then_stop(overlap: bool) -> None:
    """DRAIN: newcomers are refused, those that run or wait go on. STOP: what is left ends at once."""
    loop = ToyLoop(overlap=overlap, max_num_seqs=1)
    long = loop.request(0, [1, 2, 3], 20, ignore_eos=True)
    queued = loop.request(1, [4, 5, 6], 5, ignore_eos=True)
    later = loop.request(2, [7, 8], 150, ignore_eos=True)
    loop.step([long, queued, later])
    loop.phase = ServicePhase.DRAIN
    loop.step([loop.request(3, [1], 5)])
    assert loop.ended[3].code == "draining"
    while 1 not in loop.ended:
        loop.step()
    assert (len(loop.texts[0]), len(loop.texts[1])) == (20, 5)
    loop.phase = ServicePhase.STOP
    loop.step()
    assert loop.ended[2].code == "shutdown" and loop.ended[2].reason == "error"
    loop.run()
    loop.check_texts()
    loop.phase = ServicePhase.RUN  # a phase only grows
    loop.step([loop.request(4, [1], 5)])
    assert loop.ended[4].code == "draining"


def test_priority_decides_the_order_only_with_its_policy() -> None:
    for schedule, expected in (("fcfs", [0, 1, 2, 3]), ("priority", [3, 1, 0, 2])):
        loop = ToyLoop(max_num_seqs=1, schedule=schedule)
        priorities = [5, 1, 5, -2]
        loop.run([loop.request(uid, [uid + 1, 2], 4, priority=p) for uid, p in enumerate(priorities)])
        assert sorted(loop.first_step, key=loop.first_step.__getitem__) == expected, schedule


# ---- what the loop asks ----------------------------------------------------------------------------------------------


def test_pure_decode_and_has_work() -> None:
    loop = ToyLoop(max_batch_tokens=8, max_num_seqs=2)
    scheduler = loop.scheduler
    assert not scheduler.has_work and not scheduler.is_pure_decode
    loop.step([loop.request(0, list(range(1, 13)), 30, ignore_eos=True)])
    assert scheduler.has_work and not scheduler.is_pure_decode  # half of its prompt is left
    loop.step()
    assert scheduler.is_pure_decode
    loop.step([loop.request(1, [1, 2, 3], 30, ignore_eos=True), loop.request(2, [1, 2], 5)])
    assert scheduler.is_pure_decode, "no row is free: who waits cannot start"
    loop.step(aborts=[Abort(0), Abort(1), Abort(2)])
    assert not scheduler.has_work and not scheduler.is_pure_decode


def test_stats_count_what_happened() -> None:
    loop = ToyLoop(page_size=4, num_pages=64)
    prompt = prompts(1, 12, 12)[0]
    loop.run([loop.request(0, prompt, 5, ignore_eos=True)])
    loop.run([loop.request(1, prompt, 7, ignore_eos=True)])
    stats = loop.scheduler.stats()
    assert stats.prompt_tokens_total == 24
    assert stats.cached_tokens_total == 8
    assert stats.generation_tokens_total == 12
    assert stats.pages_total == 64
    assert stats.pages_cached == (12 + 6) // 4
    assert stats.step == loop.step_number


def test_steps_without_apply_number_themselves() -> None:
    """Free steps (no exchange) need no apply(); the numbers go on."""
    loop = ToyLoop()
    loop.step([loop.request(0, [1, 2, 3], 5, ignore_eos=True)])
    batch = loop.scheduler.schedule()
    assert batch is not None and batch.step == 1
    loop.scheduler.commit(batch, loop.engine.launch(batch))
    assert loop.scheduler.digest.step == 1


def test_going_back_in_steps_is_refused() -> None:
    loop = ToyLoop()
    loop.step([loop.request(0, [1], 5)])
    loop.step_number = 0
    with pytest.raises(AssertionError, match="came after"):
        loop.step()


@BOTH
def test_sequences_that_outgrow_the_short_context_are_computed_anew(overlap: bool) -> None:
    """Once each, in other pages than those of short sequences, and without a change of text."""
    loop = ToyLoop(overlap=overlap, short_context=10, max_batch_tokens=32)
    texts = [[7] * length for length in (4, 4, 9, 10, 11, 4)]
    loop.run([loop.request(uid, prompt, 12 if uid < 5 else 6, ignore_eos=True) for uid, prompt in enumerate(texts)])
    loop.check_texts()
    rows = [row for batch in loop.batches for row in batch.new_rows]
    assert {(row.uid, row.rope_offset) for row in rows} == {(n, 0) for n in (0, 1, 2, 3, 5)} | {
        (n, 10) for n in range(5)
    }
    assert len(rows) == 10
    again = loop.request(6, texts[4], 2, ignore_eos=True)
    loop.run([again])
    assert loop.cached[6] == 8  # of the long ones
