"""A KV pool of 48 tokens, on two ranks with overlapped steps: everything is short of pages, and no text shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from support.ask import MODEL, ask, ask_at_once, create, to_answer
from support.reference import Answers, Case
from support.server import Server, wait_until

POOL = 48  # tokens, in pages of 8: short of pages with texts that take a second or two
SMALL = Case("The capital of France is", 8)
TWIN = Case("One, two, three, four, five, six,", 14)
# Each of them alone fills most of the pool.
GREEDY = Case("Once upon a time there was a fox who", 34)
SEEDED = (
    Case("The weather report for tomorrow says that", 34, temperature=0.9, seed=42),
    Case("Dear diary, today I went to the market and", 34, temperature=1.0, seed=6, top_k=30, top_p=0.95),
)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], answers: Answers) -> Server:
    return start_server(
        *("--dtype", "float32", "--num-pages", "6", "--page-size", "8", "--overlap", "on", "--threads", "1"),
        ranks=2,
        meanwhile=lambda: answers.prepare([SMALL, GREEDY, TWIN, *SEEDED]),
    )


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_a_request_that_does_not_fit_is_clamped_or_refused(client: openai.OpenAI, answers: Answers) -> None:
    """At once, and the next small one is served."""
    prompt = list(range(1000, 1030))
    made = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None and made.usage.completion_tokens == POOL - len(prompt)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=[1000] * 100, max_tokens=1, stream=stream)
        assert "100 tokens" in caught.value.message and f"{POOL} tokens" in caught.value.message
    assert ask(client, SMALL) == answers[SMALL]


def test_preemption_changes_no_text(server: Server, answers: Answers) -> None:
    """Greedy and seeded requests that push each other out say what they say alone in a large pool."""
    before = server.metrics()["preemptions_total"]
    cases = [*SEEDED, GREEDY, SMALL]
    assert ask_at_once(server, cases) == [answers[case] for case in cases]
    assert server.metrics()["preemptions_total"] > before
    server.wait_idle()


def test_duplicate_prompts_with_evictions_between(server: Server, client: openai.OpenAI, answers: Answers) -> None:
    """Two identical prompts in flight share pages, finish, are evicted by another, and come again."""
    for _ in range(2):
        assert ask_at_once(server, [TWIN, TWIN]) == [answers[TWIN]] * 2
        assert ask(client, GREEDY) == answers[GREEDY]  # needs all six pages
    assert create(client, TWIN).usage.prompt_tokens_details.cached_tokens == 0
    again = create(client, TWIN)
    assert again.usage.prompt_tokens_details.cached_tokens == 8
    assert to_answer(again) == answers[TWIN]


def test_a_client_that_leaves_the_queue(server: Server, answers: Answers) -> None:
    """It never ran: it is gone within a second, and who runs is not disturbed."""
    before = server.metrics()['requests_total{outcome="abort"}']

    async def run() -> Any:
        async with server.async_client() as client:
            running = asyncio.ensure_future(create(client, GREEDY))
            while server.metrics()["requests_running"] != 1:
                await asyncio.sleep(0.01)
            large = client.completions.create(model=MODEL, prompt=[1000] * 40, max_tokens=8, stream=True)
            queued = asyncio.ensure_future(large)
            while server.metrics()["requests_waiting"] != 1:
                await asyncio.sleep(0.01)
            assert not running.done()
            queued.cancel()
            await asyncio.wait([queued])
            wait_until("the queue is empty", lambda: server.metrics()["requests_waiting"] == 0, 1)
            return await running

    assert to_answer(asyncio.run(run())) == answers[GREEDY]
    server.wait_idle()
    assert server.metrics()['requests_total{outcome="abort"}'] == before + 1


def test_a_seed_of_its_own_for_each_choice(client: openai.OpenAI) -> None:
    """n choices of one seed differ, and are the same n again, also when they do not all fit into the pool."""
    case = replace(SEEDED[0], max_tokens=20)
    first, again = (create(client, case, n=3) for _ in range(2))
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert len({c.text for c in first.choices}) == 3
