"""What the scheduler has produced and nobody has taken yet, and the counters of it."""

from __future__ import annotations

from spmd_serve.scheduler.sequence import Sequence, SequenceStatus
from spmd_serve.types import PrefillChunk, StepOutput, TokenLogprobs


class Outbox:
    """Fills the columns of the next StepOutput. Only the scheduler mutates it; it appends tokens and terminal outputs itself."""

    def __init__(self) -> None:
        self.output = StepOutput(0)
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.generation_tokens_total = 0

    def take(self, step: int) -> StepOutput:
        """Everything since the last call."""
        output, self.output = self.output, StepOutput(0)
        output.step = step
        self.generation_tokens_total += len(output.tokens)
        return output

    def start(self, sequence: Sequence) -> None:
        """A sequence's first token is on its way out; not more than once, however often its prompt is computed."""
        if sequence.started:
            return
        sequence.started = True
        cached = sequence.cached_tokens or 0
        self.output.started.append((sequence.uid, cached))
        self.prompt_tokens_total += sequence.num_prompt
        self.cached_tokens_total += cached

    def add_logprobs(self, sampled: list[Sequence], logprobs: dict[int, TokenLogprobs]) -> None:
        """Before the step's tokens are appended: logprobs by sampled row, for the rows that these tokens will have."""
        row = len(self.output.uids)
        for i, sequence in enumerate(sampled):
            if sequence.status is not SequenceStatus.FINISHED:
                if i in logprobs:
                    self.output.logprobs[row] = logprobs[i]
                row += 1

    def add_prompt_logprobs(self, sequence: Sequence, chunk: PrefillChunk, logprobs: list[TokenLogprobs]) -> None:
        """The logprobs of the prompt tokens behind a chunk; what was put out before a preemption is left out."""
        first = chunk.start + 1
        fresh = logprobs[max(sequence.logprobs_end - first, 0) :]
        if fresh and sequence.status is not SequenceStatus.FINISHED:
            end = first + len(logprobs)
            self.output.prompt_logprobs.append((sequence.uid, end - len(fresh), fresh))
            sequence.logprobs_end = end
