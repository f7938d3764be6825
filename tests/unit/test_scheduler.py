"""The scheduler, case by case, with a toy model whose text shows every mistake with a page (see toy_engine.py)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from toy_engine import EOS, VOCAB, ToyLoop, oracle, random_prompt

from spmd_serve.types import Abort, FinishReason, ServicePhase, StepInput

BOTH = pytest.mark.parametrize("overlap", [False, True])


def prompts(count: int, low: int = 1, high: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, low, high) for _ in range(count)]


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
    assert len(loop.texts[0]) == 64 + 1 - 40  # the last token needs no memory
    assert loop.ended[1].code == "context_length"
    assert "100" in loop.ended[1].message and "64" in loop.ended[1].message
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
    assert loop.ended[1].code == "context_length"
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
    assert not output and not loop.scheduler.has_work


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


# ---- prefill and fairness --------------------------------------------------------------------------------------------


@BOTH
def test_head_of_line(overlap: bool) -> None:
    """A 4,000-token prompt, then one of 10: the short one's first token comes while the long one is still at its start."""
    loop = ToyLoop(overlap=overlap, page_size=16, num_pages=600, max_model_len=8192, max_batch_tokens=512, check=False)
    rng = random.Random(2)
    loop.step([loop.request(0, random_prompt(rng, 4000, 4000), 2, ignore_eos=True)])
    loop.step([loop.request(1, random_prompt(rng, 10, 10), 2, ignore_eos=True)])
    loop.run()
    loop.check_texts()
    assert loop.first_step[1] <= 2
    assert loop.first_step[0] - loop.first_step[1] >= 5


def test_several_long_prompts_progress_together_and_waste_nothing() -> None:
    loop = ToyLoop(page_size=4, num_pages=400, max_model_len=1000, max_batch_tokens=64, max_num_seqs=16)
    rng = random.Random(3)
    longs = [loop.request(uid, random_prompt(rng, 300 - uid, 300 - uid), 1) for uid in range(6)]
    loop.step(longs)
    assert [len(chunk.tokens) for chunk in loop.batches[0].chunks] == [48, 16]
    loop.step([loop.request(8, random_prompt(rng, 14, 14), 1), loop.request(9, random_prompt(rng, 5, 5), 1)])
    assert 9 in loop.first_step, "a short prompt waits for no long one, however many there are"
    loop.step()
    assert 8 in loop.first_step
    loop.run()
    full = [batch.num_tokens for batch in loop.batches[:-1]]
    assert full == [64] * len(full), "a step has room while prompts wait"
    assert loop.first_step[0] == -(-300 // 48) - 1, "the oldest has its share in every step"


def test_short_prompts_do_not_starve_a_long_one() -> None:
    """Short prompts without end take their part of each step and no more."""
    loop = ToyLoop(num_pages=400, max_model_len=1000, max_batch_tokens=32, max_num_seqs=16)
    rng = random.Random(9)
    loop.step([loop.request(0, random_prompt(rng, 200, 200), 1), loop.request(1, random_prompt(rng, 200, 200), 1)])
    for tick in range(30):
        loop.step([loop.request(10 + 2 * tick + i, random_prompt(rng, 6, 6), 1) for i in range(2)])
    assert loop.first_step[0] <= 9 and loop.first_step[1] <= 20
    assert sum(uid >= 10 for uid in loop.first_step) >= 20
    loop.run()
    loop.check_texts()


def test_a_full_share_serves_one_prompt_after_the_other() -> None:
    loop = ToyLoop(page_size=4, num_pages=400, max_model_len=1000, max_batch_tokens=32, prefill_share=1.0)
    loop.run([loop.request(uid, prompt, 1) for uid, prompt in enumerate(prompts(3, 100, 100))])
    assert all(len(batch.chunks) <= 2 for batch in loop.batches)
    assert loop.first_step[0] < loop.first_step[1] < loop.first_step[2]


def test_short_prompts_are_never_cut_for_fairness() -> None:
    """Prompts within the part that is kept for others take what they need: four of 16 tokens fill a step of 64."""
    loop = ToyLoop(max_batch_tokens=64, num_pages=100)
    loop.step([loop.request(uid, prompt, 1) for uid, prompt in enumerate(prompts(6, 16, 16))])
    assert [len(chunk.tokens) for chunk in loop.batches[0].chunks] == [16] * 4


@BOTH
def test_decodes_go_on_beside_prefill(overlap: bool) -> None:
    """A decode produces one token in every step, whatever is prefilled beside it."""
    loop = ToyLoop(overlap=overlap, num_pages=300, max_batch_tokens=8, max_model_len=500)
    loop.step([loop.request(0, [1, 2], 40, ignore_eos=True)])
    loop.step([loop.request(1, random_prompt(random.Random(4), 150, 150), 2)])
    for _ in range(15):
        loop.step()
    assert len(loop.texts[0]) == 17 - overlap
    loop.run()
    loop.check_texts()


def test_decode_slots_are_one_object_while_nothing_changes() -> None:
    """The engine may skip uploads when the list is the same; the lowest free row is taken."""
    loop = ToyLoop(max_num_seqs=8, page_size=4)
    loop.step([loop.request(uid, [uid + 1], 30, ignore_eos=True) for uid in range(4)])
    for _ in range(6):
        loop.step()
    decodes = [batch.decode_slots for batch in loop.batches[1:]]
    assert decodes[0] == [0, 1, 2, 3]
    assert all(a is b for a, b in pairwise(decodes))
    loop.step(aborts=[Abort(1)])
    assert loop.batches[-1].decode_slots == [0, 2, 3]
    loop.step([loop.request(9, [9], 5, ignore_eos=True)])
    assert [new.slot for new in loop.batches[-1].new_rows] == [1]
    loop.step()
    assert loop.batches[-1].decode_slots == [0, 2, 3, 1]


def test_more_rows_than_tokens_in_a_step() -> None:
    """Rows are limited by the token budget, so that every decode is in every step."""
    loop = ToyLoop(max_num_seqs=8, max_batch_tokens=3)
    loop.run([loop.request(uid, prompt, 20, ignore_eos=True) for uid, prompt in enumerate(prompts(10))])
    loop.check_texts()
    assert max(len(batch.decode_slots) for batch in loop.batches) == 3


# ---- prefix cache ----------------------------------------------------------------------------------------------------


@BOTH
def test_full_hit(overlap: bool) -> None:
    """The same prompt of exactly k pages twice: all but the last page is found, one page is computed, the text is equal."""
    loop = ToyLoop(overlap=overlap, page_size=4)
    prompt = prompts(1, 16, 16)[0]
    loop.run([loop.request(0, prompt, 10, ignore_eos=True)])
    computed = loop.engine.computed_tokens
    loop.run([loop.request(1, prompt, 10, ignore_eos=True)])
    loop.check_texts()
    assert loop.texts[0] == loop.texts[1]
    assert (loop.cached[0], loop.cached[1]) == (0, 12)
    assert loop.engine.computed_tokens - computed == 4 + 9


@BOTH
def test_next_turn_of_a_chat_finds_prompt_and_answer(overlap: bool) -> None:
    loop = ToyLoop(overlap=overlap, page_size=4)
    prompt = prompts(1, 10, 10)[0]
    loop.run([loop.request(0, prompt, 9, ignore_eos=True)])
    turn = prompt + loop.texts[0] + [1, 2, 3]
    loop.run([loop.request(1, turn, 4)])
    loop.check_texts()
    assert loop.cached[1] == 16  # 18 positions were computed: the 19th token's KV never was


@BOTH
@pytest.mark.parametrize("page_size", [1, 4])
def test_duplicate_prefix(overlap: bool, page_size: int) -> None:
    """Equal prompts in flight at once, then ends, eviction and decoding on: the text is that without a cache."""
    rng = random.Random(5)
    shared = random_prompt(rng, 24, 24)
    texts = {}
    for prefix_cache in (True, False):
        loop = ToyLoop(
            overlap=overlap,
            page_size=page_size,
            num_pages=120 // page_size,
            max_batch_tokens=40,
            prefix_cache=prefix_cache,
        )
        same = [loop.request(uid, shared, 25, ignore_eos=True) for uid in range(2)]
        near = [loop.request(2 + uid, shared[: 20 + uid], 4 + uid) for uid in range(3)]
        loop.run([*same, *near])
        # Evict by unrelated prompts while a third copy decodes.
        loop.step([loop.request(10, shared, 40, ignore_eos=True)])
        other = random.Random(6)
        for uid in range(20, 26):
            loop.step([loop.request(uid, random_prompt(other, 20, 40), 6)])
        loop.run()
        loop.check_texts()
        texts[prefix_cache] = loop.texts
        if prefix_cache:
            assert loop.cached[10] > 0
            twice = [w for b in loop.batches for w in b.page_writes if len(w[2]) == 1 and w[1] < 20 // page_size]
            assert twice, "no page was deduplicated: the test shows nothing"
        else:
            assert set(loop.cached.values()) == {0}
    assert texts[True] == texts[False]


def test_equal_prompts_in_flight_end_up_in_the_same_pages() -> None:
    loop = ToyLoop(page_size=4, num_pages=64, max_batch_tokens=64)
    prompt = prompts(1, 21, 21)[0]
    loop.step([loop.request(uid, prompt, 20, ignore_eos=True) for uid in range(3)])
    loop.step()
    tables = [loop.engine.tables[slot] for slot in range(3)]
    assert tables[0][:5] == tables[1][:5] == tables[2][:5]
    assert len({table[5] for table in tables}) == 3
    stats = loop.scheduler.stats()
    assert stats.pages_total - stats.pages_free - stats.pages_cached == 5 + 3
    loop.run()
    loop.check_texts()


def test_salt_separates() -> None:
    """Requests with different salts share no page (the toy model's text depends on the salt)."""
    loop = ToyLoop(page_size=4)
    prompt = prompts(1, 13, 13)[0]
    for uid, salt in enumerate(["", "a", "b", "a"]):
        loop.run([loop.request(uid, prompt, 8, cache_salt=salt)])
    loop.check_texts()
    assert loop.cached == {0: 0, 1: 0, 2: 0, 3: 12}


@BOTH
def test_prompt_logprobs_reuse_nothing(overlap: bool) -> None:
    """Case "logprobs + prefix hit": sent twice, one value for each prompt token both times; nothing came from the cache."""
    loop = ToyLoop(overlap=overlap, max_batch_tokens=6)
    prompt = prompts(1, 17, 17)[0]
    for uid in range(3):
        loop.run([loop.request(uid, prompt, 3 * (uid % 2), prompt_logprobs=1, logprobs=0)])
        assert loop.prompt_logprobs[uid] == [(position, prompt[position]) for position in range(1, 17)]
    assert set(loop.cached.values()) == {0}
    rows = [(output.uids, sorted(output.logprobs)) for output in loop.outputs if output.uids]
    assert rows and all(sorted(range(len(uids))) == indexes for uids, indexes in rows)


def test_logprobs_belong_to_their_rows() -> None:
    """With rows that are dropped (overlap) and rows that did not ask, the index points to the right token."""
    loop = ToyLoop(overlap=True, max_num_seqs=8, max_batch_tokens=20)
    loop.run(
        [
            loop.request(uid, prompt, 2 + uid % 5, logprobs=0 if uid % 2 else None)
            for uid, prompt in enumerate(prompts(20))
        ]
    )
    loop.check_texts()
    asked = 0
    for output in loop.outputs:
        assert sorted(output.logprobs) == [i for i, uid in enumerate(output.uids) if uid % 2]
        for i, entry in output.logprobs.items():
            assert entry.rank == output.tokens[i]  # the toy engine puts the token there
            asked += 1
    assert asked == sum(len(text) for uid, text in loop.texts.items() if uid % 2)


# ---- preemption ------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_preemption_changes_no_text(overlap: bool, prefix_cache: bool, page_size: int) -> None:
    """A pool that holds two of six sequences: each token comes once and each text is that of a large pool."""
    loop = ToyLoop(
        overlap=overlap, prefix_cache=prefix_cache, page_size=page_size, num_pages=64 // page_size, max_batch_tokens=32
    )
    texts = prompts(6, 3, 12)
    loop.run([loop.request(uid, prompt, 30, ignore_eos=True) for uid, prompt in enumerate(texts)])
    loop.check_texts()
    assert loop.scheduler.stats().preempted_total > 0
    assert loop.scheduler.stats().generation_tokens_total == 6 * 30
    assert loop.scheduler.stats().prompt_tokens_total == sum(map(len, texts)), "a prompt counts once"


@BOTH
def test_newest_gives_way_and_oldest_never(overlap: bool) -> None:
    """The oldest produces a token in every step from its first to its last; ends come in the order of arrival."""
    loop = ToyLoop(overlap=overlap, page_size=2, num_pages=30, max_batch_tokens=40)
    loop.run([loop.request(uid, prompt, 40, ignore_eos=True) for uid, prompt in enumerate(prompts(5, 6, 6))])
    assert loop.scheduler.stats().preempted_total > 0
    steps = [output.step for output in loop.outputs if 0 in output.uids]
    assert steps == list(range(steps[0], steps[0] + 40))
    assert list(loop.ended) == [0, 1, 2, 3, 4]


def test_lowest_priority_gives_way_first() -> None:
    loop = ToyLoop(page_size=2, num_pages=30, max_batch_tokens=40, schedule="priority")
    loop.run(
        [loop.request(uid, prompt, 40, ignore_eos=True, priority=-uid) for uid, prompt in enumerate(prompts(4, 6, 6))]
    )
    loop.check_texts()
    assert loop.scheduler.stats().preempted_total > 0
    assert list(loop.ended) == [3, 2, 1, 0]


def test_a_blocked_prompt_tries_again_when_the_cache_has_grown() -> None:
    """It has no room while its beginning is computed by another one, and fits once that is cached."""
    loop = ToyLoop(page_size=4, num_pages=30, max_batch_tokens=48, max_model_len=121)
    shared = prompts(1, 60, 60)[0]
    loop.step([loop.request(0, [*shared, 1], 50, ignore_eos=True), loop.request(1, [*shared, 2], 5, ignore_eos=True)])
    loop.run()
    loop.check_texts()
    assert loop.first_step[1] < 4 and loop.cached[1] > 40
    assert list(loop.ended) == [1, 0]


def test_preempted_sequence_finds_its_own_pages() -> None:
    """Recompute costs little while its pages are still cached: the first victim's come back after the other's end."""
    loop = ToyLoop(page_size=4, num_pages=16, max_batch_tokens=64)
    first, second = prompts(2, 20, 20)
    loop.run([loop.request(0, first, 22, ignore_eos=True), loop.request(1, second, 30, ignore_eos=True)])
    loop.check_texts()
    assert loop.scheduler.stats().preempted_total == 1
    resumed = [new for batch in loop.batches for new in batch.new_rows if new.uid == 1][1]
    assert resumed.num_cached > 0 and resumed.num_tokens > 20 and resumed.num_prompt == 20


def test_cached_tokens_are_those_of_the_first_prefill() -> None:
    """Preempted before its first token, it finds pages of its own; they are no saving that its client should see."""
    loop = ToyLoop(page_size=2, num_pages=30, max_batch_tokens=2)
    first, second = prompts(2, 40, 40)
    loop.run([loop.request(0, first[:4], 50, ignore_eos=True), loop.request(1, second, 5, ignore_eos=True)])
    loop.check_texts()
    rows = [new for batch in loop.batches for new in batch.new_rows if new.uid == 1]
    assert len(rows) == 2 and rows[1].num_cached > 0 and rows[1].num_tokens == 40
    assert loop.cached[1] == 0


@BOTH
def test_preempted_prompt_logprobs_come_once(overlap: bool) -> None:
    loop = ToyLoop(overlap=overlap, page_size=2, num_pages=24, max_batch_tokens=7)
    texts = prompts(4, 12, 12)
    loop.run(
        [
            loop.request(uid, prompt, 25, ignore_eos=True, prompt_logprobs=0 if uid else None)
            for uid, prompt in enumerate(texts)
        ]
    )
    loop.check_texts()
    again = [n.uid for batch in loop.batches for n in batch.new_rows]
    assert len(again) > 4, "nobody was preempted: the test shows nothing"
    for uid in (1, 2, 3):  # ToyLoop checks that positions are consecutive over steps
        assert loop.prompt_logprobs[uid] == [(position, texts[uid][position]) for position in range(1, 12)]


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_overlap_plans_ahead_and_stops_at_the_limit() -> None:
    """A step is planned before the last one's tokens are known, but no row goes beyond its max_tokens."""
    loop = ToyLoop(overlap=True)
    loop.run([loop.request(0, [1, 2, 3], 5, ignore_eos=True)])
    loop.check_texts()
    assert loop.engine.computed_tokens == 3 + 4
    assert len(loop.batches) == 5
    assert loop.step_number <= 7, "a row waited for its commit"


def test_overlap_drops_the_token_behind_an_eos() -> None:
    rng = random.Random(8)
    loop = ToyLoop(overlap=True)
    requests = []
    while len(requests) < 20:
        request = loop.request(len(requests), random_prompt(rng, 1, 9), 60)
        if oracle(request, loop.max_length)[1] == "stop":
            requests.append(request)
    loop.run(requests)
    loop.check_texts()
    assert all(loop.texts[uid][-1] == EOS for uid in loop.texts)


def test_grammar_rows_wait_for_their_commit() -> None:
    """ToyLoop checks that such a row is never in flight twice; its neighbours are not held up."""
    loop = ToyLoop(overlap=True)
    loop.step(
        [
            loop.request(0, [1, 2, 3], 20, ignore_eos=True, grammar="g"),
            loop.request(1, [4, 5, 6], 20, ignore_eos=True),
        ]
    )
    for _ in range(11):
        loop.step()
    assert (len(loop.texts[0]), len(loop.texts[1])) == (6, 11)
    loop.run()
    loop.check_texts()


def test_overlap_commits_must_not_lag() -> None:
    loop = ToyLoop(overlap=False)
    loop.scheduler.apply(StepInput(0, 0.0, (loop.request(0, [1, 2], 5),)))
    assert loop.scheduler.schedule() is not None
    with pytest.raises(AssertionError, match="before the commit"):
        loop.scheduler.schedule()


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
