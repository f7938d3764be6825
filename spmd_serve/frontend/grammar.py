"""Structured output: from a request's fields to one grammar that the engine masks tokens with.

What travels in SamplingParams.grammar is what llguidance's `LLMatcher.grammar_from_json_schema`, `grammar_from_regex` or
`grammar_from_lark` return (its JSON form, or Lark text), which each rank compiles unchanged (structured_output.py). It is
compiled here first, on a tokenizer thread of rank 0, so that a grammar that is bad, or would cost the ranks' step loop
too much time, is a 400 and no rank ever meets one.
"""

from __future__ import annotations

import json
import math
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from typing import Any

import llguidance
import orjson

from spmd_serve.errors import ModelError, OverloadedError, RequestError
from spmd_serve.frontend.recursion import endless_references, objects
from spmd_serve.frontend.schemas import Generate
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.structured_output import MAX_SYMBOLS, Compiled, CompiledGrammars
from spmd_serve.types import ModelInfo

MAX_SOURCE = 64 * 1024  # bytes of a schema, regex or grammar; a constant of 60,000 characters costs 0.04 s a mask
MAX_NESTING = 64  # of a JSON schema
MAX_COMPILE_SECONDS = 0.2  # of CPU time; what is within MAX_SYMBOLS and ordinary takes up to 0.05 s
COMPILE_PATIENCE = 2.0  # seconds that a request waits for its grammar; `.*` 16,000 times takes 30 s, within all limits
MAX_MULTIPLE = 10_000
MAX_GBNF = 4_000_000  # bytes times rules, which llguidance's converter costs: this much 0.5 s, 64 KB of rules 18 s
UNSATISFIABLE = "Unsatisfiable schema: "  # as llguidance begins what it says of a JSON schema that no text fits
LEAST_INTEGER = -(2**63) + 1024  # the least one that llguidance, which makes a double of it, can have for a minimum
JSON_DEFAULTS: Any = {"whitespace_flexible": False}  # free whitespace lets a model emit blanks until max_tokens


class GrammarCompiler:
    """Compiles and checks grammars; `compile` may be called from several threads."""

    def __init__(self, tokenizer: TextTokenizer, info: ModelInfo) -> None:
        self._grammars = CompiledGrammars(tokenizer.folder, info.vocab_size, info.eos_token_ids)
        # A thread of its own, because nothing ends llguidance's work: tokenizer threads must not be held up by it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._costly: Future[Compiled] | None = None  # that nobody waits for any more

    def compile(self, body: Generate) -> str | None:
        """The grammar that `body` asks for; None when it asks for none.

        Raises:
            RequestError: two grammars, one that is not valid or too large, or a tokenizer that does not allow any.
            OverloadedError: it would have to wait for another request's grammar.
        """
        sources = _sources(body)
        if not sources:
            return None
        # A client may give an option under its old and its new name, as guidance does.
        if any(source[1:] != sources[0][1:] for source in sources):
            names = ", ".join(name for name, _, _ in sources)
            raise RequestError(f"{names} exclude each other; give one of them", param=sources[1][0])
        field, kind, source = sources[0]
        try:
            grammar = _serialise(kind, source, field)
            _check_multiples(grammar)
            compiled = self._compiled(grammar, field, kind)
            problem = compiled.problem
        except ModelError as error:
            raise RequestError(str(error), param=field) from None
        except (ValueError, RuntimeError, TypeError) as error:  # orjson's are TypeErrors: integers of more than 64 bits
            if isinstance(error, RequestError):
                raise
            problem = str(error)
        if "grammar size" in problem:
            raise RequestError(
                f"{field} is too large a {kind}: it becomes a grammar of more than {MAX_SYMBOLS} symbols", param=field
            )
        if "NoExtension" in problem:  # llguidance's name for it
            raise RequestError(f"{field} is a {kind} that no text fits", param=field)
        if problem.startswith(UNSATISFIABLE):
            reason = _without_dump(problem.removeprefix(UNSATISFIABLE))
            raise RequestError(f"{field} is a {kind} that no text fits: {reason[:1000]}", param=field)
        if problem:
            raise RequestError(f"{field} is not a valid {kind}: {_without_dump(problem)[:1000]}", param=field)
        if compiled.seconds > MAX_COMPILE_SECONDS:
            raise RequestError(
                f"{field} is too complex a {kind}: compiling it took {compiled.seconds:.2f} s of at most "
                f"{MAX_COMPILE_SECONDS} s; make it smaller",
                param=field,
            )
        return grammar

    def _compiled(self, grammar: str, field: str, kind: str) -> Compiled:
        """Compiled before, or now within COMPILE_PATIENCE."""
        found = self._grammars.find(grammar)
        if found is not None:
            return found
        self._grammars.await_tokenizer()
        busy = OverloadedError("the grammar of another request is being compiled; try later")
        if self._costly is not None and not self._costly.done():
            raise busy
        future = self._thread.submit(self._grammars.compile, grammar)
        try:
            return future.result(COMPILE_PATIENCE)
        except TimeoutError:
            if future.cancel():  # it has not begun
                raise busy from None
            self._costly = future
            raise RequestError(
                f"{field} is too complex a {kind}: compiling it takes more than {COMPILE_PATIENCE:g} s; make it smaller",
                param=field,
            ) from None


def _without_dump(problem: str) -> str:
    """llguidance's message, but for the expression that it makes of a pattern with a length, a format or another pattern."""
    found = re.search(r"(unable to determine if )?regex is empty: +\(", problem, re.IGNORECASE)
    if found is None:
        return problem
    together = "a text of such a pattern, format and length"
    return f"it cannot be told whether there is {together}" if found[1] else f"there is not {together}"


def _sources(body: Generate) -> list[tuple[str, str, Any]]:
    """(field, kind, source) of everything that the body asks for."""
    found: list[tuple[str, str, Any]] = []
    form = body.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":
        raise RequestError(
            f"response_format has a json_schema, which its type '{form.type}' does not follow; the type json_schema does",
            param="response_format.json_schema",
        )
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
        if not isinstance(schema, dict):
            raise ValueError("a JSON object is expected")
        _check_numbers(schema)
        schema = _mended(schema)
        endless = endless_references(schema)
        if endless:
            raise RequestError(
                f"{field} is a JSON schema that no text fits: it requires {', '.join(endless[:3])} in itself without end; make "
                "a property on the way optional, or give it another form (anyOf)",
                param=field,
            )
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_DEFAULTS))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(source))
    if kind == "choice":
        if not all(source):
            raise ValueError("a choice is empty")
        return str(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in source)))
    if source.lstrip().startswith("{"):  # llguidance's own JSON form, which is not what the API has
        raise ValueError("a grammar is in Lark or GBNF syntax; neither begins with {")
    _check_embedded_numbers(source)
    # llguidance takes whatever has no line that begins with "start:" for GBNF, "?start: a" too; but GBNF has "::=".
    rules = source.count("::=")
    if rules * size > MAX_GBNF:
        raise RequestError(
            f"{field} is too large a grammar: it has {rules} rules and {size} bytes, whose product may be {MAX_GBNF} in GBNF "
            "syntax; write it in Lark syntax",
            param=field,
        )
    if rules:
        return str(llguidance.grammar_from("grammar", _ESCAPES.sub(_escape, source)))
    return str(llguidance.LLMatcher.grammar_from_lark(source))


_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _escape(match: re.Match[str]) -> str:
    """An escape in a text with "::=". Of \\u and \\U llguidance's converter drops the zeros, which then mean something else."""
    digits = match[1] or match[2]
    code = int(digits, 16) if digits else 0
    if not digits or code > sys.maxunicode or 0xD800 <= code < 0xE000:  # the latter are no characters
        return match[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)  # as a character, a quote would end the text


def _check_numbers(schema: dict[str, Any]) -> None:
    """Refuse integers that llguidance cannot have.

    In const and enum those that are no doubles: it would write 2**53 for 2**53 + 1. And what leaves an integer no other value
    than -2**63, at which it recurses until the process dies.

    Raises:
        ValueError: there is one.
    """
    for node in objects(schema):
        for key in ("maximum", "exclusiveMaximum"):
            value = node.get(key)
            if isinstance(value, (int, float)) and value <= LEAST_INTEGER:
                raise ValueError(f"the {key} {value} is too small; it must be more than {LEAST_INTEGER}")
        waiting = [node.get("const"), node.get("enum")]
        while waiting:
            value = waiting.pop()
            if isinstance(value, (dict, list)):
                waiting += value.values() if isinstance(value, dict) else value
            elif type(value) is int and (int(float(value)) != value or value <= LEAST_INTEGER):
                raise ValueError(f"the constant {value} cannot be written exactly; give it as a string")


def _check_embedded_numbers(source: str) -> None:
    """Refuse the same small integers in the JSON schemas of a Lark grammar (%json), wherever they stand.

    Raises:
        ValueError: there is one.
    """
    for found in re.findall(r"-[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", source if "%json" in source else ""):
        if float(found) <= LEAST_INTEGER:
            raise ValueError(f"the number {found[:50]} is too small for %json; it must be more than {LEAST_INTEGER}")


_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas under names
# Formats that any text has: what pydantic and OpenAPI say of a string's use, not of its characters.
_ANY_TEXT = ("binary", "password", "path", "file-path", "directory-path")
_PARTS = ("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf")


def _mended(schema: Any) -> Any:
    """The same schema without what llguidance refuses although it asks for nothing, and with minima that it can have."""
    if isinstance(schema, list):
        return [_mended(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            value = {name: _mended(part) for name, part in value.items()}
        elif key in _PARTS:
            value = _mended(value)
        elif key in ("minimum", "exclusiveMinimum") and type(value) is int and -(2**63) <= value < LEAST_INTEGER:
            value = LEAST_INTEGER
        elif _asks_for_nothing(key, value):
            continue
        made[key] = value
    return made


def _asks_for_nothing(key: str, value: Any) -> bool:
    """Keywords that generators of schemas write down although everything satisfies them; zod says that names are strings."""
    if key == "uniqueItems":
        return value is False
    if key == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    return key == "format" and value in _ANY_TEXT


def _check_multiples(grammar: str) -> None:
    """Refuse a large multipleOf, wherever it stands: compiling one of 1,000,000 takes 11 s, which no limit of llguidance bounds.

    Each becomes an automaton with a state for every remainder, and an allOf of several one for their common multiple.

    Raises:
        ValueError: a number, or the common multiple of all, is too large.
    """
    text = re.sub(r"\\+u00([0-7][0-9a-fA-F])", lambda match: chr(int(match[1], 16)), grammar)
    common = 1
    for found in re.findall(r'multipleOf\\*"\s*:\s*([-+.0-9eE]+)', text):
        try:
            digits = Decimal(found).as_tuple().digits
        except InvalidOperation:
            continue  # llguidance says what is wrong with it
        common = math.lcm(common, int("".join(map(str, digits)).rstrip("0") or "1"))
        if common > MAX_MULTIPLE:
            raise ValueError(
                f"the common multiple of all multipleOf is {common} or more (without powers of ten); at most "
                f"{MAX_MULTIPLE} is possible"
            )


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
