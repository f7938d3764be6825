"""Which JSON schemas only an endless text would satisfy. Recursion that can end is the ordinary way to write trees."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from spmd_serve.frontend import recursion
from spmd_serve.frontend.recursion import endless_references

A = {"$ref": "#/$defs/a"}
B = {"$ref": "#/$defs/b"}
NULL = {"type": "null"}


def objects(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """A schema of objects; without `required` all properties are."""
    return {"type": "object", "properties": properties, "required": list(required or properties)} | more


def arrays(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


@pytest.mark.parametrize(
    "a",
    [
        objects({"x": A}),
        objects({"name": {"type": "string"}, "x": A}, "x"),
        objects({"x": objects({"y": arrays(items=A, minItems=2)})}),
        objects({"x": {"anyOf": [A, objects({"y": A})]}}),
        objects({"x": {"allOf": [A, True]}}),
        objects({"x": {"description": "with keywords beside it", **A}}),
        objects({"x": B}),
        objects({}, "x", additionalProperties=A),
        {"allOf": [objects({"x": A}), {"type": "object"}]},
        {"type": ["object", "array"], "properties": {"x": A}, "required": ["x"], "items": A, "minItems": 1},
        arrays(prefixItems=[NULL, A], minItems=2),
        arrays(prefixItems=[NULL], items=A, minItems=2),
        arrays(items=[A], minItems=1),
        A,
        B,
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize(
    "around", [A, objects({"root": A, "n": NULL}, "root"), arrays(items=B, minItems=1)], ids=json.dumps
)
def test_what_requires_itself(a: dict[str, Any], around: dict[str, Any]) -> None:
    assert "#/$defs/a" in endless_references(around | {"$defs": {"a": a, "b": A}})


@pytest.mark.parametrize(
    "a",
    [
        objects({"name": {"type": "string"}, "x": A}, "name"),
        objects({"x": {"anyOf": [A, NULL]}}),
        objects({"x": {"oneOf": [objects({"y": A}), {"const": 1}]}}),
        objects({"x": arrays(items=A)}),
        objects({"x": arrays(items=A, minItems=0)}),
        objects({"x": arrays(prefixItems=[NULL, A], items=A, minItems=1)}),
        objects({"x": {"type": ["object", "null"], "properties": {"x": A}, "required": ["x"]}}),
        objects({"x": {"properties": {"x": A}, "required": ["x"]}}),  # any text but an object
        objects({"x": {"enum": [{}], "type": "object", "properties": {"x": A}, "required": ["x"]}}),
        objects({"x": {"type": "object", "additionalProperties": A}}),
        objects({}, "x", patternProperties={".": A}),
        objects({"$ref": A}, "n"),  # the name of a property
        {"const": A},
        {"anyOf": [B, NULL]},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("around", [A, objects({"root": A}), objects({"root": B, "n": NULL}, "root")], ids=json.dumps)
def test_recursion_that_can_end(a: dict[str, Any], around: dict[str, Any]) -> None:
    assert endless_references(around | {"$defs": {"a": a, "b": {"allOf": [A]}}}) == []


@pytest.mark.parametrize(
    "schema",
    [
        objects({"x": A, "n": NULL}, "n") | {"$defs": {"a": objects({"x": A})}},  # a part that need not be used
        {"anyOf": [A, NULL], "$defs": {"a": objects({"x": A})}},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/nowhere/0"},
        {"$ref": "#/anyOf/1", "anyOf": [NULL, NULL]},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": NULL}},
        objects({"x": {"$id": "https://example.com/inner", **objects({"x": {"$ref": "#"}})}}),
        {"type": 5, "required": "x", "properties": [], "anyOf": 7, "allOf": {}, "minItems": "1"},
        "no schema",
    ],
    ids=json.dumps,
)
def test_what_need_not_recurse_or_is_not_understood(schema: Any) -> None:
    assert endless_references(schema) == []


def test_pointers_that_need_decoding() -> None:
    reference = "#/$defs/a~1b%20c"
    assert endless_references({"$ref": reference, "$defs": {"a/b c": objects({"x": {"$ref": reference}})}}) == [
        reference
    ]
    assert endless_references(objects({"x": {"$ref": "#"}})) == ["#"]


def chain(length: int, last: Any) -> dict[str, Any]:
    links = {f"d{i}": objects({"x": {"$ref": f"#/$defs/d{i + 1}"}}) for i in range(length)}
    return links | {f"d{length}": last}


@pytest.mark.parametrize("backwards", [False, True])
def test_long_chains_take_no_recursion_and_no_time(backwards: bool) -> None:
    began = time.thread_time()
    for last, expected in ((NULL, 0), ({"$ref": "#/$defs/d0"}, 2001)):
        links = chain(2000, last)
        definitions = dict(reversed(links.items())) if backwards else links
        assert len(endless_references({"$ref": "#/$defs/d0", "$defs": definitions})) == expected
    assert time.thread_time() - began < 1


def test_what_would_take_long_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recursion, "MAX_WORK", 20)
    assert endless_references({"$ref": "#/$defs/d0", "$defs": chain(9, {"$ref": "#/$defs/d0"})}) == []
