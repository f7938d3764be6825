"""Structured output: what the frontend, which checks a grammar, and every rank, which runs it, must do alike.

Both see the model's tokens through the same tokenizer files, compile under the same limits, and compile a text once.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
from tokenizers import AddedToken, Tokenizer

from spmd_serve.errors import ModelError

# llguidance's limits are counts, so that all ranks decide alike. Compiling costs the square of a grammar's size, and a mask
# about as many items as it has alternatives in one place: 650 optional properties are just within the size, compile in 0.05 s
# and their masks take up to 0.005 s. What has as many alternatives as fit into the size must not run into the limit of a row.
MAX_SYMBOLS = 5000
MAX_ROW_ITEMS = 20_000
KEPT = 64  # compiled grammars; a few MB each at most


@dataclass(frozen=True)
class Compiled:
    """A grammar's matcher before the first token, never advanced itself.

    Attributes:
        problem: why there is none; "" when it can be used.
        seconds: of CPU time that compiling took.
    """

    matcher: Any
    problem: str
    seconds: float


class CompiledGrammars:
    """Compiles grammars, in llguidance's JSON form or Lark text, and keeps the latest. May be used from several threads.

    Args:
        tokenizer_json: see `tokenizer_json()`.
        vocab_size: of the model.
        eos_token_ids: of the model; without any, llguidance takes the tokenizer's.

    Raises:
        ModelError: llguidance cannot work with this tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        # The constructor holds the GIL, half a second with 49k tokens: it belongs to the start, not to the first request.
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
            )
        except ValueError as error:
            raise ModelError(f"structured output does not work with this tokenizer: {error}") from None
        self.eos_token_ids: tuple[int, ...] = tuple(self._tokenizer.eos_tokens)
        self._limits = llguidance.LLParserLimits(
            max_grammar_size=MAX_SYMBOLS, max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False
        )
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Compiled] = OrderedDict()

    def compile(self, grammar: str) -> Compiled:
        """The grammar, compiled now or before; users advance a `deep_copy()` of the matcher."""
        with self._lock:  # two threads with the same text: one compiles
            found = self._kept.get(grammar)
            if found is None:
                found = self._kept[grammar] = self._compile(grammar)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(grammar)
            return found

    def _compile(self, grammar: str) -> Compiled:
        began = time.thread_time()
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_logit_bias()  # the first mask builds parts of the lexer, which copies then have already
        return Compiled(matcher, str(matcher.get_error()), time.thread_time() - began)


def tokenizer_json(folder: Path) -> str:
    """The tokenizer of a folder as tokenizer.json, with the tokens that only tokenizer_config.json knows.

    Raises:
        ModelError: no tokenizer.json, or a file that cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; give a folder that has one with --tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text()) if config_path.is_file() else {}
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"the tokenizer in {folder} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = tokenizer.get_added_tokens_decoder()
    entries = {int(i): entry for i, entry in (config.get("added_tokens_decoder") or {}).items()}
    for _, entry in sorted((i, entry) for i, entry in entries.items() if i not in known):
        flags = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
        token = AddedToken(entry["content"], **flags)
        (tokenizer.add_special_tokens if flags.get("special") else tokenizer.add_tokens)([token])
    return str(tokenizer.to_str())
