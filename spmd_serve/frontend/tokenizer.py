"""The model's tokenizer: text to ids and ids to text, from a local folder, without transformers and torch.

`tokenizers.Tokenizer` is used as it is. Encoding goes through `encode_batch_fast`, which releases the GIL (`encode`
holds it), so that a tokenizer thread with a long text does not stop the event loop.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from spmd_serve.errors import RequestError
from spmd_serve.frontend.detokenizer import (
    SPACE,
    ByteStream,
    ByteTable,
    Detokenizer,
    TextStream,
    byte_level_alphabet,
    byte_level_bytes,
    sentencepiece_bytes,
)
from spmd_serve.tokenizer_files import read_tokenizer, read_tokenizer_config

MAX_LOST = 256  # characters of a text that its tokens may lack in one place


class TextTokenizer:
    """One tokenizer; all methods may be called from several threads.

    Args:
        folder: has tokenizer.json and, usually, tokenizer_config.json.
        vocab_size: of the model; ids from the tokenizer's size up to it stand for no text.

    Raises:
        ModelError: no tokenizer.json, or one that cannot be read.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self._tokenizer: Tokenizer = read_tokenizer(folder)
        self.vocab_size = vocab_size
        self.special_ids = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self.special_tokens = read_tokenizer_config(folder).roles
        self.bos_id = self.token_id(self.special_tokens.get("bos_token"))
        self._shown = self._make_table()
        self._hidden = self._without_special(self._shown)
        self.max_token_bytes = max((len(data) for data in self._shown.data), default=1) if self._shown else None

    def _make_table(self) -> ByteTable | None:
        """Bytes of every id, or None for a decoder that is not the concatenation of its tokens' bytes."""
        own = self._tokenizer.decoder
        decoder = {} if own is None else json.loads(own.__getstate__())  # to_str() would write the vocabulary too
        parts = decoder.get("decoders", [decoder])  # of a Sequence
        kinds = {part.get("type") for part in parts}
        # A whole text begins without the space that SentencePiece puts before it; a continuation keeps it.
        self._strips_space = any(part.get("start") or part.get("prepend_scheme", "never") != "never" for part in parts)
        size = max(self.vocab_size, self._tokenizer.get_vocab_size(with_added_tokens=True))
        tokens = [self._tokenizer.id_to_token(i) or "" for i in range(size)]
        if kinds == {"ByteLevel"}:
            alphabet = byte_level_alphabet()
            return ByteTable([byte_level_bytes(token, alphabet) for token in tokens])
        if kinds != {"Fuse"} and all(map(_is_of_sentencepiece, parts)):
            return ByteTable([sentencepiece_bytes(token, "ByteFallback" in kinds) for token in tokens])
        return None

    def _without_special(self, table: ByteTable | None) -> ByteTable | None:
        if table is None:
            return None
        return ByteTable([b"" if i in self.special_ids else data for i, data in enumerate(table.data)])

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> array[int]:
        """Ids of one text as int32. Special tokens are those that the tokenizer adds by default, such as BOS.

        Raises:
            RequestError: the text has what the tokenizer has no token for; `field` is the request's that it came in.
        """
        try:
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # tokenizers raises bare Exception
            why = _no_text(text) or error
            raise RequestError(f"this model's tokenizer cannot encode the text: {why}", param=field) from None
        return array("i", encoding.ids)

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without encoding: no token is longer than the longest one."""
        if self.max_token_bytes is None:
            return 0
        return len(text) // max(1, self.max_token_bytes)

    def token_id(self, token: str | None) -> int | None:
        """Id of a token by its exact name."""
        if token is None:
            return None
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    # ---- ids to text

    def stream(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one sequence."""
        table = self._hidden if skip_special_tokens else self._shown
        if table is None:
            return TextStream(self._tokenizer, skip_special_tokens)
        return ByteStream(table)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The whole text of some ids, from a text's beginning."""
        stream = self.stream(skip_special_tokens)
        text = "".join([stream.step(i) for i in ids]) + stream.flush()
        return text.removeprefix(" ") if self._strips_space else text

    def offsets(self, ids: Sequence[int], text: str, skip_special_tokens: bool) -> list[int]:
        """Where in `text` each of `ids` begins, in characters: `text` was given, or is `decode` of them.

        Tokens that the text has nothing of (an added BOS, one that is skipped) stand where the text goes on.
        """
        stream = self.stream(skip_special_tokens)
        offsets, end = [], 0
        for token in ids:
            start, end = _place(stream.step(token), text, end, token in self.special_ids)
            offsets.append(start)
        return offsets

    def token_bytes(self, token: int) -> bytes:
        """What one id stands for by itself, special tokens included."""
        if self._shown is not None:
            return self._shown.data[token]
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode()

    def token_name(self, token: int) -> str:
        """The id's text, or `bytes:\\xNN...` (OpenAI's notation) when its bytes are not whole characters."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + re.sub("..", r"\\x\g<0>", data.hex())


def _no_text(text: str) -> str:
    """Why these characters are no text; empty if they are. A Python string may hold what no UTF-8 does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair"
    return ""


def _is_of_sentencepiece(part: dict[str, Any]) -> bool:
    """Whether this decoder does nothing but what `sentencepiece_bytes` does, or strips a text's first space."""
    kind = part.get("type")
    if kind == "Replace":
        return (part["pattern"], part["content"]) == ({"String": SPACE}, " ")
    if kind == "Strip":
        return (part["content"], part["stop"]) == (" ", 0)
    return kind in ("ByteFallback", "Fuse") or (kind, part.get("replacement")) == ("Metaspace", SPACE)


def _place(piece: str, text: str, position: int, special: bool) -> tuple[int, int]:
    """(start, end) of a token's `piece` in `text`, where the tokens before it end at `position`.

    The pieces mostly add up to the text. But SentencePiece puts a space before a text, and after special tokens; some
    special tokens swallow the white space around them; and some tokenizers change characters (NFC).
    """
    if text.startswith(piece, position):  # nearly always
        return position, position + len(piece)
    lost = text[position : position + MAX_LOST]
    for start in (position, position + len(lost) - len(lost.lstrip())):
        for part in (piece, piece.removeprefix(" ")):
            if text.startswith(part, start):
                return start, start + len(part)
    start = -1 if special else text.find(piece, position, position + len(piece) + MAX_LOST)
    if start >= 0:
        return start, start + len(piece)
    return position, position
