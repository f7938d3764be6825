"""Tokenizers from GGUF metadata: both kinds of vocabulary, how text is split, special tokens, what is missing or unknown."""

from typing import Any

import pytest
from support.vocabulary import SPECIALS, byte_level_vocabulary
from tokenizers import Regex, pre_tokenizers

from spmd_serve.errors import UnsupportedModelError, WeightsError
from spmd_serve.models.gguf_tokenizer import _SPLITS, adds_bos, build_tokenizer, token_string


def byte_level_meta(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    tokens, merges, kinds = byte_level_vocabulary()
    meta = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": kinds}
    return {f"tokenizer.ggml.{k}": v for k, v in (meta | {"bos_token_id": 1, "eos_token_id": 2} | more).items()}


def test_byte_level_tokenizer() -> None:
    tokenizer = build_tokenizer("llama", byte_level_meta())
    text = "hello<|im_end|> wörld 🎉\n\n12 <think>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:2] == ["hello", "<|im_end|>"]
    assert encoded.tokens[-1] == "<think>"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.decode(encoded.ids) == text.replace("<|im_end|>", "")  # <think> is no control token
    # The vocabulary's merges were learned on text whose digits stand alone.
    assert tokenizer.encode("\n\n1").tokens == ["ĊĊ", "1"]
    assert build_tokenizer("llama", byte_level_meta("default")).encode("\n\n1").tokens == ["Ċ", "Ċ", "1"]


def test_bos_rules() -> None:
    def first(**more: Any) -> str:
        return str(build_tokenizer("llama", byte_level_meta(**more)).encode("h").tokens[0])

    assert first() == "h"
    assert first(pre="llama-bpe") == "<s>"  # llama.cpp's default for that vocabulary
    assert first(pre="llama-bpe", add_bos_token=False) == "h"
    assert first(add_bos_token=True) == "<s>"
    assert build_tokenizer("llama", byte_level_meta(add_eos_token=True)).encode("h").tokens == ["h", "</s>"]


def sentencepiece_meta(**more: Any) -> dict[str, Any]:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello"]
    tokens = [*SPECIALS, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces), 0, -1)]
    kinds = [2, *[3] * (len(SPECIALS) - 1), *[6] * 256, *[1] * len(pieces)]
    meta = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    return {f"tokenizer.ggml.{k}": v for k, v in (meta | {"bos_token_id": 1, "eos_token_id": 2} | more).items()}


def test_sentencepiece_tokenizer() -> None:
    tokenizer = build_tokenizer("llama", sentencepiece_meta())
    encoded = tokenizer.encode("hello ho é")
    assert encoded.tokens == ["<s>", "▁hello", "▁h", "o", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "hello ho é"
    assert build_tokenizer("llama", sentencepiece_meta(add_bos_token=False)).encode("h").tokens == ["▁h"]
    gemma = build_tokenizer("gemma3", sentencepiece_meta())
    assert gemma.encode("hello").tokens == ["<s>", "h", "el", "lo"]
    assert gemma.decode(gemma.encode(" hello").ids) == " hello"


def test_phi_3_swallows_the_space_after_its_tokens() -> None:
    """As its tokenizer.json says, and no field of a GGUF file does: llama.cpp knows it by the model's name."""
    chat = "<|im_start|>\nhello<|im_end|>\n<s> h"
    phi = build_tokenizer("phi3", sentencepiece_meta())
    tokens = [phi.id_to_token(i) for i in phi.encode(chat).ids]
    assert tokens == ["<s>", "<|im_start|>", "▁hello", "<|im_end|>", "<s>", "▁", "▁h"]
    assert "<0x0A>" in build_tokenizer("llama", sentencepiece_meta()).encode(chat).tokens
    assert "Ċ" in build_tokenizer("phi3", byte_level_meta()).encode("<|im_end|>\n").tokens  # Phi-4's vocabulary


def test_the_unknown_token_is_special() -> None:
    tokenizer = build_tokenizer("llama", sentencepiece_meta())
    assert tokenizer.encode("<unk>").ids == [1, 0]
    assert tokenizer.decode([0]) == ""


def test_vocabularies_that_lack_something_are_refused() -> None:
    for meta in (byte_level_meta(), sentencepiece_meta()):
        for key in ("tokens", "merges" if "tokenizer.ggml.merges" in meta else "scores"):
            rest = {name: value for name, value in meta.items() if name != f"tokenizer.ggml.{key}"}
            with pytest.raises(WeightsError, match=rf"lacks 'tokenizer\.ggml\.{key}'"):
                build_tokenizer("llama", rest)
    with pytest.raises(WeightsError, match="vocabulary is damaged"):
        build_tokenizer("llama", byte_level_meta(merges=["no such"]))


def test_special_tokens_that_the_vocabulary_has_not_are_none() -> None:
    meta = byte_level_meta(add_bos_token=True, add_eos_token=True, bos_token_id=2**32 - 1, eos_token_id=9999)
    assert build_tokenizer("llama", meta).encode("h").tokens == ["h"]
    assert (token_string(meta, "bos"), token_string(meta, "eos"), adds_bos(meta)) == (None, None, False)


def test_words_of_gpt_4o_keep_their_contractions_and_case() -> None:
    (pattern,) = _SPLITS["gpt-4o"]
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    words = [word for word, _ in split.pre_tokenize_str("I've XMLHttp 12345 don't/\n")]
    assert words == ["I've", " XMLHttp", " ", "123", "45", " don't", "/\n"]


def test_unknown_vocabularies_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'bert' vocabulary"):
        build_tokenizer("llama", byte_level_meta(model="bert"))
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'mystery'"):
        build_tokenizer("llama", byte_level_meta(pre="mystery"))
