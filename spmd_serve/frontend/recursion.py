"""JSON schemas that require themselves without end, as {"$ref": "#/$defs/a"} where a has a required property that is an a.

llguidance compiles them, and the model would write `{"x":{"x":{"x":` until the parser's limits end the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_WORK = 100_000  # keywords and list entries that are looked at: up to 0.1 s; ordinary schemas take some hundred
_SCALARS = {"null", "boolean", "integer", "number", "string"}


def endless_references(schema: Any) -> list[str]:
    """The schema's references that no finite text satisfies, if the schema needs one of them; else none.

    What this does not understand, or would take long, counts as finite: then llguidance refuses it, or the request ends while
    it is generated.

    Args:
        schema: parsed JSON whose nesting is limited.
    """
    targets: dict[str, Any] = {}
    for node in objects(schema):
        if node is not schema and isinstance(node.get("$id"), str):
            return []  # references in it are relative to it
        reference = node.get("$ref")
        if isinstance(reference, str):
            targets[reference] = _resolve(schema, reference)
    known = _Finite()
    left = list(targets)
    while True:
        for reference in left:
            if known.is_finite(targets[reference]):
                known.references.add(reference)
        # The other way round next time: chains of definitions then take two rounds, whichever way they are written.
        still = [reference for reference in reversed(left) if reference not in known.references]
        if len(still) == len(left):
            return [] if known.is_finite(schema) else sorted(still)
        left = still


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in it, and itself."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _resolve(schema: Any, reference: str) -> Any:
    """What a JSON pointer into this schema names; True, which anything satisfies, for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    target = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return True
    return target


class _Finite:
    """Which schemas a finite text may satisfy, given the references of which that is known."""

    def __init__(self) -> None:
        self.references: set[str] = set()
        self._work = 0

    def is_finite(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        self._work += 1 + len(schema) + sum(len(value) for value in schema.values() if isinstance(value, list))
        if self._work > MAX_WORK or "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self.references:
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(self.is_finite(branch) for branch in _list(schema[keyword])):
                return False
        if not all(self.is_finite(part) for part in _list(schema.get("allOf"))):
            return False
        types = schema.get("type")
        names = {types} if isinstance(types, str) else {name for name in _list(types) if isinstance(name, str)}
        if not names or names & _SCALARS:
            return True
        return ("object" in names and self._object(schema)) or ("array" in names and self._array(schema))

    def _object(self, schema: dict[str, Any]) -> bool:
        """By its required properties; of others there need be none."""
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        return all(self.is_finite(properties.get(name, others)) for name in required)

    def _array(self, schema: dict[str, Any]) -> bool:
        """By as many items as it must have."""
        least = schema.get("minItems", 0)
        if not isinstance(least, int):
            return True
        first, rest = _list(schema.get("prefixItems")), schema.get("items", True)
        if isinstance(rest, list):  # as older drafts write what is prefixItems now
            first, rest = rest, True
        return all(self.is_finite(item) for item in first[:least]) and (least <= len(first) or self.is_finite(rest))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
