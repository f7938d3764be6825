"""Encoding and chat templates equal transformers'."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_service import VOCAB, bundled_tokenizer, model_folder

from spmd_serve.errors import ModelError, RequestError
from spmd_serve.frontend.chat import ChatTemplate, find_template
from spmd_serve.frontend.tokenizer import TextTokenizer

MESSAGES = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé <|im_end|> 😀"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "{}"},
        {"role": "user", "content": ""},
    ],
]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  indented\n\ttabs",
    "<|im_start|>user\nx<|im_end|>",
    "日本語 😀 é",
    "x" * 1000,
    "1234567 3.14",
]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return bundled_tokenizer()


@pytest.fixture(scope="module")
def template(tokenizer: TextTokenizer) -> ChatTemplate:
    return ChatTemplate(find_template(model_folder(), None), tokenizer)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_folder()))


def render(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    defaults: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": False, "extra": {}}
    return template.render(messages, **(defaults | options))


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_transformers(tokenizer: TextTokenizer, theirs: Any, text: str) -> None:
    assert tokenizer.encode(text).tolist() == theirs(text)["input_ids"]
    assert tokenizer.encode(text, False).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("generation", [True, False])
def test_chats_equal_transformers(
    tokenizer: TextTokenizer, template: ChatTemplate, theirs: Any, messages: list[dict[str, Any]], generation: bool
) -> None:
    text = render(template, messages, add_generation_prompt=generation)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
    assert tokenizer.encode(text, False).tolist() == ids


@pytest.mark.parametrize(
    "final", ["The answer is", " spaces around ", "line\n", "", "<", "|", "end", "<|im_end|>", "\n"]
)
def test_continued_message_equals_transformers(template: ChatTemplate, theirs: Any, final: str) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert render(template, messages, continue_final_message=True) == expected


@pytest.mark.parametrize("final", ["", " ", "x", " x ", "x\n", "e", "</s>", "x <", "A: "])
def test_continued_message_of_a_template_that_trims(tokenizer: TextTokenizer, final: str) -> None:
    """The template's own white space stays, the content's goes, as without continuing."""
    template = own("{% for m in messages %}A:\n{{ m.content | trim }}</s>{% endfor %}", tokenizer)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": final}]
    text = render(template, messages, continue_final_message=True)
    assert text == "A:\nQ</s>A:\n" + final.strip()
    assert render(template, messages) == text + "</s>"
    assert messages[-1]["content"] == final


def own(source: str, tokenizer: TextTokenizer) -> ChatTemplate:
    return ChatTemplate(source, tokenizer)


def test_template_helpers(tokenizer: TextTokenizer) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}{{ word }}{{ strftime_now('%%') }}"
    )
    text = render(own(source, tokenizer), [{"role": "user", "content": "<é>"}], extra={"word": "w"})
    assert text == '"<é>"w%'


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message", "chat_template"])
def test_kwargs_that_the_request_has_fields_for_are_refused_by_name(tokenizer: TextTokenizer, name: str) -> None:
    with pytest.raises(RequestError, match=f"has {name}") as caught:
        render(own("{{ messages }}", tokenizer), [{"role": "user", "content": "x"}], extra={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_what_is_not_given_is_none_as_in_transformers(tokenizer: TextTokenizer, theirs: Any) -> None:
    source = "{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ other is defined }}"
    text = render(own(source, tokenizer), [{"role": "user", "content": "x"}])
    assert text == "True True True False"
    assert text == theirs.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=False, chat_template=source
    )


def test_wrong_use_of_a_template_is_the_clients_error(tokenizer: TextTokenizer) -> None:
    for source in (
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'].nothing.more }}",
        "{{ ''.__class__.__mro__ }}",
    ):
        with pytest.raises(RequestError) as caught:
            render(own(source, tokenizer), [{"role": "user", "content": "x"}])
        assert caught.value.param == "messages"
        assert caught.value.status == 400
    with pytest.raises(RequestError, match="chat template"):
        render(ChatTemplate(None, tokenizer), [{"role": "user", "content": "x"}])
    with pytest.raises(RequestError) as caught:
        render(own("nothing of it", tokenizer), [{"role": "user", "content": "x"}], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_where_templates_come_from(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    assert find_template(tmp_path, None) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "zero"}')
    assert find_template(tmp_path, None) == "zero"
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "one"}')
    assert find_template(tmp_path, None) == "one"
    config.write_text(
        '{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}'
    )
    assert find_template(tmp_path, None) == "d"
    config.write_text('{"chat_template": [{"name": "tool_use"}, "x"]}')
    assert find_template(tmp_path, None) is None
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path, None) == "file"
    (tmp_path / "given").write_text("given")
    assert find_template(tmp_path, str(tmp_path / "given")) == "given"
    with pytest.raises(ModelError, match="--chat-template"):
        find_template(tmp_path, str(tmp_path / "missing"))
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate("{% for %}", tokenizer)


def test_templates_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    template, config = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    for mark in (b"", codecs.BOM_UTF8):
        template.write_bytes(mark + "é".encode())
        config.write_bytes(mark + '{"bos_token": "é"}'.encode())
        code = (
            "import sys; from pathlib import Path; from spmd_serve.frontend.chat import find_template; "
            "from spmd_serve.tokenizer_files import read_json; folder = Path(sys.argv[1]); "
            "assert find_template(folder, None) == read_json(folder / 'tokenizer_config.json')['bos_token'] == chr(0xe9)"
        )
        environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # files are ASCII
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    template.write_bytes(b"\xe9")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not readable UTF-8"):
        find_template(tmp_path, None)


@pytest.mark.parametrize("entry", [{"x": {"content": "a"}}, {"50000": {}}, {"50000": "a"}, ["a"]], ids=str)
def test_damaged_lists_of_added_tokens(tmp_path: Path, entry: Any) -> None:
    shutil.copy(model_folder() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entry}))
    with pytest.raises(ModelError, match=r"added tokens in .*tokenizer_config\.json is damaged"):
        TextTokenizer(tmp_path, 10)


def test_unusable_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--tokenizer"):
        TextTokenizer(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        TextTokenizer(tmp_path, 10)


def test_names_of_tokens(tokenizer: TextTokenizer) -> None:
    assert tokenizer.token_name(1) == "<|im_start|>"
    lead = next(i for i in range(VOCAB) if tokenizer.token_bytes(i) == b"\xe2")
    assert tokenizer.token_name(lead) == "bytes:\\xe2"


def test_a_text_that_must_be_too_long_is_known_without_encoding(tokenizer: TextTokenizer) -> None:
    text = "word " * 5000
    assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
