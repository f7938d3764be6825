"""The scheduler: prefix cache and preemption, with a toy model whose text shows every mistake with a page (see toy_engine.py)."""

from __future__ import annotations

import random

import pytest
from toy_engine import POISON, ToyLoop, prompts, random_prompt

from spmd_serve.types import StepInput, StepTokens, TokenLogprobs

BOTH = pytest.mark.parametrize("overlap", [False, True])


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


@BOTH
@pytest.mark.parametrize("later", [0, 1, 5])
def test_a_row_without_numbers_ends_alone(overlap: bool, later: int) -> None:
    """NaN after the prompt, or `later` in the answer: an error, no token, and nobody finds its pages in the cache."""
    loop = ToyLoop(overlap=overlap)
    (prompt,) = prompts(1, 12, 12)
    broken = [*prompt, POISON + later]
    fields = {"max_tokens": 10, "ignore_eos": True, "logprobs": 0}
    loop.run([loop.request(0, broken, **fields), loop.request(1, prompt, **fields), loop.request(2, broken, **fields)])
    assert {uid: (finish.reason, finish.code) for uid, finish in loop.ended.items()} == {
        0: ("error", "model_error"),
        1: ("length", ""),
        2: ("error", "model_error"),
    }
    assert "NaN" in loop.ended[0].message and "--dtype" in loop.ended[0].message
    assert len(loop.texts.get(0, [])) == later
    loop.run([loop.request(3, broken, **fields)])
    assert loop.cached.get(3, 0) == 0
    loop.run([loop.request(4, prompt, **fields)])
    loop.run([loop.request(5, prompt, **fields)])
    assert loop.cached[5] == 8  # of 12 tokens, one is always computed
    loop.check_texts()


def test_a_prompt_without_numbers_ends_before_its_log_probabilities_come_out() -> None:
    """Where no token is drawn, too."""
    loop = ToyLoop()
    scheduler, nan = loop.scheduler, TokenLogprobs(float("nan"), 1)
    scheduler.apply(StepInput(0, 0.0, (loop.request(0, [1, 2, 3], max_tokens=0, prompt_logprobs=0),)))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, StepTokens([], prompt_logprobs={0: [TokenLogprobs(-1.0, 1), nan]}))
    output = scheduler.take_output()
    assert output.prompt_logprobs == [] and [finish.code for finish in output.finished] == ["model_error"]
    scheduler.check_invariants()
