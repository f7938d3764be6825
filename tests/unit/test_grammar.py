"""Structured output: what is compiled is what llguidance enforces, and what is wrong is refused by name."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance
import pytest
from support.fake_service import EOS, VOCAB, bundled_tokenizer, fake_info

from spmd_serve.errors import RequestError
from spmd_serve.frontend.grammar import MAX_NESTING, MAX_SOURCE, GrammarCompiler
from spmd_serve.frontend.schemas import CompletionBody

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(bundled_tokenizer(), fake_info())


@cache
def ll_tokenizer() -> llguidance.LLTokenizer:
    """As each rank makes its own."""
    return llguidance.LLTokenizer(bundled_tokenizer().json(), n_vocab=VOCAB, eos_token=[EOS])


def compiled(compiler: GrammarCompiler, **fields: Any) -> str | None:
    return compiler.compile(CompletionBody.model_validate({"prompt": "x"} | fields))


def accepts(grammar: str | None, text: str) -> bool:
    """Whether an engine with this grammar can write `text` and end there."""
    matcher = llguidance.LLMatcher(ll_tokenizer(), grammar, log_level=0)
    tokens = bundled_tokenizer().encode(text)
    return all(matcher.consume_token(token) for token in tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a":[1,null]}', "[1]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                }
            },
            '{"name":"Ann","age":5}',
            '{"name":"Ann"}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '{"name":"Ann","age":5}', '{"name":5}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"name":"Ann","age":5}', '{"name":"Ann","age":500}'),
        ({"guided_regex": "[a-c]+[0-9]{2}"}, "abc12", "abd12"),
        ({"structured_outputs": {"regex": "(yes|no)"}}, "yes", "yesno"),
        ({"guided_choice": ["red", 'bl"ue\n']}, 'bl"ue\n', "green"),
        ({"structured_outputs": {"choice": ["a b"]}}, "a b", "ab"),
        ({"guided_grammar": 'start: "x" num\nnum: /[0-9]+/'}, "x12", "12"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "bba", "bb"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_every_form(compiler: GrammarCompiler, fields: dict[str, Any], right: str, wrong: str) -> None:
    grammar = compiled(compiler, **fields)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_no_form(compiler: GrammarCompiler) -> None:
    assert compiled(compiler) is None
    assert compiled(compiler, response_format={"type": "text"}) is None


def test_json_cannot_be_padded_for_ever(compiler: GrammarCompiler) -> None:
    """A model that likes blanks would fill max_tokens with them and never close the object."""
    grammar = compiled(compiler, response_format={"type": "json_object"})
    assert not accepts(grammar, "{" + " " * 200 + "}")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("guided_json", {"guided_json": {"type": "nothing"}}),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": "5"}),
        ("guided_json", {"guided_json": {"type": "string", "pattern": "(("}}),
        ("guided_json", {"guided_json": {"$ref": "#/nowhere"}}),
        ("guided_json", {"guided_json": nested(MAX_NESTING + 1)}),
        ("guided_json", {"guided_json": nested(400)}),
        ("guided_json", {"guided_json": {"type": "string", "const": "x" * MAX_SOURCE}}),
        ("guided_regex", {"guided_regex": "(("}),
        ("guided_choice", {"guided_choice": ["a", ""]}),
        ("guided_grammar", {"guided_grammar": "start: nothing"}),
        ("guided_grammar", {"guided_grammar": ""}),
        ("guided_regex", {"guided_regex": "a", "guided_json": {}}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        (
            "structured_outputs.json",
            {"structured_outputs": {"json": {}, "regex": "a"}, "response_format": {"type": "json_object"}},
        ),
        ("structured_outputs", {"structured_outputs": {"json_object": False}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 5}}}},
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_refused(compiler: GrammarCompiler, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(compiler, **fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert len(caught.value.message) < 1500
