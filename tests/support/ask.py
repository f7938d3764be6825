"""A Case as a request of the official client, and its response as an Answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import openai

from support.reference import Answer, Case
from support.server import Server

T = TypeVar("T")
MODEL = "smollm2-135m-instruct"


def fields(case: Case, **more: Any) -> dict[str, Any]:
    """Arguments of `client.completions.create` or `client.chat.completions.create`."""
    extra = {"top_k": case.top_k} if case.top_k else {}
    made = {
        "model": MODEL,
        "max_tokens": case.max_tokens,
        "temperature": case.temperature,
        "top_p": case.top_p,
        "extra_body": {**extra, **more.pop("extra_body", {})},
    }
    if case.temperature > 0:
        made["seed"] = case.seed
    made["prompt" if isinstance(case.prompt, str) else "messages"] = (
        case.prompt if isinstance(case.prompt, str) else case.messages
    )
    return {**made, **more}


def create(client: Any, case: Case, **more: Any) -> Any:
    """The response; an awaitable one from an async client."""
    endpoint = client.completions if isinstance(case.prompt, str) else client.chat.completions
    return endpoint.create(**fields(case, **more))


def to_answer(response: Any) -> Answer:
    """Of a response that is not streamed."""
    choice, usage = response.choices[0], response.usage
    text = choice.text if hasattr(choice, "text") else choice.message.content
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return Answer(text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)


def ask(client: openai.OpenAI, case: Case, **more: Any) -> Answer:
    """One request."""
    return to_answer(create(client, case, **more))


async def gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All at once; if one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_call(call)) for call in calls]
    return [task.result() for task in tasks]


async def _call(call: Awaitable[T]) -> T:
    return await call


def at_once(server: Server, start: Callable[[openai.AsyncOpenAI], Sequence[Awaitable[T]]]) -> list[T]:
    """Results of what `start` makes of a client, all in flight together."""

    async def run() -> list[T]:
        async with server.async_client() as client:
            return await gather(start(client))

    return asyncio.run(run())


def ask_at_once(server: Server, cases: Sequence[Case], **more: Any) -> list[Answer]:
    """All cases in flight together, answers in the order of `cases`."""
    return [to_answer(r) for r in at_once(server, lambda client: [create(client, case, **more) for case in cases])]
