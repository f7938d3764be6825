"""The JSON of answers, in OpenAI's shapes: log-probabilities, whole answers, errors."""

from __future__ import annotations

from typing import Any

from spmd_serve.errors import RequestError
from spmd_serve.frontend.generation import Choice, Generation
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import FinishReason, TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not

Item = tuple[int, TokenLogprobs | None]  # a token and its log-probabilities; the first of a prompt has none


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    if error.status == 401:
        kind = "authentication_error"
    elif error.status >= 500:
        kind = "overloaded_error" if error.status == 503 else "server_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _clip(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def prompt_items(choice: Choice) -> list[Item]:
    """The prompt's tokens with what is known of them."""
    return [(token, choice.prompt_logprobs.get(i)) for i, token in enumerate(choice.prompt.ids)]


def completion_logprobs(items: list[Item], top: int, choice: Choice, tokenizer: TextTokenizer) -> dict[str, Any]:
    """/v1/completions' four lists. The top ones always have the token itself, as OpenAI's do."""
    offset_stream = choice.offset_stream = choice.offset_stream or tokenizer.stream(choice.generation.plan.skip_special)
    tokens: list[str] = []
    offsets: list[int] = []
    own: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, logprobs in items:
        name = tokenizer.token_name(token)
        tokens.append(name)
        offsets.append(choice.offset)
        choice.offset += len(offset_stream.step(token))
        if logprobs is None:
            own.append(None)
            tops.append(None)
            continue
        own.append(_clip(logprobs.logprob))
        best = {
            tokenizer.token_name(i): _clip(value)
            for i, value in zip(logprobs.top_ids[:top], logprobs.top_logprobs[:top], strict=True)
        }
        best.setdefault(name, _clip(logprobs.logprob))
        tops.append(best)
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(items: list[Item], top: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    """/v1/chat/completions' list of objects."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": _clip(logprob), "bytes": list(data)}

    content = []
    for token, logprobs in items:
        assert logprobs is not None
        pairs = zip(logprobs.top_ids[:top], logprobs.top_logprobs[:top], strict=True)
        content.append(entry(token, logprobs.logprob) | {"top_logprobs": [entry(i, v) for i, v in pairs]})
    return {"content": content, "refusal": None}


def prompt_logprobs(choice: Choice, tokenizer: TextTokenizer) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token, id -> its log-probability, rank and text."""
    result: list[dict[str, Any] | None] = []
    for token, logprobs in prompt_items(choice):
        if logprobs is None:
            result.append(None)
            continue
        entries = {}
        for rank, (i, value) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), 1):
            entries[str(i)] = {"logprob": _clip(value), "rank": rank, "decoded_token": tokenizer.token_name(i)}
        entries[str(token)] = {
            "logprob": _clip(logprobs.logprob),
            "rank": logprobs.rank,
            "decoded_token": tokenizer.token_name(token),
        }
        result.append(entries)
    return result


def take_logprobs(choice: Choice, tokenizer: TextTokenizer) -> dict[str, Any] | None:
    """The choice's log-probabilities that have not been taken yet, in the shape of its endpoint."""
    plan = choice.generation.plan
    if plan.logprobs is None:
        return None
    items: list[Item] = list(choice.logprobs)
    choice.logprobs.clear()
    if plan.chat:
        return chat_logprobs(items, plan.logprobs, tokenizer)
    if plan.echo and not choice.taken:
        items = prompt_items(choice) + items
    return completion_logprobs(items, plan.logprobs, choice, tokenizer)


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


def whole_answer(generation: Generation, identity: dict[str, Any], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The answer of a request that does not stream. `identity` has id, object, created, model, system_fingerprint."""
    plan = generation.plan
    choices = []
    for index, choice in enumerate(chosen(generation)):
        entry: dict[str, Any] = {"index": index}
        logprobs = take_logprobs(choice, tokenizer)
        if plan.chat:
            entry["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            entry["text"] = (choice.prompt.echo_text + choice.text) if plan.echo else choice.text
        entry["logprobs"] = logprobs
        entry["finish_reason"] = finish_name(choice.finish)
        if plan.prompt_logprobs is not None and not plan.chat:
            entry["prompt_logprobs"] = prompt_logprobs(choice, tokenizer)
        choices.append(entry)
    answer = identity | {"choices": choices, "usage": generation.usage()}
    if plan.prompt_logprobs is not None and plan.chat:
        answer["prompt_logprobs"] = prompt_logprobs(generation.choices[0], tokenizer)
    return answer
