"""A Hugging Face tokenizer.json built from the vocabulary inside a GGUF file.

Two vocabularies cover the supported families: "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names how text is split
before merging) and "llama" (SentencePiece BPE; its merges are recovered from the vocabulary). The rules are llama.cpp's
(src/llama-vocab.cpp), which defines the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from spmd_serve.errors import UnsupportedModelError, WeightsError
from spmd_serve.models.gguf_file import one_line

_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> regular expressions, applied one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
    "deepseek-r1-qwen": (_LLAMA3.replace("{1,3}", ""),),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ADDS_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}  # where the file does not say
_WHOLE_WORDS_FIRST = _ADDS_BOS  # a word that is a token needs no merges


def write_tokenizer(architecture: str, meta: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Raises:
        UnsupportedModelError: a kind of vocabulary that is not known.
    """
    # Not by its own `save`, whose errors are plain Exceptions.
    (folder / "tokenizer.json").write_text(build_tokenizer(architecture, meta).to_str(pretty=True), encoding="utf-8")
    tokens = {kind: token_string(meta, name) for kind, name in _SPECIAL.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta.get(f"{architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(meta),
        "add_eos_token": bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        **{kind: token for kind, token in tokens.items() if token is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    if template := meta.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def token_id(meta: Mapping[str, Any], kind: str) -> int | None:
    """The id of the bos, eos, unknown or padding token, if the file names one that there is."""
    index = meta.get(f"tokenizer.ggml.{kind}_token_id")
    return index if index is not None and 0 <= index < len(meta["tokenizer.ggml.tokens"]) else None


def token_string(meta: Mapping[str, Any], kind: str) -> str | None:
    """The text of such a token."""
    index = token_id(meta, kind)
    return None if index is None else str(meta["tokenizer.ggml.tokens"][index])


def build_tokenizer(architecture: str, meta: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the GGUF metadata describes, including special tokens and the BOS/EOS rule.

    Raises:
        UnsupportedModelError: a kind of vocabulary that is not known.
        WeightsError: the vocabulary is incomplete or damaged.
    """
    kind = meta.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"the GGUF file has a '{kind}' vocabulary; supported are gpt2 and llama")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(meta)
        else:
            tokenizer = _sentencepiece(meta, gemma=architecture.startswith("gemma"))
        # What Phi-3's tokens swallow is not in its files: its chats have a line break after each that no model was shown.
        _add_special_tokens(tokenizer, meta, swallow_space=architecture == "phi3" and kind == "llama")
        _add_bos_and_eos(tokenizer, meta)
    except UnsupportedModelError:
        raise
    except KeyError as error:
        raise WeightsError(f"the GGUF file lacks {error}; fetch it again") from error
    except Exception as error:  # tokenizers raises bare Exception
        raise WeightsError(f"the GGUF file's vocabulary is damaged ({one_line(error)}); fetch it again") from error
    return tokenizer


def adds_bos(meta: Mapping[str, Any]) -> bool:
    """Whether encoding plain text starts with BOS."""
    default = meta.get("tokenizer.ggml.model") == "llama" or meta.get("tokenizer.ggml.pre") in _ADDS_BOS
    return bool(meta.get("tokenizer.ggml.add_bos_token", default)) and token_id(meta, "bos") is not None


def _byte_level(meta: Mapping[str, Any]) -> Tokenizer:
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        raise UnsupportedModelError(f"the GGUF file's pre-tokenizer '{pre}' is not known; known are {known}")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if meta.get("tokenizer.ggml.pre") == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: Mapping[str, Any], *, gemma: bool) -> Tokenizer:
    tokens = list(meta["tokenizer.ggml.tokens"])
    if gemma:
        # Runs of spaces are stored as spaces. Gemma's merges follow the order of its vocabulary, not the scores.
        tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
        priority = [-float(i) for i in range(len(tokens))]
    else:
        priority = list(meta["tokenizer.ggml.scores"])
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = token_id(meta, "unknown") or 0
    model = BPE(
        vocab=vocab,
        merges=_merges_from_vocabulary(tokens, vocab, priority),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    to_space: list[Any] = [normalizers.Replace(" ", _SPACE)]
    from_space: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("tokenizer.ggml.add_space_prefix", not gemma):
        to_space.insert(0, normalizers.Prepend(_SPACE))
        from_space.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(to_space)
    tokenizer.decoder = decoders.Sequence(from_space)
    return tokenizer


def _merges_from_vocabulary(
    tokens: list[str], vocab: Mapping[str, int], priority: list[float]
) -> list[tuple[str, str]]:
    """SentencePiece merges any two pieces whose concatenation is a piece, the best piece first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, priority, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-score, vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_special_tokens(tokenizer: Tokenizer, meta: Mapping[str, Any], *, swallow_space: bool) -> None:
    types = meta.get("tokenizer.ggml.token_type", ())
    special, plain = [], []
    for token, kind in zip(meta["tokenizer.ggml.tokens"], types, strict=False):
        rstrip = swallow_space and token not in ("<unk>", "<s>", "<|endoftext|>")
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL):
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        elif kind == TokenType.USER_DEFINED and tokenizer.token_to_id(token) is not None:
            plain.append(AddedToken(token, normalized=False, special=False, rstrip=rstrip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos_and_eos(tokenizer: Tokenizer, meta: Mapping[str, Any]) -> None:
    tokens = meta["tokenizer.ggml.tokens"]
    before, after, special = [], [], []
    bos, eos = token_id(meta, "bos"), token_id(meta, "eos")
    if adds_bos(meta) and bos is not None:
        before, special = [tokens[bos]], [(tokens[bos], bos)]
    if meta.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        after = [tokens[eos]]
        special.append((tokens[eos], eos))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=special
        )
