"""What becomes of a request that arrives: a Sequence, or its refusal."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_serve.config import SchedulerOptions
from spmd_serve.scheduler.sequence import Sequence
from spmd_serve.types import Finish, FinishReason, Lengths, Request

_TOKEN_BYTES = 4  # Request.prompt is int32


@dataclass
class Intake:
    """The limits that requests are held against.

    Attributes:
        options: policy and default deadline.
        lengths: of prompts and answers, in tokens.
        short_context: see ModelConfig.short_context.
        eos_token_ids: ids that end a sequence unless it ignores them.
        prefix_cache, overlap: as the Scheduler has them.
        arrived: how many sequences were made.
    """

    options: SchedulerOptions
    lengths: Lengths
    short_context: int
    eos_token_ids: frozenset[int]
    prefix_cache: bool
    overlap: bool
    arrived: int = 0

    def refuse(self, request: Request, *, draining: bool, waiting: int, free_rows: int) -> Finish | None:
        """The terminal output of a request that can not run, or must not wait; None if it may go on."""
        if draining:
            return _refusal(request, "the server is shutting down; ask another one", "draining")
        misfit = self.misfit(request)
        if misfit is None and waiting >= self.options.max_queue + free_rows:  # those that get a row at once do not wait
            message = f"the queue is full: {self.options.max_queue} requests may wait (--max-queue); try again later"
            return _refusal(request, message, "overloaded")
        return misfit

    def misfit(self, request: Request) -> Finish | None:
        """The terminal output of a request that could never run."""
        length = len(request.prompt) // _TOKEN_BYTES
        longest = self.lengths.longest_prompt(request.params.max_tokens)
        if length == 0:
            return _refusal(request, "the prompt is empty; give at least one token", "empty_prompt")
        if length <= longest:
            return None
        message = (
            f"the prompt has {length} tokens; at most {longest} fit "
            f"(maximum context length {self.lengths.max_model_len}, KV pool {self.lengths.pool} tokens)"
        )
        return _refusal(request, message, "context_length_exceeded")  # clients know by these words, or by the code

    def make_sequence(self, request: Request, now: float) -> Sequence:
        """A new Sequence. `now` is rank 0's time in seconds."""
        options, params = self.options, request.params
        order = (request.priority if options.schedule == "priority" else 0, self.arrived)
        self.arrived += 1
        deadline = request.deadline
        if deadline is None and options.request_timeout is not None:
            deadline = now + options.request_timeout
        limit = min(len(request.prompt) // _TOKEN_BYTES + params.max_tokens, self.lengths.longest)
        return Sequence(
            request,
            order=order,
            deadline=deadline,
            limit=limit,
            switch_at=self.short_context or limit,
            stop_ids=params.stop_ids(self.eos_token_ids),
            # Logprobs of the prompt need its logits: nothing is reused, and the same request has the same values twice.
            use_cache=self.prefix_cache and params.prompt_logprobs is None,
            synchronous=self.overlap and params.grammar is not None,
        )


def _refusal(request: Request, message: str, code: str) -> Finish:
    return Finish(request.uid, FinishReason.ERROR, message, code)
