"""Types of request fields that have a check of their own: prompts, stop strings, biases, token ids.

They are never null: schemas.Body leaves nulls out.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from spmd_serve.types import MAX_BIAS

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_BIASES = 1024
MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def wrong(message: str) -> PydanticCustomError:
    """A validation error with this text. (Braces would be taken for a format.)"""
    return PydanticCustomError("value", "{text}", {"text": message})


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _check_prompt(value: Any) -> Any:
    """Text, ids, or a list of one of them. One pass, because the list may hold a million ids."""
    if isinstance(value, str) or _is_ids(value):
        return value
    if value == []:
        raise wrong("there is no prompt in it; give text or token ids")
    if isinstance(value, list) and (all(isinstance(p, str) for p in value) or all(_is_ids(p) for p in value)):
        return value
    raise wrong("must be text, a list of texts, a list of token ids, or a list of (non-empty) lists of token ids")


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise wrong("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    if any(not s or len(s) > MAX_STOP_LENGTH for s in stops):
        raise wrong(f"each string must have 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _check_bias(value: Any) -> Any:
    """Keys are token ids, written as strings in JSON."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise wrong(f"must be an object of at most {MAX_BIASES} token ids with their biases")
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise wrong(f"'{str(key)[:40]}' is not a token id")
        if type(bias) not in (int, float) or not abs(bias) <= MAX_BIAS:
            raise wrong(f"the bias of token {key} must be a number from -{MAX_BIAS} to {MAX_BIAS}")
        biases[int(key)] = float(bias)
    return biases


_TEXTS_SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompt = Annotated[
    Any,
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _TEXTS_SCHEMA,
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
Stop = Annotated[
    Any,
    BeforeValidator(_check_stop),
    WithJsonSchema(
        {"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOPS}, {"type": "null"}]}
    ),
]
_BIAS_SCHEMA = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
LogitBias = Annotated[
    Any,
    BeforeValidator(_check_bias),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": _BIAS_SCHEMA}, {"type": "null"}]}),
]
