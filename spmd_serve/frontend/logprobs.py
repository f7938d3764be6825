"""The JSON of log-probabilities, in the shapes of OpenAI and vLLM.

There can be millions of numbers. So each token's JSON is made by itself, and only bytes are kept: objects would have Python's
garbage collector, which nobody can interrupt, go through all of them again and again. Those of a prompt are made once for
all its choices, on a thread (`make_prompt_json`), so that the event loop only copies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from spmd_serve.frontend.generation import Choice, PromptJson
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not

Item = tuple[int, TokenLogprobs | None]  # a token and its log-probabilities; the first of a prompt has none


def make_prompt_json(choice: Choice, tokenizer: TextTokenizer) -> None:
    """Make what the answer shows of the choice's prompt, unless it has been made. Takes some 10 us for each number."""
    plan = choice.generation.plan
    if plan.params.prompt_logprobs is None or choice.prompt_json is not None:
        return
    items: list[Item] = [(token, choice.prompt_logprobs.get(i)) for i, token in enumerate(choice.prompt.ids)]
    prompt_logprobs, echoed = b"", {}
    if plan.prompt_logprobs is not None:
        prompt_logprobs = _json_list(_prompt_entry(*item, plan.prompt_logprobs, tokenizer) for item in items)
    if plan.echo and plan.logprobs is not None:
        echoed = _completion_lists(items, choice.prompt.offsets, plan.logprobs, tokenizer)
    choice.prompt_json = PromptJson(prompt_logprobs, echoed)


def prompt_logprobs(choice: Choice) -> orjson.Fragment:
    """vLLM's `prompt_logprobs`: for each prompt token, id -> its log-probability, rank and text."""
    assert choice.prompt_json is not None
    return orjson.Fragment(choice.prompt_json.prompt_logprobs)


def take_logprobs(choice: Choice, tokenizer: TextTokenizer, most: int | None = None) -> dict[str, Any] | None:
    """The choice's log-probabilities that have not been taken yet, of `most` tokens, in the shape of its endpoint."""
    plan = choice.generation.plan
    if plan.logprobs is None:
        return None
    count = len(choice.logprobs) if most is None else min(most, len(choice.logprobs))
    items = [choice.logprobs.popleft() for _ in range(count)]
    if plan.chat:
        content = _json_list(_chat_entry(*item, plan.logprobs, tokenizer) for item in items)
        return {"content": orjson.Fragment(content), "refusal": None}
    lists = _completion_lists(items, _take_offsets(choice, items, tokenizer), plan.logprobs, tokenizer)
    if plan.echo and not choice.taken:
        assert choice.prompt_json is not None
        lists = {name: _joined(choice.prompt_json.echoed[name], values) for name, values in lists.items()}
    return {name: orjson.Fragment(values) for name, values in lists.items()}


def _json_list(values: Iterable[Any]) -> bytes:
    """One by one, because orjson keeps all other threads waiting meanwhile."""
    return b"[" + b",".join(map(orjson.dumps, values)) + b"]"


def _joined(head: bytes, tail: bytes) -> bytes:
    """A JSON list that is not empty, and one that follows."""
    return head if tail == b"[]" else head[:-1] + b"," + tail[1:]


def _take_offsets(choice: Choice, items: Sequence[Item], tokenizer: TextTokenizer) -> list[int]:
    """Where each of the next tokens begins in the choice's text, in characters."""
    stream = choice.offset_stream = choice.offset_stream or tokenizer.stream(choice.generation.plan.skip_special)
    offsets = []
    for token, _ in items:
        offsets.append(choice.offset)
        choice.offset += len(stream.step(token))
    return offsets


def _clip(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _best(logprobs: TokenLogprobs, top: int) -> Iterable[tuple[int, float]]:
    """The `top` likeliest (the engine may have given more)."""
    return zip(logprobs.top_ids[:top], map(_clip, logprobs.top_logprobs[:top]), strict=True)


def _completion_lists(
    items: Sequence[Item], offsets: Iterable[int], top: int, tokenizer: TextTokenizer
) -> dict[str, bytes]:
    """/v1/completions' four lists. The top ones always have the token itself, as OpenAI's do."""

    def tops(name: str, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        if logprobs is None:
            return None
        best: dict[str, float] = {}
        for i, value in _best(logprobs, top):
            best.setdefault(tokenizer.token_name(i), value)  # of several tokens with one text the likeliest
        best[name] = _clip(logprobs.logprob)
        return best

    names = [tokenizer.token_name(token) for token, _ in items]
    return {
        "tokens": _json_list(names),
        "token_logprobs": _json_list(None if own is None else _clip(own.logprob) for _, own in items),
        "top_logprobs": _json_list(tops(name, own) for name, (_, own) in zip(names, items, strict=True)),
        "text_offset": _json_list(offsets),
    }


def _chat_entry(token: int, logprobs: TokenLogprobs, top: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    """One of /v1/chat/completions' list of objects."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return entry(token, _clip(logprobs.logprob)) | {"top_logprobs": [entry(i, v) for i, v in _best(logprobs, top)]}


def _prompt_entry(
    token: int, logprobs: TokenLogprobs | None, top: int, tokenizer: TextTokenizer
) -> dict[str, Any] | None:
    if logprobs is None:
        return None

    def entry(i: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": value, "rank": rank, "decoded_token": tokenizer.token_name(i)}

    entries = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(_best(logprobs, top), 1)}
    entries[str(token)] = entry(token, _clip(logprobs.logprob), logprobs.rank)
    return entries
