"""The scheduler: what is computed together, and steps that overlap, with a toy model whose text shows every mistake with a page (see toy_engine.py)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from toy_engine import EOS, ToyLoop, oracle, prompts, random_prompt

from spmd_serve.types import Abort, StepInput

BOTH = pytest.mark.parametrize("overlap", [False, True])


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
def test_small_requests_pass_one_that_waits_for_pages(overlap: bool) -> None:
    """Without delaying it: it gets its pages when those that run before it have ended, however many come after it."""
    loop = ToyLoop(overlap=overlap, num_pages=40, max_batch_tokens=64, max_num_seqs=16)
    rng = random.Random(5)
    loop.step([loop.request(0, random_prompt(rng, 80, 80), 40, ignore_eos=True)])
    loop.step([loop.request(1, random_prompt(rng, 90, 90), 4, ignore_eos=True)])
    assert loop.scheduler.stats().waiting == 1, "the second one fits beside the first: the test shows nothing"
    uid = 2
    while 0 not in loop.ended:
        loop.step([loop.request(uid, random_prompt(rng, 6, 6), 4, ignore_eos=True)])
        uid += 1
    end = loop.step_number
    assert sum(done >= 2 for done in loop.ended) > 25
    while 1 not in loop.first_step:
        loop.step([loop.request(uid, random_prompt(rng, 6, 6), 4, ignore_eos=True)])
        uid += 1
    assert loop.first_step[1] <= end + 3
    loop.run()
    loop.check_texts()


def test_one_that_gave_way_does_not_hold_up_small_ones() -> None:
    """Two that each want most of the pool: the newer one waits with all that it has said, which is no short prompt any more."""
    loop = ToyLoop(num_pages=40, max_batch_tokens=64, max_num_seqs=16)
    loop.step([loop.request(uid, [3 + uid, 4], 140, ignore_eos=True) for uid in range(3)])
    while loop.scheduler.stats().preempted_total < 2:
        loop.step()
    loop.step([loop.request(3, [9, 9, 9], 2, ignore_eos=True)])
    for _ in range(6):
        loop.step()
    assert 3 in loop.ended and not loop.ended.keys() & {0, 1, 2}
    loop.run()
    loop.check_texts()


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
