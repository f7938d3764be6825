"""The sockets between step loop and frontends: both transports, several frontends, waking, failing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from spmd_serve.errors import FrontendError
from spmd_serve.frontend.link import INTAKE, UID_SHIFT, CoreLink, FrontLink, LinkAddress, ToFrontend, split_output
from spmd_serve.types import (
    Abort,
    Finish,
    FinishReason,
    Request,
    SamplingParams,
    ServiceState,
    StepOutput,
    StepStats,
    TokenLogprobs,
)

REQUEST = Request(
    7,
    b"\x01\0\0\0",
    SamplingParams(5, stop_token_ids=(1, 2), logit_bias=((3, 0.5),), grammar="g", logprobs=0),
    deadline=1.5,
    priority=-1,
    cache_salt="salt",
)
STATS = StepStats(step=1, running=2, pages_total=5, step_time=0.5, rank_exchange_times=(0.25, 0.125))
OUTPUT = StepOutput(
    4,
    [7, (1 << UID_SHIFT) + 1, 8],
    [11, 12, 13],
    [(7, 3), ((1 << UID_SHIFT) + 1, 0)],
    {0: TokenLogprobs(-0.5, 1, [1], [-0.5]), 2: TokenLogprobs(-1.0, 2)},
    [(8, 1, [TokenLogprobs(-2.0, 3)])],
    [Finish(8, FinishReason.LENGTH), Finish((1 << UID_SHIFT) + 1, FinishReason.ERROR, "message", "code")],
    STATS,
)


@contextmanager
def linked(transport: str, folder: Path, frontends: int = 1) -> Iterator[tuple[CoreLink, list[FrontLink]]]:
    address = LinkAddress(
        f"{transport}://{folder}/inbox", tuple(f"{transport}://{folder}/outbox{i}" for i in range(frontends))
    )
    with zmq.Context() as context:
        core = CoreLink(address, context)
        fronts = [FrontLink(address, i, context) for i in range(frontends)]
        for front in fronts:
            front.hello()
        core.await_frontends(5, lambda: None)
        try:
            yield core, fronts
        finally:
            for front in fronts:
                front.close()
            core.close()


def receive(front: FrontLink) -> ToFrontend:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if messages := front.receive(1):
            return messages[0]
        time.sleep(0.001)
    raise AssertionError("nothing came")


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_everything_arrives_as_it_was_sent(transport: str, tmp_path: Path) -> None:
    with linked(transport, tmp_path) as (core, (front,)):
        front.send([REQUEST], [Abort(3, FinishReason.STOP)])
        front.send([], [Abort(4)])
        requests: list[Request] = []
        aborts: list[Abort] = []
        while len(aborts) < 2:
            assert core.wait(5)
            new = core.drain()
            requests += new[0]
            aborts += new[1]
        assert requests == [REQUEST]
        assert aborts == [Abort(3, FinishReason.STOP), Abort(4)]
        core.publish(OUTPUT)
        assert receive(front).output == OUTPUT
        core.set_state(ServiceState.DRAINING, "why")
        message = receive(front)
        assert (message.state, message.reason) == (ServiceState.DRAINING, "why")


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_many_large_requests_come_in_parts(transport: str, tmp_path: Path) -> None:
    """A step takes in what it is given, on all ranks: 75 MB of prompts would keep the streams waiting for seconds."""
    prompt = bytes(INTAKE // 8)
    requests = [replace(REQUEST, uid=uid, prompt=prompt) for uid in range(40)]
    with linked(transport, tmp_path) as (core, (front,)):
        front.send(requests, [Abort(39)])
        came: list[Request] = []
        aborts: list[Abort] = []
        while not aborts:
            assert core.wait(5)
            some, aborts = core.drain()
            assert len(some) <= 8
            came += some
        assert came == requests
        assert aborts == [Abort(39)]


def test_outputs_go_to_the_frontend_of_their_uid(tmp_path: Path) -> None:
    with linked("ipc", tmp_path, frontends=2) as (core, fronts):
        core.publish(OUTPUT)
        mine, others = receive(fronts[0]).output, receive(fronts[1]).output
        assert [mine, others] == split_output(OUTPUT, 2)
        assert mine is not None and others is not None
        assert (mine.uids, mine.tokens) == ([7, 8], [11, 13])
        assert mine.logprobs == {0: OUTPUT.logprobs[0], 1: OUTPUT.logprobs[2]}
        assert mine.prompt_logprobs == OUTPUT.prompt_logprobs
        assert (others.uids, others.tokens, others.logprobs) == ([(1 << UID_SHIFT) + 1], [12], {})
        assert [f.uid for f in others.finished] == [(1 << UID_SHIFT) + 1]
        assert mine.stats == others.stats == STATS
        core.set_state(ServiceState.READY)
        assert all(receive(front).state == ServiceState.READY for front in fronts)


def test_wait_ends_by_message_wake_or_time(tmp_path: Path) -> None:
    with linked("inproc", tmp_path) as (core, (front,)):
        began = time.monotonic()
        assert not core.wait(0.05)
        assert 0.04 < time.monotonic() - began < 2
        core.wake()
        core.wake()
        assert core.wait(5)
        assert not core.wait(0)
        threading.Timer(0.05, core.wake).start()
        assert core.wait(5)
        front.send([], [])
        assert core.wait(5)
        for _ in range(100_000):
            core.wake()  # more than a pipe holds: never blocks
        assert core.wait(5)


def test_states_from_other_threads_do_not_disturb_outputs(tmp_path: Path) -> None:
    with linked("inproc", tmp_path) as (core, (front,)):
        threads = [
            threading.Thread(target=lambda: [core.set_state(ServiceState.READY) for _ in range(200)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for step in range(500):
            core.publish(StepOutput(step))
        for thread in threads:
            thread.join()
        steps, states = [], 0
        while len(steps) < 500 or states < 800:
            message = receive(front)
            if message.output is not None:
                steps.append(message.output.step)
            else:
                states += 1
        assert steps == list(range(500))


def test_a_frontend_that_takes_nothing_is_an_error_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmd_serve.frontend.link.OUTBOX_LIMIT", 5)
    with linked("inproc", tmp_path) as (core, _):
        for step in range(20):
            core.publish(StepOutput(step))
        with pytest.raises(FrontendError, match="does not take"):
            core.drain()


def test_a_dead_frontend_wakes_and_fails_the_core(tmp_path: Path) -> None:
    with linked("inproc", tmp_path) as (core, _):
        threading.Timer(0.02, core.fail, ["it is gone"]).start()
        assert core.wait(5)
        with pytest.raises(FrontendError, match="it is gone"):
            core.drain()


def test_a_frontend_that_never_comes(tmp_path: Path) -> None:
    with zmq.Context() as context:
        core = CoreLink(LinkAddress("inproc://a", ("inproc://b",)), context)
        with pytest.raises(FrontendError, match="did not start"):
            core.await_frontends(0.1, lambda: None)
        core.close()
        core.close()
        core.wake()
        core.publish(OUTPUT)
