"""The JSON of answers, in OpenAI's shapes: whole answers and errors."""

from __future__ import annotations

from typing import Any

import orjson

from spmd_serve.errors import RequestError
from spmd_serve.frontend.generation import Choice, Generation
from spmd_serve.frontend.logprobs import make_prompt_json, prompt_logprobs, take_logprobs
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import FinishReason


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    if error.status == 401:
        kind = "authentication_error"
    elif error.status >= 500:
        kind = "overloaded_error" if error.status == 503 else "server_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def chosen(generation: Generation) -> list[Choice]:
    """The choices that are shown: of each prompt's best_of, the n with the best mean log-probability."""
    plan = generation.plan
    if plan.best_of == plan.n:
        return generation.choices
    shown: list[Choice] = []
    for start in range(0, len(generation.choices), plan.best_of):
        group = generation.choices[start : start + plan.best_of]
        group.sort(key=lambda c: c.cumulative_logprob / max(1, c.num_tokens), reverse=True)
        shown += group[: plan.n]
    return shown


def finish_name(reason: FinishReason | None) -> str | None:
    """OpenAI's finish_reason: stop or length; what ends otherwise ends with an error object instead."""
    return reason.value if reason in (FinishReason.STOP, FinishReason.LENGTH) else None


def whole_answer(generation: Generation, identity: dict[str, Any], tokenizer: TextTokenizer) -> bytes:
    """The answer of a request that does not stream. `identity` has id, object, created, model, system_fingerprint.

    Each choice is made JSON by itself: all at once may be 600 MB, through which orjson would keep other threads waiting.
    """
    plan = generation.plan
    choices = []
    for index, choice in enumerate(chosen(generation)):
        entry: dict[str, Any] = {"index": index}
        make_prompt_json(choice, tokenizer)
        logprobs = take_logprobs(choice, tokenizer)
        if plan.chat:
            entry["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            entry["text"] = (choice.prompt.echo_text + choice.text) if plan.echo else choice.text
        entry["logprobs"] = logprobs
        entry["finish_reason"] = finish_name(choice.finish)
        if plan.prompt_logprobs is not None and not plan.chat:
            entry["prompt_logprobs"] = prompt_logprobs(choice)
        choices += [orjson.dumps(entry), b","]
    rest: dict[str, Any] = {"usage": generation.usage()}
    if plan.prompt_logprobs is not None and plan.chat:
        rest["prompt_logprobs"] = prompt_logprobs(generation.choices[0])
    return b"".join([orjson.dumps(identity)[:-1], b',"choices":[', *choices[:-1], b"],", orjson.dumps(rest)[1:]])
