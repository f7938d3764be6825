"""Structured output: which tokens a grammar allows next. Every rank runs the same matcher on the same tokens.

The frontend has compiled the grammar once to validate it; what travels in SamplingParams.grammar is llguidance's
serialised form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_serve.errors import SpmdServeError


class Grammars:
    """Makes matchers for the model's tokenizer, which is read when the first grammar comes."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._tokenizer: Any = None

    def start(self, grammar: str, output: list[int]) -> GrammarState:
        """A matcher that has seen `output` already."""
        import llguidance

        if self._tokenizer is None:
            path = str(self._folder / "tokenizer.json")
            self._tokenizer = llguidance.LLTokenizer(path, n_vocab=self._vocab_size, eos_token=list(self._eos) or None)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise SpmdServeError(f"a grammar that the frontend accepted cannot be started: {matcher.get_error()}")
        state = GrammarState(matcher, self._vocab_size, self._eos)
        for token in output:
            state.accept(token)
        return state


class GrammarState:
    """One sequence's matcher."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = eos_token_ids

    def accept(self, token: int) -> None:
        """Advance by one token of the output."""
        if token not in self._eos and not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def allowed(self, vocab: range, device: torch.device) -> Tensor:
        """Tokens that may come next: bool [len(vocab)]. When the grammar is complete, only the EOS tokens."""
        if self._matcher.is_stopped():
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[list(self._eos)] = True
        else:
            mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            allowed = mask[: self._vocab_size] > 0
        return allowed[vocab.start : vocab.stop].to(device)
