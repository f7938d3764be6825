"""Structured output: what the frontend, which checks a grammar, and every rank, which runs it, must do alike.

Both see the model's tokens through the same tokenizer files, compile under the same limits, and compile a text once.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import llguidance

from spmd_serve.errors import ModelError
from spmd_serve.tokenizer_files import read_tokenizer

# llguidance's limits are counts, so that all ranks decide alike. Compiling costs the square of a grammar's size, and a mask
# about as many items as it has alternatives in one place: 650 optional properties are just within the size, compile in 0.05 s
# and their masks take up to 0.005 s. What has as many alternatives as fit into the size has 2,500 items in a row; ambiguous
# grammars have more the longer the text, and cost the square of it: with 20,000 a mask took 1.6 s, which every row waits for.
MAX_SYMBOLS = 5000
MAX_ROW_ITEMS = 5000
STACK = 256 * 2**20  # bytes; only those touched are taken. 64 KB of definitions that name each other need 40 MB
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
        folder: of the tokenizer (tokenizer_files.py).
        vocab_size: of the model.
        eos_token_ids: of the model; without any, llguidance takes the tokenizer's.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = _begin_tokenizer(folder, vocab_size, eos_token_ids)
        self._limits = llguidance.LLParserLimits(
            max_grammar_size=MAX_SYMBOLS, max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False
        )
        self._lock = threading.Lock()  # for _kept; never held for long
        self._compiling = threading.Lock()
        self._kept: OrderedDict[str, Compiled] = OrderedDict()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a grammar. Raises ModelError as `compile` does."""
        return tuple(self._tokenizer.result().eos_tokens)

    def compile(self, grammar: str) -> Compiled:
        """The grammar, compiled now or before; users advance a `deep_copy()` of the matcher.

        Raises:
            ModelError: there is no tokenizer, or llguidance cannot work with it.
        """
        found = self.find(grammar)
        if found is None:
            with self._compiling:  # two threads with the same text: one compiles
                found = self.find(grammar) or self._compile(grammar)
                with self._lock:
                    self._kept[grammar] = found
                    if len(self._kept) > KEPT:
                        self._kept.popitem(last=False)
        return found

    def find(self, grammar: str) -> Compiled | None:
        """The grammar if it was compiled before; never waits for one that is being compiled."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
            return found

    def await_tokenizer(self) -> None:
        """Wait for what the first grammar needs. Raises ModelError as `compile` does."""
        self._tokenizer.result()

    def _compile(self, grammar: str) -> Compiled:
        """On a thread with a deep stack: llguidance recurses along definitions, and a stack that is full ends the process."""
        tokenizer = self._tokenizer.result()
        future: Future[Compiled] = Future()

        def make() -> None:
            try:
                began = time.thread_time()
                matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
                if not matcher.is_error():
                    matcher.compute_logit_bias()  # the first mask builds parts of the lexer, which copies then have already
                future.set_result(Compiled(matcher, str(matcher.get_error()), time.thread_time() - began))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=make, name="grammar-compile", daemon=True)
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        return future.result()


class PlainTokenizer:
    """llguidance's tokenizer, but what it makes of a text is that text, in ordinary tokens.

    Of text that a grammar forces, llguidance allows only the first token that its tokenizer makes of it. The text "<|im_end|>"
    would become the special token, which ends the answer, "<think>" the token of that name, and a tokenizer that normalizes
    makes other characters of some. None of that is what the grammar says, and llguidance then refuses the very token that it
    forced. A grammar that means the special token names it (in Lark without quotes).
    """

    bos_token_id = None

    def __init__(self, own: Any) -> None:
        self._own = own
        self.eos_token_id = own.eos_token
        self.tokens = [own.decode_bytes([token]) for token in range(own.vocab_size)]
        self.special_token_ids = [token for token in range(own.vocab_size) if own.is_special_token(token)]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        tokens: list[int] = self._own.tokenize_str(text)
        if not self._special.isdisjoint(tokens):
            tokens = [part for token in tokens for part in self._parts(token)]
        if b"".join([self.tokens[token] for token in tokens]) == text.encode():
            return tokens
        return self._greedy(text)

    def _parts(self, token: int) -> list[int]:
        """A special token's name in ordinary tokens; another token as it is."""
        return self._greedy(self.tokens[token].decode()) if token in self._special else [token]

    def _greedy(self, text: str) -> list[int]:
        """The longest ordinary token at each place."""
        tokens: list[int] = self._own.greedy_tokenize(text)
        return tokens


@lru_cache(maxsize=4)  # on rank 0, frontend and engine may be one process
def _begin_tokenizer(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Future[Any]:
    """llguidance's view of the tokenizer, or the ModelError why there is none.

    Making it takes half a second with 49k tokens: too long for the first request's step, and for a start that can go on
    meanwhile. So a thread makes it.
    """
    future: Future[Any] = Future()

    def make() -> None:
        try:
            tokenizer = read_tokenizer(folder)
            size = max(vocab_size, tokenizer.get_vocab_size())  # a tokenizer may have tokens that the model has not
            eos = list(eos_token_ids) or None
            own = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=eos)
            plain = llguidance.TokenizerWrapper(PlainTokenizer(own))
            future.set_result(llguidance.LLTokenizer(plain, n_vocab=size, eos_token=own.eos_tokens))
        except ModelError as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(ModelError(f"structured output does not work with this tokenizer: {_said(error)}"))

    # No daemon: Python waits for it before it ends, where llguidance would call into what is gone (a segmentation fault).
    threading.Thread(target=make, name="grammar-tokenizer").start()
    return future


def _said(error: Exception) -> str:
    """llguidance's message; for a decoder that it does not know it writes down the whole decoder, as Rust does."""
    found = re.search(r"can't determine decoder type: (?:Some\((\w+)|None)", str(error))
    if found is None:
        return str(error)
    decoder = f"the decoder {found[1]}" if found[1] else "no decoder"
    return f"it has {decoder}, and only decoders whose tokens are bytes (ByteLevel, ByteFallback) can follow a grammar"
