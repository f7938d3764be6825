"""Events: the fast ones are the same JSON as the full ones; metrics count many alike as one by one."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.fake_service import MODEL, bundled_tokenizer

from spmd_serve.frontend.generation import Choice, Generation
from spmd_serve.frontend.metrics import Metrics
from spmd_serve.frontend.plan import Prompt, RequestPlan
from spmd_serve.frontend.streaming import DONE, MAX_TAKEN, EventStream
from spmd_serve.types import FinishReason, SamplingParams, StepStats, TokenLogprobs

IDENTITY = {"id": "x-1", "object": "o", "created": 1, "model": MODEL, "system_fingerprint": "fp"}


class NoConnection:
    writable = False

    def write_chunk(self, data: bytes) -> None: ...

    def abort(self) -> None: ...


def make(chat: bool = False, n: int = 1, **fields: Any) -> tuple[Generation, EventStream]:
    plan = RequestPlan(
        chat=chat,
        model=MODEL,
        prompts=[Prompt(array("i", [1]), "", 10)],
        params=SamplingParams(10),
        n=n,
        best_of=n,
        stream=True,
        include_usage=False,
        continuous_usage=False,
        echo=False,
        logprobs=None,
        prompt_logprobs=None,
        stops=None,
        include_stop=False,
        skip_special=True,
        timeout=None,
        priority=0,
        cache_salt="",
        user="",
    )
    generation = Generation(replace(plan, **fields), NoConnection())
    for index in range(n):
        stream = bundled_tokenizer().stream()
        generation.choices.append(Choice(generation, index, index, plan.prompts[0], stream, None))
    generation.open = n
    return generation, EventStream(generation, IDENTITY, bundled_tokenizer())


def give(generation: Generation, index: int, text: str, finish: FinishReason | None = None) -> None:
    choice = generation.choices[index]
    choice.text += text
    choice.finish = finish
    choice.queued = True
    generation.ready.append(choice)


def events(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n\n")
    parts = data.split(b"\n\n")[:-1]
    assert all(part.startswith(b"data: ") for part in parts)
    return [orjson.loads(part[6:]) for part in parts]


@pytest.mark.parametrize("chat", [False, True])
def test_piled_up_logprobs_are_taken_piece_by_piece(chat: bool) -> None:
    """All at once, what a client lets pile up in a minute would hold the event loop for many seconds."""
    generation, stream = make(chat, n=2, logprobs=20)
    number = 3 * MAX_TAKEN // 21
    for choice in generation.choices:
        choice.logprobs.extend((i, TokenLogprobs(-1.0, 1, [i] * 20, [-1.0] * 20)) for i in range(number))
        give(generation, choice.index, "text", FinishReason.LENGTH)
    texts, tokens, ends = ["", ""], [0, 0], [0, 0]
    takes = 0
    while data := stream.take():
        takes += 1
        assert len(data) < 200 * MAX_TAKEN
        for event in events(data):
            entry = event["choices"][0]
            shown = entry["logprobs"]["content" if chat else "tokens"]
            assert not ends[entry["index"]] and len(shown) <= MAX_TAKEN // 21
            tokens[entry["index"]] += len(shown)
            ends[entry["index"]] = entry["finish_reason"] == "length"
            texts[entry["index"]] += (entry["delta"].get("content", "") if chat else entry["text"]) or ""
    assert takes >= 6
    assert (texts, tokens, ends) == (["text"] * 2, [number] * 2, [True] * 2)
    assert not generation.ready and not any(choice.queued for choice in generation.choices)


@pytest.mark.parametrize(("token", "own"), [(2, -0.5), (3, -1.0), (4, -9.0), (5, -9.0)])
def test_tokens_of_one_text(monkeypatch: pytest.MonkeyPatch, token: int, own: float) -> None:
    """As <0x41> and A are; /v1/completions has one entry for them: the drawn one's, else the likeliest's."""
    monkeypatch.setattr(bundled_tokenizer(), "token_name", lambda i: "A" if i in (2, 3, 4) else str(i))
    generation, stream = make(logprobs=2)
    generation.choices[0].logprobs.append((token, TokenLogprobs(own, 1, [2, 3], [-0.5, -1.0])))
    give(generation, 0, "A", FinishReason.LENGTH)
    logprobs = events(stream.take())[0]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [own]
    assert logprobs["top_logprobs"] == [{"A": own} if token < 5 else {"A": -0.5, "5": own}]


def test_an_error_ends_piled_up_logprobs() -> None:
    generation, stream = make(logprobs=0)
    choice = generation.choices[0]
    choice.logprobs.extend((i, TokenLogprobs(-1.0, 1)) for i in range(2 * MAX_TAKEN))
    give(generation, 0, "text")
    assert stream.take()
    assert generation.ready == [choice]
    choice.finish = FinishReason.ERROR
    assert stream.take() == b"" and generation.ready == []


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [False, True])
def test_fast_events_are_full_events(chat: bool, usage: bool) -> None:
    generation, stream = make(chat, include_usage=usage)
    give(generation, 0, "first")
    stream.take()
    text = 'quote " backslash \\ line\nbreak \u2028 😀 </script>'
    give(generation, 0, text)
    fast = stream.take()
    give(generation, 0, text)
    full = stream._full_event(generation.choices[0], text)
    assert events(fast) == events(full)
    (event,) = events(fast)
    assert {k: v for k, v in event.items() if k in IDENTITY} == IDENTITY
    (choice,) = event["choices"]
    assert (choice["delta"]["content"] if chat else choice["text"]) == text
    assert choice["finish_reason"] is None and choice["logprobs"] is None
    assert ("usage" in event) == usage


def test_pieces_that_pile_up_are_one_event_for_each_choice() -> None:
    generation, stream = make(n=2)
    give(generation, 1, "b")
    give(generation, 0, "a")
    generation.choices[0].text += "aa"  # more tokens came before the response took them
    assert [(e["choices"][0]["index"], e["choices"][0]["text"]) for e in events(stream.take())] == [
        (1, "b"),
        (0, "aaa"),
    ]
    assert stream.take() == b""
    give(generation, 0, "", FinishReason.LENGTH)
    (event,) = events(stream.take())
    assert event["choices"][0]["finish_reason"] == "length"
    assert stream.end() == DONE


def test_stats_and_intervals() -> None:
    metrics = Metrics()
    metrics.intervals[10.0] = 3
    metrics.intervals[9.0] = 1
    metrics.flush_intervals(10.004)
    assert not metrics.intervals
    text = metrics.render().decode()
    assert 'spmd_serve_inter_token_seconds_bucket{le="0.005"} 3.0' in text
    assert 'spmd_serve_inter_token_seconds_bucket{le="2.5"} 4.0' in text
    assert "spmd_serve_inter_token_seconds_count 4.0" in text
    total = next(line for line in text.splitlines() if line.startswith("spmd_serve_inter_token_seconds_sum"))
    assert float(total.split()[1]) == pytest.approx(3 * 0.004 + 1.004)
    stats = StepStats(
        step=7,
        running=2,
        waiting=3,
        preempted_total=4,
        pages_total=100,
        pages_free=50,
        pages_cached=30,
        prompt_tokens_total=11,
        cached_tokens_total=5,
        generation_tokens_total=9,
        step_time=0.5,
        exchange_time=0.25,
    )
    metrics.set_stats(stats)
    text = metrics.render().decode()
    for line in (
        "spmd_serve_requests_running 2.0",
        "spmd_serve_requests_waiting 3.0",
        "spmd_serve_preemptions_total 4.0",
        "spmd_serve_kv_usage_ratio 0.2",
        'spmd_serve_kv_pages{state="cached"} 30.0',
        "spmd_serve_prompt_tokens_total 11.0",
        "spmd_serve_prompt_tokens_cached_total 5.0",
        "spmd_serve_generation_tokens_total 9.0",
        "spmd_serve_step_seconds_sum 0.5",
        'spmd_serve_exchange_seconds_sum{rank="0"} 0.25',
    ):
        assert line in text.splitlines(), line
    metrics.set_stats(replace(stats, exchange_time=0.0))  # a step that went without
    text = metrics.render().decode()
    assert "spmd_serve_step_seconds_count 2.0" in text
    assert 'spmd_serve_exchange_seconds_count{rank="0"} 1.0' in text
    others = Metrics(first=False)
    others.set_stats(stats)
    assert "spmd_serve_step_seconds_count 0.0" in others.render().decode()  # one frontend counts the steps
