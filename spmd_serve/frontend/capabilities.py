"""`python -m spmd_serve.frontend.capabilities`: the table of request fields for the README, from the schemas.

A test compares the README with what this prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd_serve.frontend.schemas import EXTENSION, Body, ChatBody, CompletionBody, Message

_ENDPOINTS: dict[str, type[Body]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


@dataclass(frozen=True)
class _Row:
    """What fields that share a row have in common."""

    extension: bool
    support: tuple[bool, ...]  # by endpoint
    reason: str


def _row_of(name: str) -> _Row:
    fields = [body.model_fields.get(name) for body in _ENDPOINTS.values()]
    reasons = [body.refused_fields.get(name, "") for body in _ENDPOINTS.values()]
    extra: Any = next((field.json_schema_extra for field in fields if field is not None), None)
    return _Row(extra == EXTENSION, tuple(field is not None for field in fields), max(reasons))


def capability_table() -> str:
    """Markdown: fields that both endpoints treat alike share a row; OpenAI's come first, then what is supported."""
    names = {name for body in _ENDPOINTS.values() for name in (*body.model_fields, *body.refused_fields)}
    rows: dict[_Row, list[str]] = {}
    for name in sorted(names):
        rows.setdefault(_row_of(name), []).append(f"`{name}`")
    lines = ["| field | " + " | ".join(_ENDPOINTS) + " |", "|---|" + "---|" * len(_ENDPOINTS)]
    for row in sorted(rows, key=lambda r: (r.extension, [not s for s in r.support], r.reason)):
        label = ", ".join(rows[row])
        label = f"extensions: {label}" if row.extension else label
        label += f" ({row.reason})" if row.reason else ""
        lines.append(f"| {label} | " + " | ".join("supported" if s else "refused" for s in row.support) + " |")
    messages = ", ".join(f"`{name}`" for name in Message.model_fields)
    return "\n".join([*lines, "", f"Messages have {messages}. Any other field is refused with 400 and its name."])


if __name__ == "__main__":
    print(capability_table())
