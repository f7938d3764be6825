"""Structured output: which tokens a grammar allows next. Every rank runs the same matcher on the same tokens.

The frontend has compiled the grammar once to validate it; what travels in SamplingParams.grammar is llguidance's
serialised form.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_serve.errors import ModelError
from spmd_serve.structured_output import CompiledGrammars


class Grammars:
    """Makes matchers for the tokenizer in `folder`.

    A model may have no tokenizer (random weights serve token ids): then every sequence with a grammar ends with an error.
    """

    # The worst case of a step is that all its new rows bring a grammar of their own that is as costly as the frontend lets
    # pass (its MAX_COMPILE_SECONDS, 0.2): with 256 rows 51 s, below the default --step-timeout. With the largest JSON schemas
    # (0.05 s each, measured) it is 12 s. Rows that share a grammar compile it once; a copy takes 0.0002 s.

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._compiled = CompiledGrammars(folder, vocab_size, eos_token_ids)

    def start(self, grammar: str, output: list[int]) -> GrammarState:
        """A matcher that has seen `output` already."""
        try:
            compiled = self._compiled.compile(grammar)
        except ModelError as error:
            return GrammarState(None, str(error), self._vocab_size, ())
        problem = f"the grammar is not valid: {_brief(compiled.problem)}" if compiled.problem else ""
        state = GrammarState(compiled.matcher.deep_copy(), problem, self._vocab_size, self._compiled.eos_token_ids)
        for token in output:
            state.accept(token)
        return state


class GrammarState:
    """One sequence's matcher, or the `problem` why there is none. `eos_token_ids` are those that end the grammar."""

    def __init__(self, matcher: Any, problem: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._problem = problem
        self._vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def accept(self, token: int) -> str | None:
        """Advance by one token of the output.

        Returns:
            None when the output goes on; "" when `token` ended it, complete; else why the grammar cannot go on.
        """
        if not self._problem:
            self._matcher.consume_token(token)
            error = self._matcher.get_error()  # a limit of the parser, for instance: counts, alike on all ranks
            if error:
                self._problem = f"the grammar cannot be followed any further: {_brief(error)}"
        if self._problem:
            return self._problem
        return "" if token in self.eos_token_ids and self._matcher.is_stopped() else None

    def allowed(self, vocab: range, device: torch.device, hidden: Sequence[int] = ()) -> Tensor:
        """Tokens that may come next: bool [len(vocab)]. When the grammar is complete, only the EOS tokens.

        Args:
            hidden: ids that are not wanted yet. They are allowed all the same when the grammar allows nothing else.
        """
        if self._problem:  # whatever is drawn ends the sequence
            return torch.ones(len(vocab), dtype=torch.bool, device=device)
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        allowed = mask[: self._vocab_size] > 0
        if hidden:
            others = allowed.clone()
            others[list(hidden)] = False
            allowed = others if others.any() else allowed
        return allowed[vocab.start : vocab.stop].to(device)


def _brief(error: str) -> str:
    """The first line of llguidance's message; the others show the grammar."""
    if "NoExtension" in error:  # its name for a text that nothing may follow, though it is not complete
        return "it allows no text after this one"
    return error.splitlines()[0][:300]
