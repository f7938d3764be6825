"""Tokens to text, one at a time: exact, linear, and holding back no more than it must.

A byte-level or byte-fallback tokenizer gives each token fixed bytes, so that text is an incremental UTF-8 decoding of
their concatenation. tokenizers' own DecodeStream decodes its whole backlog again with every token while a character is
incomplete, which is quadratic for a run of bytes that never completes one; it serves only the tokenizers whose decoder
is not bytes (see `TextStream`), and with a bounded backlog.

Stop strings are found with one automaton for each request (Aho and Corasick, 1975): which match is taken depends on
the text alone and not on how it was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

SPACE = "\u2581"  # SentencePiece's
MAX_BACKLOG = 16  # tokens that may wait for a character in a TextStream

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one sequence of tokens."""

    def step(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""

    def flush(self) -> str:
        """The text of an incomplete character at the end (U+FFFD); called once."""


class ByteTable:
    """What each token id stands for; made once for a tokenizer and shared by all its streams.

    Attributes:
        data: the bytes of each id; b"" for ids that are not in the vocabulary.
        text: the same as text where the bytes are whole characters by themselves, else None.
    """

    def __init__(self, data: list[bytes]) -> None:
        self.data = data
        self.text = [_whole_text(piece) for piece in data]


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class ByteStream:
    """Detokenizer over a ByteTable."""

    __slots__ = ("_data", "_decoder", "_partial", "_text")

    def __init__(self, table: ByteTable) -> None:
        self._text = table.text
        self._data = table.data
        self._decoder: codecs.IncrementalDecoder | None = None
        self._partial = False

    def step(self, token: int) -> str:
        if not self._partial:
            text = self._text[token]
            if text is not None:
                return text
        if self._decoder is None:
            self._decoder = _Utf8Decoder("replace")
        text = self._decoder.decode(self._data[token])
        self._partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        if not self._partial or self._decoder is None:
            return ""
        self._partial = False
        return self._decoder.decode(b"", True)


class TextStream:
    """Detokenizer for tokenizers whose text is not the concatenation of their tokens (WordPiece and the like).

    Here an incomplete character cannot be told from a long one by its bytes, so a backlog of more than MAX_BACKLOG
    tokens is given out as it is.
    """

    __slots__ = ("_backlog", "_skip_special", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._backlog: list[int] = []

    def step(self, token: int) -> str:
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # bare: with this token, what has been given out would read otherwise
            self._backlog.append(token)
            return self._restart()
        if text is not None:
            self._backlog.clear()
            return text
        self._backlog.append(token)
        return self._restart() if len(self._backlog) > MAX_BACKLOG else ""

    def flush(self) -> str:
        return self._restart() if self._backlog else ""

    def _restart(self) -> str:
        text: str = self._tokenizer.decode(self._backlog, skip_special_tokens=self._skip_special)
        self._backlog.clear()
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        return text


# ---- which bytes a token stands for -------------------------------------------------------------------------------


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """A byte-level token's bytes; a token with a character outside of the alphabet is taken as it stands."""
    try:
        return bytes(map(alphabet.__getitem__, token))
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str, byte_fallback: bool) -> bytes:
    """A SentencePiece token's bytes: U+2581 is a space; with byte_fallback, <0xNN> is a byte."""
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()


# ---- stop strings -------------------------------------------------------------------------------------------------


class StopStrings:
    """The automaton of a request's stop strings; shared by its choices and never changed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]  # characters of the longest prefix of a stop string that ends here: what must be held back
        self.match = [0]  # length of the longest stop string that ends here; 0 is none
        self.fallback = [0]
        for stop in stops:
            state = 0
            for char in stop:
                following = self.children[state].get(char)
                if following is None:
                    following = len(self.children)
                    self.children[state][char] = following
                    self.children.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(0)
                    self.fallback.append(0)
                state = following
            self.match[state] = len(stop)
        queue = list(self.children[0].values())
        for state in queue:
            for char, following in self.children[state].items():
                self.fallback[following] = self.next(self.fallback[state], char)
                self.match[following] = self.match[following] or self.match[self.fallback[following]]
                queue.append(following)

    def next(self, state: int, char: str) -> int:
        """The state after `char`."""
        children = self.children
        while char not in children[state]:
            if not state:
                return 0
            state = self.fallback[state]
        return children[state][char]


class StopSearch:
    """Looks for stop strings in one choice's text. The match that ends first is taken; of those, the longest."""

    __slots__ = ("_held", "_include", "_state", "_stops")

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was completed). After True nothing more may be fed.

        Without `may_stop`, what `text` completes is passed over; what begins in it may be completed later.
        """
        stops, state = self._stops, self._state
        for position, char in enumerate(text):
            state = stops.next(state, char)
            if may_stop and stops.match[state]:
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._include else whole[: len(whole) - stops.match[state]]), True
        self._state = state
        whole = self._held + text
        shown = len(whole) - stops.depth[state]
        self._held = whole[shown:]
        return whole[:shown], False

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
