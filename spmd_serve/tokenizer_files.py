"""The tokenizer in a model's folder, as the frontend and structured output on every rank read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from spmd_serve.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file.

    Raises:
        ModelError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())  # UTF-8 with or without a BOM, whatever the locale says
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable as JSON ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the model again")
    return value


@dataclass(frozen=True)
class TokenizerConfig:
    """tokenizer_config.json; where it lists no added tokens, with what older folders have in files beside it.

    Attributes:
        added: id -> the tokens that it lists.
        roles: name -> text of the tokens that have a role, such as eos_token.
        special: those, and the others that it calls special, with the flags that it gives them.
        splits_special: whether the names of special tokens are plain text in a prompt.
    """

    added: dict[int, AddedToken]
    roles: dict[str, str]
    special: list[AddedToken]
    splits_special: bool


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """What transformers makes of the same files.

    Raises:
        ModelError: a file that cannot be read, or whose tokens are none.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    listed = config.get("added_tokens_decoder")
    if listed is None:
        config |= read_json(folder / "special_tokens_map.json")
    own = config.get("extra_special_tokens") or {}  # older files: a list, as additional_special_tokens is
    named = config | own if isinstance(own, dict) else config
    roles = {name: value for name, value in named.items() if name.endswith("_token") and _content(value) is not None}
    unnamed = [*_list(own), *_list(config.get("additional_special_tokens"))]
    special = [_special_token(value) for value in [*roles.values(), *unnamed] if _content(value) is not None]
    if listed is None:
        path = folder / "added_tokens.json"
        texts = {token.content for token in special}
        listed = {i: {"content": text, "special": text in texts} for text, i in read_json(path).items()}
    try:
        added = {int(i): AddedToken(entry["content"], **_flags(entry)) for i, entry in listed.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the list of added tokens in {path} is damaged ({type(error).__name__}: {error}); fetch the model again"
        ) from None
    return TokenizerConfig(
        dict(sorted(added.items())),
        {name: str(_content(value)) for name, value in roles.items()},
        special,
        config.get("split_special_tokens") is True,
    )


def _content(value: Any) -> str | None:
    """The text of a token as these files write it: a string or an AddedToken object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _flags(entry: dict[str, Any]) -> dict[str, bool]:
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {key: value for key in keys if isinstance(value := entry.get(key), bool)}


def _special_token(value: Any) -> AddedToken:
    flags = _flags(value) if isinstance(value, dict) else {}
    return AddedToken(_content(value), **flags | {"special": True})


def eos_of_tokenizer(folder: Path) -> int | None:
    """The id of the token that the tokenizer's files call EOS.

    Raises:
        ModelError: a file that cannot be read.
    """
    config = read_tokenizer_config(folder)
    text = config.roles.get("eos_token")
    if text is None:
        return None
    found = next((i for i, token in config.added.items() if token.content == text), None)
    if found is not None:
        return found
    whole = read_json(folder / "tokenizer.json")  # not a Tokenizer, which takes many times as long to make
    try:
        vocab = whole["model"]["vocab"]
        ids = vocab if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}  # a list in Unigram
        found = (ids | {token["content"]: token["id"] for token in whole["added_tokens"]}).get(text)
    except (LookupError, TypeError):  # which the tokenizer itself will say in its own way, where one is needed
        return None
    return found if isinstance(found, int) else None


def read_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json, with the tokens that only tokenizer_config.json knows, or knows otherwise, as transformers adds them.

    It neither truncates nor pads.

    Raises:
        ModelError: no tokenizer.json, or a file that cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json, the only kind of tokenizer that is read; give a folder that has one with --tokenizer "
            "(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) makes one of tokenizer.model and others)"
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_tokenizer_config(folder)
    tokenizer.encode_special_tokens = config.splits_special
    before = tokenizer.get_added_tokens_decoder().values()
    known = {repr(token) for token in before}
    hidden = {token.content for token in before if token.special}  # which stay so
    for token in config.added.values():
        token.special |= token.content in hidden
    tokenizer.add_tokens([token for token in config.added.values() if repr(token) not in known])
    # Special ones may be no more than words of the vocabulary. A name that is not in it would get an id that no model has.
    texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens(
        [t for t in config.special if t.content not in texts and tokenizer.token_to_id(t.content) is not None]
    )
    return tokenizer
