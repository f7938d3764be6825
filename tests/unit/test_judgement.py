"""Who holds the others up, and who is named as dead, silent or stuck: by numbers alone."""

from __future__ import annotations

import dataclasses

import pytest

from spmd_serve.config import ControlOptions
from spmd_serve.distributed.beats import Beat
from spmd_serve.distributed.board import Peer
from spmd_serve.distributed.judgement import Evidence, Judge, holds_up
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import ControlTimeoutError, RankLostError

PEERS = [Peer(rank, 2, 0, host, 1, "") for rank, host in enumerate("ab")]
SERVING = Evidence(control=ControlOptions(step_timeout=20.0, control_timeout=30.0), silence={1: 0.1})


def beat(step: int = 7, *, busy: bool = True, waits: bool = False, age: float = 5.0) -> Beat:
    return Beat(1, step, busy, age, 0.0, "x.py:1 in f", waits)


def named(evidence: Evidence, rank: int = 0, **more: object) -> str:
    """What one of two ranks finds."""
    seen = dataclasses.replace(evidence, **more)  # type: ignore[arg-type]
    return str(Judge(RankInfo(rank, 2, rank, 2, "ab"[rank], "head", 29500), PEERS).find(seen))


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ({0: beat(waits=True), 1: beat(), 2: beat(waits=True)}, 1),
        ({0: beat(), 1: beat(waits=True)}, 0),
        ({0: beat(waits=True), 1: beat(busy=False), 2: beat(6)}, 2),
        ({0: beat(8, waits=True), 1: beat(8, waits=True), 2: beat(7, waits=True)}, 2),
    ],
)
def test_who_holds_the_others_up(beats: dict[int, Beat], expected: int) -> None:
    assert holds_up(beats) == expected


def test_nobody_is_named_while_all_is_well() -> None:
    assert named(SERVING) == named(Evidence()) == "None"
    assert named(SERVING, busy=True, step_age=19.9, beats={0: beat(waits=True), 1: beat()}) == "None"


def test_a_process_that_is_gone_needs_no_silence() -> None:
    said = "rank 1 (b) is lost: its process is gone (killed, or out of memory?)"
    assert named(SERVING, gone=PEERS[1]) == said
    assert named(SERVING, gone=PEERS[1], beats={1: beat(-1)}) == said
    assert named(SERVING, gone=PEERS[1], beats={1: beat(3)}) == said + "; last seen in step 3"


@pytest.mark.parametrize(
    ("situation", "limit_s"),
    [
        ({}, 20.0),
        ({"control": None}, 60.0),
        ({"control": None, "stopping": True}, 10.0),
        ({"stopping": True}, 10.0),
        ({"peer_error": RankLostError("x")}, 1.2),
        ({"peer_error": RankLostError("x"), "stopping": True}, 1.2),
    ],
)
def test_how_long_a_rank_or_the_store_may_be_silent(situation: dict[str, object], limit_s: float) -> None:
    late = limit_s + 0.1
    assert named(SERVING, silence={1: limit_s}, store_silence=limit_s, **situation) == "None"
    assert named(SERVING, silence={1: late}, **situation) == f"rank 1 (b) is lost: no sign of life for {late:.1f} s"
    store = f"rank 0 (a) is lost: no answer from the job's store at head:29500 (for {late:.1f} s)"
    assert named(SERVING, 1, store_silence=late, **situation).startswith(store)


def test_a_store_that_is_gone_says_nothing_about_silent_ranks() -> None:
    said = named(SERVING, 1, silence={0: 99.0}, store_error=RuntimeError("Connection reset\nand more"))
    assert said.startswith(
        "rank 0 (a) is lost: no answer from the job's store at head:29500 (Connection reset); the head"
    )


@pytest.mark.parametrize(
    ("silence", "says"),
    [
        (0.1, "rank 1 (b) hangs: step 7 for 5.0 s"),  # it sends beats, from a step that does not end
        (1.9, "rank 1 (b) is lost: no sign of life for 1.9 s"),  # stopped just after its beat had been read
        (2.5, "rank 1 (b) is lost: no sign of life for 2.5 s"),
    ],
)
def test_a_stopped_rank_is_lost_however_late_it_was_heard(silence: float, says: str) -> None:
    """A lost rank is killed by its neighbours; one that hangs ends itself, which a stopped one cannot."""
    control = ControlOptions(step_timeout=2.0, control_timeout=4.0)
    beats = {0: beat(waits=True), 1: beat()}
    said = named(SERVING, control=control, busy=True, step_age=2.05, beats=beats, silence={1: silence})
    assert said.startswith(says)


def test_nobody_is_named_before_its_beat_says_whether_it_waits() -> None:
    """Beats are a little older than the step; with the shortest --step-timeout they say nothing yet when it is over."""
    slow = dataclasses.replace(SERVING, control=ControlOptions(step_timeout=1.0), busy=True, step_age=1.1)
    assert named(slow, beats={0: beat(age=0.9), 1: beat(age=0.9)}) == "None"
    said = named(slow, beats={0: beat(age=1.1, waits=True), 1: beat(age=1.1)})
    assert said == "rank 1 (b) hangs: step 7 for 1.1 s (--step-timeout is 1) at x.py:1 in f"


def test_a_place_that_is_not_known_is_left_out() -> None:
    """After a job was suspended as a whole, the last beats are from before."""
    seen = dataclasses.replace(SERVING, busy=True, step_age=30.0, beats={0: beat(waits=True)})
    beats = {**seen.beats, 1: dataclasses.replace(beat(), where="")}
    assert named(seen, beats=beats) == "rank 1 (b) hangs: step 7 for 5.0 s (--step-timeout is 20)"


@pytest.mark.parametrize(
    ("own", "beats", "says"),
    [
        (0, {0: beat(busy=False), 1: beat()}, "rank 1 (b) hangs: step 7 for 5.0 s (--control-timeout is 4)"),
        (1, {0: beat()}, "rank 0 (a) hangs: step 7 for 5.0 s (--control-timeout is 4)"),
        (1, {0: beat(waits=True)}, "None"),  # rank 0 knows more, and says so
        (1, {0: beat(busy=False)}, "None"),
        (1, {}, "None"),
    ],
)
def test_a_rank_whose_wait_was_too_long_names_the_one_it_waited_for(
    own: int, beats: dict[int, Beat], says: str
) -> None:
    """Where --control-timeout is over before --step-timeout."""
    control = ControlOptions(step_timeout=30.0, control_timeout=4.0)
    waiting = dataclasses.replace(SERVING, control=control, step_age=4.1, beats=beats, silence={1 - own: 0.1})
    assert named(waiting, own, busy=True) == "None"
    timeout = ControlTimeoutError("rank x did not come to a collective within 4 s")
    assert named(waiting, own, peer_error=timeout).startswith(says)
