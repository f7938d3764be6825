"""The tokenizer in a model's folder, as the frontend and structured output on every rank read it."""

from __future__ import annotations

import json
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


def read_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json, with the tokens that only tokenizer_config.json knows or calls special, as transformers adds them.

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
    try:
        _add_missing_tokens(tokenizer, read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"added_tokens_decoder in {folder / 'tokenizer_config.json'} is damaged ({type(error).__name__}: {error}); fetch "
            "the model again"
        ) from None
    return tokenizer


def _add_missing_tokens(tokenizer: Tokenizer, entries: dict[str, Any]) -> None:
    known = tokenizer.get_added_tokens_decoder()
    missing = [
        (int(i), entry)
        for i, entry in entries.items()
        if int(i) not in known or (entry.get("special") and not known[int(i)].special)
    ]
    for _, entry in sorted(missing, key=lambda pair: pair[0]):
        flags = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
        token = AddedToken(entry["content"], **flags)
        (tokenizer.add_special_tokens if flags.get("special") else tokenizer.add_tokens)([token])
