"""A body's bytes to its schema, with what is wrong under the name of its field."""

from __future__ import annotations

import codecs
import re
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from spmd_serve.errors import RequestError
from spmd_serve.frontend.schemas import Body

BodyType = TypeVar("BodyType", bound=Body)

# Lists and objects in a body. orjson makes them all in one go, which no other thread can interrupt, and Python's garbage
# collector goes through those that are there again and again: 8 MiB of empty lists took two seconds, this many take 0.2.
MAX_CONTAINERS = 2**18
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # one that does not end goes to the end: linear in any case

# Where JSON ends at a value that it does not have, such as NaN, None or True, what stands before it is the field's name.
_KEY_BEFORE = re.compile(r'"([^"\\]{1,256})"\s*:\s*-?$')


def parse_body(data: bytes, schema: type[BodyType]) -> BodyType:
    """Validate a body.

    Raises:
        RequestError: with the field's name in `param`.
    """
    if _brackets(data) > MAX_CONTAINERS and _containers(data) > MAX_CONTAINERS:
        raise RequestError(f"the body has more than {MAX_CONTAINERS} lists and objects")
    try:
        value = orjson.loads(data.removeprefix(codecs.BOM_UTF8))  # some editors and .NET's writers put it there
    except orjson.JSONDecodeError as error:
        field = _KEY_BEFORE.search(error.doc[max(0, error.pos - 300) : error.pos])
        name = _printable(field[1]) if field else None
        where = f"'{name}' has a value that is no JSON" if name else "the body is not valid JSON"
        raise RequestError(f"{where}: {error}", param=name) from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _request_error(error, value) from None


def _brackets(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _containers(data: bytes) -> int:
    """Brackets outside of strings, in steps between which other threads have their turn."""
    return _brackets(data) - sum(_brackets(string[0]) for string in _STRING.finditer(data))


def _request_error(error: ValidationError, body: Any) -> RequestError:
    first = error.errors(include_url=False, include_context=True)[0]
    kind, message = first["type"], first["msg"]
    loc = _path(first["loc"], body, missing=kind == "missing")
    if kind == "refused":
        loc.append(first["ctx"]["name"])
    param = ""
    for item in loc:
        param += f"[{item}]" if isinstance(item, int) else f".{item}" if param else str(item)
    param = _printable(param)
    if kind == "extra_forbidden":
        return RequestError(f"'{param}' is not a field of this request", param=param, code="unknown_field")
    if kind == "missing":
        return RequestError(f"'{param}' is missing", param=param, code="missing_field")
    code = "unsupported_field" if kind == "refused" and "not supported" in message else None
    return RequestError(f"'{param}' {message[:1].lower()}{message[1:]}", param=param, code=code)


def _printable(name: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", name)[:256]


def _path(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> list[int | str]:
    """`loc` without what is not in the body: pydantic also names the branch of a union that it tried.

    `missing`: the last item is a field that the body should have.
    """
    path: list[int | str] = []
    for item in loc[:-1] if missing else loc:
        if (isinstance(body, dict) and item in body) or (isinstance(body, list) and isinstance(item, int)):
            path.append(item)
            body = body[item]  # type: ignore[index]
    return [*path, loc[-1]] if missing else path
