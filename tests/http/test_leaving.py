"""Clients that leave, states of the service, failures: every request ends exactly once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from support.fake_service import CONTEXT, MODEL, FakeService, fake_info
from support.server import wait_until

from spmd_serve.config import Config, ControlOptions, SchedulerOptions
from spmd_serve.frontend.streaming import EventStream
from spmd_serve.types import Finish, FinishReason, Lengths, ServiceState, StepOutput

LONG = {"model": MODEL, "prompt": "again ", "max_tokens": 8000, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "again"}], "ignore_eos": True}
Start = Callable[..., FakeService]


def outcome(service: FakeService, name: str) -> float:
    return service.metric(f'spmd_serve_requests_total{{outcome="{name}"}}')


def is_idle(service: FakeService) -> bool:
    return (
        service.core.busy == 0
        and service.metric("spmd_serve_requests_running") == 0
        and service.metric("spmd_serve_requests_waiting") == 0
    )


# ---- clients that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [LONG, CHAT])
def test_a_stream_left_after_one_chunk_is_aborted_within_a_second(start: Start, body: dict[str, Any]) -> None:
    service = start(step_interval=0.005)
    path = "/v1/completions" if body is LONG else "/v1/chat/completions"
    with service.http.stream("POST", path, json=body | {"stream": True}) as response:
        pieces = response.iter_raw()  # kept: dropping it would close the connection
        next(pieces)
        assert service.core.busy == 1
    wait_until("the request is aborted", lambda: is_idle(service), 1)
    assert [reason for _, reason in service.core.aborted] == [FinishReason.ABORT]
    assert outcome(service, "abort") == 1


def test_a_body_left_incomplete_counts_as_no_bad_request(start: Start) -> None:
    service = start()
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert service.http.get("/health").status_code == 200  # the head has been read
    name = 'spmd_serve_http_responses_total{status="%d"}'
    wait_until("it is counted", lambda: name % 499 in service.http.get("/metrics").text, 5)
    assert name % 400 not in service.http.get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("queued", [True, False])
def test_requests_left_while_running_or_queued(start: Start, stream: bool, queued: bool) -> None:
    """Six choices, of which two run, or none because the engine stands still."""
    service = start(step_interval=0.005, max_running=2)
    if queued:
        service.core.paused.set()

    async def run() -> None:
        async with httpx.AsyncClient() as client:
            body = LONG | {"stream": stream, "n": 6}
            task = asyncio.create_task(client.post(f"{service.url}/v1/completions", json=body))
            while service.core.busy < 6:
                await asyncio.sleep(0.005)
            task.cancel()

    asyncio.run(run())
    wait_until("all are aborted", lambda: service.core.busy == 0, 1)
    service.core.paused.clear()
    wait_until("the gauges are zero", lambda: is_idle(service), 1)
    assert outcome(service, "abort") == 6 == len(service.core.aborted)


def test_many_aborts_are_counted_exactly_and_disturb_nobody(start: Start) -> None:
    service = start(step_interval=0.001, max_running=32)

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:

            async def leave(i: int) -> None:
                request = client.build_request(
                    "POST", f"{service.url}/v1/completions", json=LONG | {"stream": i % 2 == 0}
                )
                task = asyncio.create_task(client.send(request, stream=True))
                while len(service.core.seen) < 120:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(i * 0.002)
                if task.done():
                    await task.result().aclose()
                else:
                    task.cancel()

            async def stay(i: int) -> None:
                body = {"model": MODEL, "prompt": f"I stay {i}", "max_tokens": 100}
                answer = await client.post(f"{service.url}/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == f"I stay {i}"

            await asyncio.gather(*(leave(i) for i in range(100)), *(stay(i) for i in range(20)))

    asyncio.run(run())
    wait_until("all is idle", lambda: is_idle(service), 2)
    assert outcome(service, "abort") == 100
    assert outcome(service, "stop") == 20
    assert len(service.core.aborted) == 100


def test_leaving_on_the_very_last_step(start: Start) -> None:
    """The end and the client's leaving race; each request is counted once and nothing is left."""
    service = start(max_running=64)
    count = 200

    async def run() -> None:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=30) as client:

            async def one(i: int) -> None:
                body = {"prompt": "a b c", "max_tokens": 50, "stream": True}
                async with client.stream("POST", f"{service.url}/v1/completions", json=body) as response:
                    async for piece in response.aiter_raw():
                        if i % 3 == 0 or b"finish_reason" in piece:
                            return

            await asyncio.gather(*(one(i) for i in range(count)))

    asyncio.run(run())
    wait_until("all is idle", lambda: is_idle(service), 2)
    assert outcome(service, "abort") + outcome(service, "stop") == count


# ---- states -------------------------------------------------------------------------------------------------------


def post(service: FakeService, **fields: Any) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 3} | fields
    return service.http.post("/v1/completions", json=body, timeout=10)


def test_starting_draining_failed(start: Start) -> None:
    service = start(ready=False, step_interval=0.002)
    link = service.frontend.link

    def health() -> tuple[int, str]:
        response = service.http.get("/health")
        return response.status_code, response.json()["reason"]

    assert health()[0] == 503
    response = post(service)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert "loading" in response.json()["error"]["message"]
    link.set_state(ServiceState.READY)
    wait_until("it is ready", lambda: health()[0] == 200, 2)
    assert post(service).status_code == 200
    with service.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 200}) as running:
        pieces = running.iter_raw()
        next(pieces)
        link.set_state(ServiceState.DRAINING)
        wait_until("it drains", lambda: health()[0] == 503, 2)
        response = post(service)
        assert response.status_code == 503 and "retry-after" in response.headers
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")  # what runs ends as it would have
    link.set_state(ServiceState.FAILED, "rank 1 is gone")
    wait_until("it says why", lambda: health() == (503, "rank 1 is gone"), 2)
    link.set_state(ServiceState.READY)
    assert health()[0] == 503  # a state never goes back


def test_failure_ends_every_open_request_with_an_error(start: Start) -> None:
    service = start(step_interval=0.005, max_running=3)
    results: dict[str, Any] = {}

    def whole() -> None:
        results["whole"] = service.http.post("/v1/completions", json=LONG, timeout=10)

    def stream() -> None:
        try:
            for _ in service.client.completions.create(**_client_fields(LONG), stream=True):
                results["began"] = True
        except openai.APIError as error:
            results["stream"] = error

    def queued() -> None:
        results["queued"] = service.http.post("/v1/completions", json=LONG | {"stream": True, "n": 4}, timeout=10)

    threads = [threading.Thread(target=f) for f in (stream, whole, queued)]
    threads[0].start()
    wait_until("the stream runs", lambda: "began" in results, 5)
    for thread in threads[1:]:
        thread.start()
    wait_until("all have come", lambda: service.core.busy == 6, 5)
    service.frontend.link.set_state(ServiceState.FAILED, "rank 1 (host b) does not answer")
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert results["whole"].status_code == 503
    assert "rank 1 (host b)" in results["whole"].json()["error"]["message"]
    assert "rank 1 (host b)" in str(results["stream"])
    assert "rank 1 (host b)" in results["queued"].text


def _client_fields(body: dict[str, Any]) -> dict[str, Any]:
    known = {k: v for k, v in body.items() if k != "ignore_eos"}
    return known | {"extra_body": {"ignore_eos": True}}


def test_a_request_past_its_time(start: Start) -> None:
    service = start(step_interval=0.005)
    assert post(service, **LONG | {"timeout": 0.1}).status_code == 504
    service.core.paused.set()
    results = []
    thread = threading.Thread(target=lambda: results.append(post(service, **LONG | {"timeout": 0.1, "stream": True})))
    thread.start()
    wait_until("its time is up", lambda: bool(service.core.seen[1:]) and service.core.busy == 0, 5)
    service.core.paused.clear()
    thread.join()
    assert results[0].status_code == 504  # nothing was sent yet, so that it has a status of its own
    assert results[0].json()["error"]["code"] == "timeout"
    text = post(service, **LONG | {"timeout": 0.2, "stream": True}).text
    assert '"code":"timeout"' in text and text.endswith("data: [DONE]\n\n")
    assert outcome(service, "error") == 3


def test_a_full_queue(start: Start) -> None:
    service = start(Config(scheduler=SchedulerOptions(max_num_seqs=2, max_queue=3)), step_interval=0.01, max_running=2)
    assert post(service, n=6).status_code == 400  # can never be taken
    with service.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 4}) as response:
        pieces = response.iter_raw()
        next(pieces)
        refused = post(service, n=2)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "overloaded"
    wait_until("idle", lambda: is_idle(service), 2)
    assert post(service, n=5).status_code == 200


@pytest.mark.parametrize(("code", "status"), [("overloaded", 503), ("context_length_exceeded", 400)])
def test_what_the_scheduler_refuses_is_not_counted_as_ended(start: Start, code: str, status: int) -> None:
    """As what the frontend refuses by itself: a queue may be full of another frontend's requests, or the pool smaller than
    the context, which the frontend does not know where --num-pages does not say it."""
    service = start()
    service.core.paused.set()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, service)
        wait_until("the request is there", lambda: bool(service.core.seen), 5)
        refusal = Finish(service.core.seen[0].uid, FinishReason.ERROR, "it cannot run", code)
        service.frontend.link.publish(StepOutput(1, finished=[refusal]))
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (status, code)
    assert outcome(service, "error") == 0
    assert service.metric("spmd_serve_request_duration_seconds_count") == 0


def test_stop_ends_open_streams_with_an_error(start: Start) -> None:
    service = start(step_interval=0.005)
    with httpx.stream("POST", f"{service.url}/v1/completions", json=LONG | {"stream": True}, timeout=10) as response:
        pieces = response.iter_raw()
        next(pieces)
        thread = threading.Thread(target=service.close)
        began = time.monotonic()
        thread.start()
        text = b"".join(pieces)
        assert b'"error"' in text or text.endswith(b"[DONE]\n\n")
        thread.join(10)
        assert time.monotonic() - began < 6
    with pytest.raises(httpx.TransportError):
        service.http.get("/health")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the core ends as it should
@pytest.mark.parametrize(
    "place", ["generation.Choice.push", "link.FrontLink.receive", "metrics.Metrics.flush_intervals"]
)
def test_an_error_of_the_frontend_itself_ends_requests_and_service(
    start: Start, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A bug while outputs are handed out must not leave clients waiting, nor a service that answers 503 for ever."""
    service = start(step_interval=0.005)
    deaths: list[str] = []
    service.frontend._on_death = deaths.append

    def broken(*_: object) -> bool:
        raise ZeroDivisionError("injected")

    with service.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}, timeout=10) as response:
        pieces = response.iter_raw()
        next(pieces)
        monkeypatch.setattr(f"spmd_serve.frontend.{place}", broken)
        assert b'"error"' in b"".join(pieces)
    wait_until("the service ends", lambda: bool(deaths), 10)
    assert deaths == ["the HTTP frontend failed on a step's output: ZeroDivisionError: injected"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the core ends as it should
def test_an_event_loop_that_stands_still_ends_the_service(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    service = start(Config(control=ControlOptions(step_timeout=1.5)))
    deaths: list[str] = []
    service.frontend._on_death = deaths.append
    goes_on = threading.Event()
    monkeypatch.setattr("spmd_serve.frontend.generation.Choice.push", lambda *_: goes_on.wait(30))
    try:
        with pytest.raises(httpx.ReadTimeout):
            service.http.post("/v1/completions", json=LONG, timeout=0.5)
        wait_until("the service ends", lambda: bool(deaths), 10)
        assert "the HTTP frontend has given no sign of life for" in deaths[0]
    finally:
        goes_on.set()
        # Nobody waits for it any more, and the next test would find its sockets.
        assert service.frontend._thread.stop(5)


def test_one_stream_that_cannot_be_written_leaves_the_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in one stream's events is that stream's error alone."""
    service = start(step_interval=0.005)
    take = EventStream.take

    def broken(stream: EventStream) -> bytes:
        choice = stream._generation.choices[0]
        if choice.num_tokens > 3 and stream._generation.plan.user == "broken":
            raise ZeroDivisionError
        return take(stream)

    monkeypatch.setattr(EventStream, "take", broken)
    texts = {}

    def ask(user: str) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):
            texts[user] = post(service, prompt="one two three four five", max_tokens=99, user=user, stream=True).text

    threads = [threading.Thread(target=ask, args=(user,)) for user in ("broken", "whole")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert texts["whole"].endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in texts["whole"]
    assert '"finish_reason":"stop"' not in texts.get("broken", "")
    wait_until("the broken one is gone", lambda: is_idle(service), 2)


# ---- metrics ------------------------------------------------------------------------------------------------------


def test_metrics_tell_what_happened(start: Start) -> None:
    service = start()
    texts = [f"some words {i}" for i in range(5)]
    for text in texts:
        post(service, prompt=text, max_tokens=100)
    post(service, max_tokens=2, ignore_eos=True)
    post(service, temperature=-1)
    assert outcome(service, "stop") == 5
    assert outcome(service, "length") == 1
    assert service.metric("spmd_serve_generation_tokens_total") == service.core.tokens
    assert service.metric("spmd_serve_time_to_first_token_seconds_count") == 6
    assert service.metric("spmd_serve_request_duration_seconds_count") == 6
    assert service.metric("spmd_serve_inter_token_seconds_count") == service.core.tokens - 6
    assert service.metric('spmd_serve_inter_token_seconds_bucket{le="+Inf"}') == service.core.tokens - 6
    assert service.metric("spmd_serve_step_seconds_count") > 0
    assert service.metric('spmd_serve_exchange_seconds_count{rank="0"}') > 0
    assert service.metric('spmd_serve_kv_pages{state="free"}') == 1024
    assert service.metric('spmd_serve_http_responses_total{status="400"}') == 1
    names = [line.split()[2] for line in service.http.get("/metrics").text.splitlines() if line.startswith("# HELP")]
    assert all(name.startswith("spmd_serve_") for name in names)


def test_small_pools_clamp(start: Start) -> None:
    """A pool of 64 tokens: 40 + 60 is clamped, 100 is refused, and the next small one is served."""
    service = start(script=lambda request: itertools.repeat(300), info=fake_info(lengths=Lengths(CONTEXT, 64)))
    answer = post(service, prompt=[5] * 40, max_tokens=60).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 24
    for stream in (False, True):
        assert post(service, prompt=[5] * 100, stream=stream).status_code == 400
    assert post(service).status_code == 200
