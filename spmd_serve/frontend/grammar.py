"""Structured output: from a request's fields to one grammar that the engine masks tokens with.

What travels in SamplingParams.grammar is what llguidance's `LLMatcher.grammar_from_json_schema`, `grammar_from_regex` or
`grammar_from_lark` return (its JSON form, or Lark text), which each rank hands unchanged to
`LLMatcher(LLTokenizer(tokenizer.json, n_vocab, eos_token), grammar)`. It is compiled here first, on a tokenizer thread
of rank 0, so that a bad grammar is a 400 and no rank ever meets one.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import llguidance
import orjson

from spmd_serve.errors import RequestError
from spmd_serve.frontend.schemas import Generate
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import ModelInfo

MAX_SOURCE = 256 * 1024  # bytes of a schema, regex or grammar
MAX_NESTING = 64  # of a JSON schema
JSON_DEFAULTS: Any = {"whitespace_flexible": False}  # free whitespace lets a model emit blanks until max_tokens


class GrammarCompiler:
    """Compiles and checks grammars; `compile` may be called from several threads."""

    def __init__(self, tokenizer: TextTokenizer, info: ModelInfo) -> None:
        self._text_tokenizer = tokenizer
        self._info = info
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, body: Generate) -> str | None:
        """The grammar that `body` asks for; None when it asks for none.

        Raises:
            RequestError: two grammars, or one that is not valid or too large.
        """
        sources = list(_sources(body))
        if not sources:
            return None
        if len(sources) > 1:
            names = ", ".join(name for name, _, _ in sources)
            raise RequestError(f"{names} exclude each other; give one of them", param=sources[1][0])
        field, kind, source = sources[0]
        try:
            grammar = _serialise(kind, source, field)
            matcher = llguidance.LLMatcher(self._ll_tokenizer(), grammar, log_level=0)
            problem = matcher.get_error()
        except (ValueError, RuntimeError) as error:
            problem = str(error)
        if problem:
            raise RequestError(f"{field} is not a valid {kind}: {problem[:1000]}", param=field)
        return grammar

    def _ll_tokenizer(self) -> llguidance.LLTokenizer:
        """Made at the first use: it takes about a second for a large vocabulary."""
        with self._lock:
            if self._tokenizer is None:
                eos = list(self._info.eos_token_ids) or [0]
                self._tokenizer = llguidance.LLTokenizer(
                    self._text_tokenizer.json(), n_vocab=self._info.vocab_size, eos_token=eos
                )
            return self._tokenizer


def _sources(body: Generate) -> list[tuple[str, str, Any]]:
    """(field, kind, source) of everything that the body asks for."""
    found: list[tuple[str, str, Any]] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(("response_format", "JSON schema", {"type": "object"}))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise RequestError("response_format of type json_schema needs json_schema", param="response_format")
        found.append(("response_format", "JSON schema", form.json_schema.schema_))
    outputs = body.structured_outputs
    if outputs is not None:
        given = [
            ("structured_outputs.json", "JSON schema", outputs.json_),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
            ("structured_outputs.json_object", "JSON schema", {"type": "object"} if outputs.json_object else None),
        ]
        if all(source is None for _, _, source in given):
            raise RequestError("structured_outputs names no form of output", param="structured_outputs")
        found += given
    found += [
        ("guided_json", "JSON schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    return [entry for entry in found if entry[2] is not None]


def _serialise(kind: str, source: Any, field: str) -> str:
    _check_nesting(source, field)
    size = len(source.encode()) if isinstance(source, str) else len(orjson.dumps(source))
    if size > MAX_SOURCE:
        raise RequestError(f"{field} has {size} bytes; at most {MAX_SOURCE} are allowed", param=field)
    if kind == "JSON schema":
        schema = orjson.loads(source) if isinstance(source, str) else source
        _check_nesting(schema, field)  # again: it may have been a string
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_DEFAULTS))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(source))
    if kind == "choice":
        if not all(source):
            raise ValueError("a choice is empty")
        return str(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in source)))
    return str(llguidance.grammar_from("grammar", source))


def _check_nesting(source: Any, field: str) -> None:
    """Refuse deep nesting, level by level: whatever recurses, JSON encoders included, could overflow."""
    level = [source]
    for _ in range(MAX_NESTING):
        level = [
            child
            for value in level
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise RequestError(f"{field} is nested more than {MAX_NESTING} deep", param=field)
