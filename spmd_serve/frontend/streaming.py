"""Server-sent events: what is ready of a generation, as bytes.

A chunk is put together from byte strings made once for a choice; only the text goes through a JSON encoder. That is
what keeps a streamed token cheap (`bench serve --dummy-engine` measures it).
"""

from __future__ import annotations

from typing import Any

import orjson

from spmd_serve.frontend.answers import error_body, finish_name
from spmd_serve.frontend.generation import Choice, Generation
from spmd_serve.frontend.logprobs import prompt_logprobs, take_logprobs
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import FinishReason

DONE = b"data: [DONE]\n\n"
# Log-probabilities made into JSON in one go, at some 2 us each. A client that does not read for a while lets millions pile up.
MAX_TAKEN = 8192


class EventStream:
    """Takes what is ready of one generation."""

    def __init__(self, generation: Generation, identity: dict[str, Any], tokenizer: TextTokenizer) -> None:
        plan = generation.plan
        self._generation = generation
        self._tokenizer = tokenizer
        self._chat = plan.chat
        self._head = b"data: " + orjson.dumps(identity)[:-1] + b',"choices":['
        inner = b'"delta":{"content":' if plan.chat else b'"text":'
        self._prefixes = [self._head + b'{"index":%d,' % c.index + inner for c in generation.choices]
        close_text = b'},"logprobs":' if plan.chat else b',"logprobs":'
        self._tail = b',"usage":null}\n\n' if plan.include_usage else b"}\n\n"
        self._plain_end = close_text + b'null,"finish_reason":null}]' + self._tail
        self._shows_prompt = plan.params.prompt_logprobs is not None
        self._plain = plan.logprobs is None and plan.prompt_logprobs is None and not plan.continuous_usage

    def unprepared(self) -> Choice | None:
        """A ready choice that needs `make_prompt_json` on a thread before it can be taken."""
        if not self._shows_prompt:
            return None
        return next((choice for choice in self._generation.ready if choice.prompt_json is None), None)

    def take(self) -> bytes:
        """Events of what is ready (none may be unprepared); b"" when nothing is. What is too much at once stays ready."""
        generation = self._generation
        ready, generation.ready = generation.ready, []
        if generation.plan.logprobs is None:
            return b"".join([self._take_choice(choice) for choice in ready])
        events = []
        tokens = max(1, MAX_TAKEN // (generation.plan.logprobs + 1))
        while ready and tokens > 0:
            choice = ready[0]
            tokens_before = len(choice.logprobs)
            events.append(self._take_choice(choice, tokens))
            tokens -= max(1, tokens_before)
            choice.queued = bool(choice.logprobs)
            if not choice.queued:
                del ready[0]
        generation.ready = ready
        return b"".join(events)

    def end(self) -> bytes:
        """The last events: an error if there was one, usage if it was asked for, and [DONE]."""
        generation = self._generation
        if generation.error is not None:
            return b"data: " + orjson.dumps(error_body(generation.error)) + b"\n\n" + DONE
        if generation.plan.include_usage:
            return self._head + b'],"usage":' + orjson.dumps(generation.usage()) + b"}\n\n" + DONE
        return DONE

    def _take_choice(self, choice: Choice, tokens: int = 0) -> bytes:
        """`tokens`: how many may have their log-probabilities shown."""
        choice.queued = False
        text, choice.text = choice.text, ""
        if choice.finish is FinishReason.ERROR and not text:
            choice.logprobs.clear()
            return b""  # the error has an event of its own
        if choice.taken and choice.finish is None and self._plain:
            return self._prefixes[choice.index] + orjson.dumps(text) + self._plain_end
        return self._full_event(choice, text, tokens)

    def _full_event(self, choice: Choice, text: str, tokens: int = 0) -> bytes:
        """An event with everything that the plain ones never have: role, log-probabilities, finish_reason, usage."""
        plan = self._generation.plan
        logprobs = take_logprobs(choice, self._tokenizer, tokens)
        entry: dict[str, Any] = {"index": choice.index}
        if self._chat:
            delta = {} if choice.taken else {"role": "assistant"}
            entry["delta"] = delta | ({"content": text} if text or not choice.taken else {})
        else:
            entry["text"] = choice.prompt.echo_text + text if plan.echo and not choice.taken else text
        entry["logprobs"] = logprobs
        # It comes with the last of them.
        entry["finish_reason"] = None if choice.logprobs else finish_name(choice.finish)
        if plan.prompt_logprobs is not None and not choice.taken:
            entry["prompt_logprobs"] = prompt_logprobs(choice)
        choice.taken = True
        event = self._head + orjson.dumps(entry) + b"]"
        if plan.continuous_usage:
            return event + b',"usage":' + orjson.dumps(self._generation.usage()) + b"}\n\n"
        return event + self._tail
