"""Rows whose logits are no numbers: damaged weights, or values beyond the range of the model's type, as in some models in float16.

Such a row's request ends with an error, where argmax would give it token 0 until it has max_tokens of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from spmd_serve.scheduler.sequence import Sequence
from spmd_serve.types import NOT_A_TOKEN, StepTokens

BROKEN = (
    "the model's output for this request is not a number (NaN or infinity): its weights are damaged, or their values are too "
    "large for the server's --dtype (bfloat16 and float32 hold larger ones than float16)"
)


def find_broken(result: StepTokens, sampled: list[Sequence], chunks: list[Sequence]) -> Iterator[Sequence]:
    """The sequences, of a step's sampled rows and chunks, that nothing may be put out of; some of them more than once."""
    if NOT_A_TOKEN in result.tokens:
        yield from (s for s, token in zip(sampled, result.tokens, strict=True) if token == NOT_A_TOKEN)
    # Where no token is sampled, or a grammar allows none of those that are no numbers.
    yield from (sampled[i] for i, entry in result.logprobs.items() if not isfinite(entry.logprob))
    for i, entries in result.prompt_logprobs.items():
        if not all(isfinite(entry.logprob) for entry in entries):
            yield chunks[i]
