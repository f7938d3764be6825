"""16 chats with one system prompt of some 1,000 tokens: fast with the prefix cache, and the same with and without."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.ask import create, gather
from support.reference import Case, Reference
from support.server import Server

SYSTEM = "You are the guide of the museum of small things. " + " ".join(
    f"Room {i} shows {what} from the year {1800 + 3 * i}."
    for i, what in enumerate(("buttons", "keys", "stamps", "thimbles", "marbles", "spoons", "bells", "shells") * 8)
)
QUESTIONS = ("bells", "keys", "stamps", "shells", "spoons", "marbles", "buttons", "thimbles")
WAVES = [
    [Case((("system", SYSTEM), ("user", f"{verb} {what}?")), 4) for what in QUESTIONS for verb in verbs]
    for verbs in (("Where are", "Why"), ("How old are", "Who made"))
]


ATTEMPTS = 6  # other tests share the cores, so one measurement may be off


async def wave(server: Server, cases: list[Case], salt: str) -> tuple[list[str], list[float]]:
    """All chats at once: texts, and seconds to each one's first token. Another salt finds an empty cache."""

    async def chat(client: Any, case: Case) -> tuple[str, float]:
        began = time.monotonic()
        text, first = "", 0.0
        async for chunk in await create(client, case, stream=True, extra_body={"cache_salt": salt}):
            text += chunk.choices[0].delta.content or ""
            first = first or (time.monotonic() - began if text else 0.0)
        return text, first

    async with server.async_client() as client:
        found = await gather([chat(client, case) for case in cases])
    return [text for text, _ in found], [first for _, first in found]


def test_the_second_wave_starts_in_a_quarter_of_the_time_with_the_same_text(
    start_server: Callable[..., Server], reference: Reference
) -> None:
    assert 950 < len(reference.tokenizer(SYSTEM).input_ids) < 1100
    server = start_server("--dtype", "float32", "--threads", "1", ranks=1, agent=False)
    for attempt in range(ATTEMPTS):
        waves = [asyncio.run(wave(server, cases, str(attempt))) for cases in WAVES]
        first, second = (statistics.mean(times) for _, times in waves)
        print(f"mean time to the first token: {first:.2f} s, then {second:.2f} s")
        if second <= 0.25 * first:
            break
    else:
        pytest.fail("the second wave was never in a quarter of the first one's time")
    again = create(server.client(), WAVES[1][0], extra_body={"cache_salt": str(attempt)})
    assert again.usage.prompt_tokens_details.cached_tokens > 950

    without = start_server("--dtype", "float32", "--threads", "1", "--prefix-cache", "off", ranks=1, agent=False)
    texts, _ = waves[1]
    assert asyncio.run(wave(without, WAVES[1][:1], ""))[0] == texts[:1]
