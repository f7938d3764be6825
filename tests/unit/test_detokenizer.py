"""Incremental detokenization and stop strings: exact whatever the split, and linear."""

from __future__ import annotations

import json
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_service import VOCAB, bundled_tokenizer, model_folder
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from spmd_serve.frontend.detokenizer import (
    ByteStream,
    ByteTable,
    StopSearch,
    StopStrings,
    TextStream,
    byte_level_alphabet,
    sentencepiece_bytes,
)
from spmd_serve.frontend.tokenizer import TextTokenizer

TEXTS = [
    "héllo wörld",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "a\u0301 e\u0301",
    "مرحبا",
    "tab\tnew\nline\r\n",
    "\U0001f600" * 20,
]


@cache
def reference() -> Tokenizer:
    """tokenizers itself, whose decoding of all ids at once is the truth."""
    return Tokenizer.from_file(str(model_folder() / "tokenizer.json"))


@pytest.fixture
def tokenizer() -> TextTokenizer:
    return bundled_tokenizer()


def streamed(tokenizer: TextTokenizer, ids: list[int], skip: bool = True) -> tuple[list[str], str]:
    stream = tokenizer.stream(skip)
    return [stream.step(i) for i in ids], stream.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    pieces, tail = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert tail == ""
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_cut_at_every_token_has_one_tail(tokenizer: TextTokenizer, text: str) -> None:
    """As max_tokens cuts: whole characters, then at most one tail of replacement characters, as the tokenizer itself says."""
    ids = tokenizer.encode(text).tolist()
    for cut in range(len(ids) + 1):
        pieces, tail = streamed(tokenizer, ids[:cut])
        assert "".join(pieces) + tail == reference().decode(ids[:cut])
        assert text.startswith("".join(pieces))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.booleans())
def test_any_ids_equal_the_tokenizers_own_decoding(ids: list[int], skip: bool) -> None:
    pieces, tail = streamed(bundled_tokenizer(), ids, skip)
    assert "".join(pieces) + tail == reference().decode(ids, skip_special_tokens=skip)


def test_every_single_token(tokenizer: TextTokenizer) -> None:
    for token in range(VOCAB):
        data = tokenizer.token_bytes(token)
        assert data.decode(errors="replace") == reference().decode([token], skip_special_tokens=False)


def test_bytes_that_never_complete_a_character_take_linear_time(tokenizer: TextTokenizer) -> None:
    lead = next(i for i in range(VOCAB) if tokenizer.token_bytes(i) == b"\xe2")

    def run(count: int) -> float:
        best = 1e9
        for _ in range(3):
            began = time.thread_time()  # other tests share the cores
            pieces, tail = streamed(tokenizer, [lead] * count)
            best = min(best, time.thread_time() - began)
            assert "".join(pieces) + tail == "\ufffd" * count
        return best

    assert run(16_000) < 10 * run(4_000)  # 4 if linear, 16 if quadratic
    assert run(4_000) < 0.5


# ---- other kinds of tokenizers ------------------------------------------------------------------------------------


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_byte_fallback_tokenizer(tmp_path: Path) -> None:
    """SentencePiece's kind: bytes as <0xNN>, spaces as U+2581."""
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁b": 3, **{f"<0x{b:02X}>": 4 + b for b in range(256)}}
    plain = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    plain.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    save(plain, tmp_path)
    tokenizer = TextTokenizer(tmp_path, 300)
    ids = [2, 3, *(4 + b for b in "é😀".encode()), 1, 2]
    pieces, tail = streamed(tokenizer, ids)
    assert "".join(pieces) + tail == "a bé😀 a" == plain.decode(ids)
    assert pieces[2:4] == ["", "é"]
    assert tokenizer.token_bytes(299) == b""  # beyond the tokenizer, within the model's padded vocabulary
    assert sentencepiece_bytes("<0xZZ>", True) == b"<0xZZ>"
    assert sentencepiece_bytes("<0x41>", False) == b"<0x41>"
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    plain.decoder = decoders.Sequence(decoder)
    save(plain, tmp_path)
    tokenizer = TextTokenizer(tmp_path, 300)
    assert tokenizer.decode([3, 3]) == plain.decode([3, 3]) == "b b"
    assert tokenizer.stream().step(3) == " b"  # what continues a prompt keeps its space


@pytest.mark.parametrize(
    ("decoder", "prefixed"),
    [
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]), True),
        (decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.ByteFallback()]), False),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), True),
    ],
    ids=["always", "never", "bytes", "bytes-never", "no-bytes"],
)
def test_other_ways_to_write_sentencepieces_decoder(tmp_path: Path, decoder: Any, prefixed: bool) -> None:
    plain = Tokenizer(models.WordLevel({"<0x0A>": 0, "<0xE2>": 1, "▁b": 2, "c": 3}, unk_token="c"))
    plain.decoder = decoder
    save(plain, tmp_path)
    tokenizer = TextTokenizer(tmp_path, 5)
    assert tokenizer.decode([2, 3, 2]) == plain.decode([2, 3, 2]) == ("bc b" if prefixed else " bc b")
    assert tokenizer.stream().step(2) == " b"  # what continues a prompt keeps its space
    assert tokenizer.token_bytes(4) == b""
    # A byte that is none of a character, after one that is: tokenizers would then call both of them wrong.
    pieces, tail = streamed(tokenizer, [3, 0, 1, 2, 3])
    bytes_too = "ByteFallback" in repr(decoder)
    assert "".join(pieces) + tail == ("c\n\ufffd bc" if bytes_too else "c<0x0A><0xE2> bc")


# ---- where tokens stand in a text --------------------------------------------------------------------------------


@cache
def sentencepiece_tokenizer() -> TextTokenizer:
    """Of characters and bytes, with a space before the text and after special tokens, as Llama 2's."""
    chars = {c: 1 + i for i, c in enumerate("▁abc")}
    vocab = {"<unk>": 0, **chars, "▁a": 5, "▁b": 6, "ab": 7, **{f"<0x{b:02X}>": 8 + b for b in range(256)}}
    plain = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("a", "b")], byte_fallback=True, unk_token="<unk>"))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    plain.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    plain.add_special_tokens(["<s>", AddedToken("<user>", special=True, rstrip=True, normalized=False)])
    bos = plain.token_to_id("<s>")
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    with TemporaryDirectory() as folder:
        save(plain, Path(folder), bos_token="<s>")
        return TextTokenizer(Path(folder), 300)


def check_offsets(tokenizer: TextTokenizer, ids: list[int], text: str, skip: bool) -> list[int]:
    """Every token of whole characters stands at its offset, but for a space that SentencePiece has added."""
    offsets = tokenizer.offsets(ids, text, skip)
    assert offsets == sorted(offsets) and len(offsets) == len(ids)
    for token, offset in zip(ids, offsets, strict=True):
        name = tokenizer.token_name(token)
        hidden = token in tokenizer.special_ids and (skip or token == tokenizer.bos_id)
        if hidden or name.startswith("bytes:"):
            continue
        assert text.startswith(name, offset) or text.startswith(name.removeprefix(" "), offset), (name, offset)
    return offsets


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "ab", " ", "  b", "é", "😀", "\n", "c", "<|im_start|>", "<|im_end|>"])),
    st.booleans(),
)
def test_offsets_of_a_byte_level_tokenizer(parts: list[str], skip: bool) -> None:
    tokenizer, text = bundled_tokenizer(), "".join(parts)
    ids = tokenizer.encode(text).tolist()
    offsets = check_offsets(tokenizer, ids, text, False)
    assert offsets == [len(tokenizer.decode(ids[:i], False).rstrip("\ufffd")) for i in range(len(ids))]
    check_offsets(tokenizer, ids, tokenizer.decode(ids, skip), skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "ab", "c", " ", "  b", "é", "😀", "\n", "<user>"])), st.booleans())
def test_offsets_of_a_sentencepiece_tokenizer(parts: list[str], skip: bool) -> None:
    tokenizer, text = sentencepiece_tokenizer(), "".join(parts)
    ids = tokenizer.encode(text).tolist()
    assert ids[0] == tokenizer.bos_id
    check_offsets(tokenizer, ids, text, False)
    check_offsets(tokenizer, ids, tokenizer.decode(ids, skip), skip)


def test_offsets_in_plain_numbers() -> None:
    tokenizer = bundled_tokenizer()
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.offsets(tokenizer.encode(text), text, False) == [0, 12, 16, 17, 19, 29]
    assert tokenizer.offsets(tokenizer.encode(text), "user\nhi\n", True) == [0, 0, 4, 5, 7, 7]
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.offsets(tokenizer.encode("a b"), "a b", False) == [0, 0, 1]
    assert tokenizer.offsets(tokenizer.encode("a b")[1:], "a b", True) == [0, 1]


def test_offsets_of_a_text_that_the_tokenizer_changes(tmp_path: Path) -> None:
    plain = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    plain.normalizer = normalizers.NFC()
    save(plain, tmp_path)
    tokenizer = TextTokenizer(tmp_path, VOCAB)
    text = "cafe\u0301 noir et cafe\u0301 cre\u0300me"
    ids = tokenizer.encode(text)
    places = dict(zip([tokenizer.token_name(i) for i in ids], tokenizer.offsets(ids, text, False), strict=True))
    assert text.startswith(" et", places[" et"]) and text.startswith("me", places["me"])


def test_wordpiece_tokenizer(tmp_path: Path) -> None:
    """A tokenizer whose text is not its tokens' bytes goes through DecodeStream, with a bounded backlog."""
    vocab = {"[UNK]": 0, "hello": 1, "wor": 2, "##ld": 3, "\ufffd": 4}
    plain = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    plain.decoder = decoders.WordPiece()
    save(plain, tmp_path)
    tokenizer = TextTokenizer(tmp_path, 5)
    ids = [1, 2, 3, 1]
    assert tokenizer.decode(ids) == plain.decode(ids) == "hello world hello"
    assert tokenizer.offsets(ids, "hello world hello", False) == [0, 5, 9, 11]
    began = time.perf_counter()
    text = tokenizer.decode([4] * 4000)  # ends in U+FFFD for ever, like a character that never completes
    assert time.perf_counter() - began < 2
    assert text.count("\ufffd") == 4000


def test_a_token_that_changes_the_text_before_it() -> None:
    """tokenizers gives up there, which must not end the service: what has been shown stays, and the text goes on."""
    vocab = {"<0x41>": 0, "<0x82>": 1, "b</w>": 2}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="b</w>"))
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.BPEDecoder()])
    with pytest.raises(Exception, match="Invalid prefix"):
        stream = decoders.DecodeStream(skip_special_tokens=True)
        assert [stream.step(plain, token) for token in (0, 1, 2)]
    text = TextStream(plain, True)
    assert [text.step(token) for token in (0, 1, 2, 2)] == ["A", "", "\ufffdb", "b"]
    assert text.flush() == ""


def test_byte_level_alphabet_is_tokenizers_own() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


def test_tokens_only_known_to_the_config_are_added(tmp_path: Path) -> None:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.train_from_iterator(
        ["some text"],
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    size = plain.get_vocab_size()
    save(
        plain,
        tmp_path,
        added_tokens_decoder={str(size): {"content": "<|end|>", "special": True}},
        eos_token={"content": "<|end|>"},
    )
    tokenizer = TextTokenizer(tmp_path, size + 1)
    assert tokenizer.encode("a<|end|>").tolist()[-1] == size
    assert tokenizer.decode([size]) == ""
    assert tokenizer.decode([size], skip_special_tokens=False) == "<|end|>"
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"}
    # One that the tokenizer has as plain text is special if the config says so.
    plain.add_tokens(["<|end|>"])
    save(plain, tmp_path, added_tokens_decoder={str(size): {"content": "<|end|>", "special": True}})
    assert TextTokenizer(tmp_path, size + 1).decode([size]) == ""
    save(plain, tmp_path, added_tokens_decoder={str(size): {"content": "<|end|>", "special": False}})
    assert TextTokenizer(tmp_path, size + 1).decode([size]) == "<|end|>"


# ---- stop strings -------------------------------------------------------------------------------------------------


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that ends first, the longest of those; by trying all."""
    for end in range(1, len(text) + 1):
        found = [len(s) for s in stops if text[:end].endswith(s)]
        if found:
            return end - max(found), end
    return None


def split(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({c % (len(text) + 1) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(borders)]


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab c", max_size=30),
    st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=12),
    st.booleans(),
)
def test_any_split_finds_the_same_match(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    search = StopSearch(StopStrings(stops), include)
    shown, matched = "", False
    fed = ""
    for piece in split(text, cuts):
        fed += piece
        part, matched = search.feed(piece)
        shown += part
        if matched:
            break
        held = fed[len(shown) :]
        assert fed == shown + held
        assert not held or any(s.startswith(held) for s in stops), "more is held back than a stop string needs"
    expected = first_match(text, stops)
    assert matched == (expected is not None)
    if expected is None:
        assert shown + search.flush() == text
    else:
        assert shown == text[: expected[1] if include else expected[0]]


def test_stop_at_the_very_start_and_inside_a_token() -> None:
    assert StopSearch(StopStrings(["ab"]), False).feed("abc") == ("", True)
    assert StopSearch(StopStrings(["b"]), False).feed("abc") == ("a", True)
    assert StopSearch(StopStrings(["b"]), True).feed("abc") == ("ab", True)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_begins_where_none_may_end(include: bool) -> None:
    search = StopSearch(StopStrings(["ab", "bcd", "bab"]), include)
    assert search.feed("xab", False) == ("x", False)  # more than was completed may begin in it
    assert search.feed("c", False) == ("a", False)
    assert search.feed("d!") == ("bcd" if include else "", True)
    search = StopSearch(StopStrings(["ab"]), include)
    assert search.feed("ab", False) == ("", False)
    assert search.feed("c") == ("abc", False)


def test_long_stop_strings_take_linear_time() -> None:
    """The worst case of a naive search: every position nearly matches."""
    search = StopSearch(StopStrings(["a" * 1000 + "b"] * 16), False)
    began = time.perf_counter()
    for _ in range(5000):
        assert not search.feed("aaaa")[1]
    assert time.perf_counter() - began < 2


def test_flush_is_given_once() -> None:
    stream = ByteStream(ByteTable([b"\xe2", b"a"]))
    assert stream.step(0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
