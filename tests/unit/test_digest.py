"""The rolling digest: every decision counts, and nothing else."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import pytest

from spmd_serve.scheduler.digest import SAMPLE_EVERY, RollingDigest, first_difference
from spmd_serve.types import FinishReason, NewRow, PrefillChunk, SamplingParams, ScheduledBatch, StepDigest

BATCH = ScheduledBatch(
    0,
    [0, 1],
    [PrefillChunk(2, 0, array("i", [5, 6, 7]), True)],
    [NewRow(2, 2**40 + 7, SamplingParams(4), array("i", [5, 6, 7]), 3, 3, 0)],
    [(2, 0, [9, 4])],
)


def digest_of(batch: ScheduledBatch, tokens: list[int], ended: tuple[int, FinishReason] | None = None) -> StepDigest:
    digest = RollingDigest("every-step")
    if ended:
        digest.fold_end(*ended)
    digest.fold_plan(batch)
    digest.fold_tokens(batch.step, tokens)
    return digest.latest


def test_each_decision_has_its_field() -> None:
    ours = digest_of(BATCH, [1, 2, 3])
    assert first_difference(ours, digest_of(BATCH, [1, 2, 3])) is None
    chunk, new = BATCH.chunks[0], BATCH.new_rows[0]
    for field, other in [
        ("step", replace(BATCH, step=1)),
        ("rows", replace(BATCH, decode_slots=[1, 0])),
        ("rows", replace(BATCH, decode_slots=[0])),
        ("rows", replace(BATCH, chunks=[replace(chunk, start=1)])),
        ("rows", replace(BATCH, chunks=[replace(chunk, tokens=array("i", [5, 6]))])),
        ("rows", replace(BATCH, chunks=[replace(chunk, samples=False)])),
        ("rows", replace(BATCH, new_rows=[replace(new, uid=7)])),
        ("rows", replace(BATCH, new_rows=[replace(new, num_cached=2)])),
        ("pages", replace(BATCH, page_writes=[(2, 0, [9, 5])])),
        ("pages", replace(BATCH, page_writes=[(2, 1, [9, 4])])),
        ("pages", replace(BATCH, page_writes=[])),
    ]:
        assert first_difference(ours, digest_of(other, [1, 2, 3])) == field
    assert first_difference(ours, digest_of(BATCH, [1, 2, 4])) == "tokens"
    assert first_difference(ours, digest_of(BATCH, [1, 2, 3], (5, FinishReason.ERROR))) == "rows"
    assert digest_of(BATCH, [1], (5, FinishReason.STOP)) != digest_of(BATCH, [1], (5, FinishReason.ABORT))


def test_a_difference_stays() -> None:
    """It rolls: what differed once differs for ever."""
    digests = [RollingDigest("every-step"), RollingDigest("every-step")]
    for step in range(50):
        for i, digest in enumerate(digests):
            digest.fold_plan(replace(BATCH, step=step))
            digest.fold_tokens(step, [1, 2, 3 + (i and step == 3)])
        assert (first_difference(digests[0].latest, digests[1].latest) == "tokens") == (step >= 3)


def test_overlapping_steps_are_whole() -> None:
    """A step's digest does not depend on whether the next one was planned before its tokens came."""
    plain, overlapping = RollingDigest("every-step"), RollingDigest("every-step")
    for step in range(5):
        plain.fold_plan(replace(BATCH, step=step))
        plain.fold_tokens(step, [step])
        overlapping.fold_plan(replace(BATCH, step=step))
        if step:
            overlapping.fold_tokens(step - 1, [step - 1])
    assert overlapping.latest.step == 3
    overlapping.fold_tokens(4, [4])
    assert overlapping.latest == plain.latest


def test_sampled_and_off() -> None:
    sampled, off = RollingDigest("sampled"), RollingDigest("off")
    seen = set()
    for step in range(4 * SAMPLE_EVERY):
        for digest in (sampled, off):
            digest.fold_plan(replace(BATCH, step=step))
            digest.fold_tokens(step, [step])
        seen.add(sampled.latest.step)
    assert sorted(seen) == [0, SAMPLE_EVERY, 2 * SAMPLE_EVERY, 3 * SAMPLE_EVERY]
    assert off.latest == StepDigest(-1, 0, 0, 0)
    with pytest.raises(KeyError):
        RollingDigest("sometimes")


def test_cost() -> None:
    """Under 20 us a step at 256 sequences, with room for a busy machine: the fastest of many."""
    digest = RollingDigest("every-step")
    batch = ScheduledBatch(0, list(range(256)), page_writes=[(slot, 3, [slot]) for slot in range(0, 256, 16)])
    tokens = list(range(1000, 1256))
    best = float("inf")
    for step in range(300):
        batch = replace(batch, step=step)
        begin = time.perf_counter()
        digest.fold_plan(batch)
        digest.fold_tokens(step, tokens)
        best = min(best, time.perf_counter() - begin)
    assert best < 20e-6
