"""What one HTTP request generates: its choices, and what of them the response has not taken yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spmd_serve.errors import RequestError
from spmd_serve.frontend.detokenizer import Detokenizer, StopSearch
from spmd_serve.frontend.plan import Prompt, RequestPlan
from spmd_serve.types import FinishReason, TokenLogprobs


class Connection(Protocol):
    """The client's connection, as far as a generation needs it."""

    @property
    def writable(self) -> bool:
        """False when the client is gone or does not read fast enough."""

    def write_chunk(self, data: bytes) -> None:
        """Write a piece (not empty) of a chunked response whose head has been sent; never waits."""

    def abort(self) -> None:
        """Close at once, whatever is unsent."""


@dataclass(frozen=True, slots=True)
class PromptJson:
    """What answers show of a prompt's log-probabilities, as JSON.

    Attributes:
        prompt_logprobs: vLLM's list; b"" when it was not asked for.
        echoed: name -> list, the lists of /v1/completions; {} when they are not echoed.
    """

    prompt_logprobs: bytes
    echoed: dict[str, bytes]


@dataclass(slots=True, eq=False, repr=False)
class Choice:
    """One sequence on the frontend's side: ids go in, text comes out. Owned by the event loop.

    Attributes:
        text: what may be shown and has not been taken yet.
        logprobs: (token, log-probabilities) not taken yet, for choices that asked.
        prompt_logprobs: position -> log-probabilities of the prompt's tokens.
        num_tokens: produced so far, which is what usage counts.
        finish: None while it runs.
        taken: whether the response has taken anything yet.
        queued: whether it stands in generation.ready.
        offset: characters of text before the next token's, for logprobs' text_offset.
    """

    generation: Generation
    uid: int
    index: int
    prompt: Prompt
    stream: Detokenizer
    search: StopSearch | None
    step: Callable[[int], str] = field(init=False)
    min_tokens: int = field(init=False)
    text: str = ""
    logprobs: deque[tuple[int, TokenLogprobs]] = field(default_factory=deque)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_tokens: int = 0
    cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    last_token_time: float = 0.0
    finish: FinishReason | None = None
    taken: bool = False
    queued: bool = False
    offset: int = field(init=False)
    offset_stream: Detokenizer | None = None

    def __post_init__(self) -> None:
        self.step = self.stream.step
        self.min_tokens = self.generation.plan.params.min_tokens
        self.offset = len(self.prompt.echo_text)

    @property
    def prompt_json(self) -> PromptJson | None:
        """Made once for all choices of a prompt; None before."""
        return self.generation.prompt_json.get(self.index // self.generation.plan.best_of)

    @prompt_json.setter
    def prompt_json(self, made: PromptJson) -> None:
        self.generation.prompt_json[self.index // self.generation.plan.best_of] = made

    def push(self, token: int, shown: bool) -> bool:
        """Add a token; `shown` is False for a token that stops the request. True when it completes a stop string."""
        self.num_tokens += 1
        if not shown:
            return False
        text = self.step(token)
        if not text:
            return False
        if self.search is None:
            self.text += text
            return False
        text, matched = self.search.feed(text, self.num_tokens > self.min_tokens)
        self.text += text
        return matched

    def end(self, reason: FinishReason) -> None:
        """The one end of this choice. What was held back comes out, unless a stop string ended it."""
        if self.search is not None:
            tail, matched = self.search.feed(self.stream.flush())
            self.text += tail if matched else tail + self.search.flush()
            reason = FinishReason.STOP if matched else reason
        else:
            self.text += self.stream.flush()
        self.finish = reason

    def end_by_stop_string(self) -> None:
        """A stop string was completed: nothing more is shown."""
        self.finish = FinishReason.STOP


class Generation:
    """The choices of one HTTP request. The dispatcher fills it; one response task takes from it.

    Attributes:
        ready: choices with something new to send, in order; only kept for streams.
        error: set when the request as a whole has failed.
        sending_since: monotonic time since when the response waits for its client to read; None while it does not.
        push: sends what is ready at once; True when nothing is left. Set while the response's task waits.
    """

    def __init__(self, plan: RequestPlan, connection: Connection) -> None:
        self.plan = plan
        self.choices: list[Choice] = []
        self.prompt_json: dict[int, PromptJson] = {}  # by the prompt's index
        self.created = int(time.time())
        self.submitted = time.monotonic()
        self.ready: list[Choice] = []
        self.open = 0
        self.error: RequestError | None = None
        self.client_left = False
        self.sending_since: float | None = None
        self.connection = connection
        self.push: Callable[[], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """True when no more output will come."""
        return self.open == 0 or self.error is not None or self.client_left

    def wake(self) -> None:
        """Tell the response that there is something to take, or that it is over."""
        if self.push is not None and not self.over and self.push():
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until `wake`; at once when there is something to take or it is over."""
        if self.ready or self.over:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object, with what has been produced so far. A prompt counts once, however many choices it has."""
        prompt = sum(len(p.ids) for p in self.plan.prompts)
        completion = sum(c.num_tokens for c in self.choices)
        cached = sum(c.cached_tokens for c in self.choices[:: self.plan.best_of])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
