"""A folder's tokenizer is the one that transformers makes of it, wherever its files name the special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from spmd_serve.errors import ModelError
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.tokenizer_files import eos_of_tokenizer

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<|user|>", "<|end|>"]
ID = {token: i for i, token in enumerate(TOKENS)}
NEW = len(TOKENS)  # the first id that tokenizer.json lacks
TEXTS = ["hello <|user|> x<|end|>\n</s> x", "<s>a</s>", "<new>", " <|user|>\n\na   <|end|>  "]


def entry(text: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": text, **plain, **flags}


def listed(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(ID.get(e["content"], NEW)): e for e in entries}}


def write(folder: Path, config: Any, added: tuple[str, ...] = ("<s>", "</s>"), **files: Any) -> None:
    tokenizer = Tokenizer(BPE(vocab=ID, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"} | config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a role for a word of the vocabulary": ({"bos_token": "<s>", "eos_token": "<|end|>"}, {}),
    "a role as an object": ({"eos_token": {"__type": "AddedToken", **entry("<|end|>", rstrip=True)}}, {}),
    "additional": ({"additional_special_tokens": ["<|user|>", "<|end|>"]}, {}),
    "extra": ({"extra_special_tokens": ["<|user|>", "<|end|>"]}, {}),
    "extra with names": ({"extra_special_tokens": {"image_token": "<|user|>"}}, {}),
    "an older folder": (
        {"bos_token": None},
        {"special_tokens_map": {"bos_token": "<s>", "additional_special_tokens": ["<|user|>"]}},
    ),
    "a map beside a list": (
        {"eos_token": "</s>"} | listed(entry("</s>")),
        {"special_tokens_map": {"bos_token": "<s>", "additional_special_tokens": ["<|user|>"]}},
    ),
    "added_tokens.json": ({}, {"added_tokens": {"<|user|>": ID["<|user|>"], "<new>": NEW}}),
    "other flags": (
        listed(entry("<|user|>", rstrip=True), entry("</s>", lstrip=True)),
        {"added": ("</s>", "<|user|>")},
    ),
    "no longer special": (listed(entry("<|user|>", special=False)), {"added": ("<|user|>",)}),
    "names are plain text": ({"eos_token": "</s>", "split_special_tokens": True}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_special_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    config, rest = CASES[name]
    write(tmp_path, config, **rest)
    ours, theirs = TextTokenizer(tmp_path, 300), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special_tokens == {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)}
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_a_role_for_what_is_no_token(tmp_path: Path) -> None:
    """An id of its own would be one that the model has no embedding for, and a prompt with that text refused."""
    write(tmp_path, {"pad_token": "[PAD]"})
    tokenizer = TextTokenizer(tmp_path, NEW)
    assert tokenizer.decode(tokenizer.encode("[PAD]")) == "[PAD]"
    assert eos_of_tokenizer(tmp_path) is None


@pytest.mark.parametrize("config", [{}, {"eos_token": None}, {"eos_token": "</s>"}], ids=str)
def test_eos_wherever_it_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, config)
    assert eos_of_tokenizer(tmp_path) == (ID["</s>"] if config.get("eos_token") else None)
    write(tmp_path, config, special_tokens_map={"eos_token": entry("<|end|>")})
    assert eos_of_tokenizer(tmp_path) == ID["<|end|>"]
    whole = json.loads((tmp_path / "tokenizer.json").read_bytes())
    whole["model"] = {"type": "Unigram", "vocab": [[token, -1.0] for token in reversed(TOKENS)]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert eos_of_tokenizer(tmp_path) == 0
    for damaged in ("{}", '{"model": []}', '{"model": {"vocab": [3]}}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        assert eos_of_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["special_tokens_map", "added_tokens"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, {}, **{name: []})
    with pytest.raises(ModelError, match=name):
        TextTokenizer(tmp_path, 300)
    (tmp_path / f"{name}.json").write_text(
        json.dumps(
            {"</s>": "x"}
            if name == "added_tokens"
            else {"eos_token": 5, "pad_token": {"content": "<s>", "lstrip": None}}
        )
    )
    if name == "added_tokens":
        with pytest.raises(ModelError, match=r"added_tokens\.json is damaged"):
            TextTokenizer(tmp_path, 300)
    else:
        assert TextTokenizer(tmp_path, 300).special_tokens == {"pad_token": "<s>"}
