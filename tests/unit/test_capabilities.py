"""The README's table of request fields is what the schemas say."""

from __future__ import annotations

from pathlib import Path

from spmd_serve.frontend.capabilities import capability_table
from spmd_serve.frontend.schemas import ChatBody, CompletionBody

README = Path(__file__).parents[2] / "README.md"


def test_readme_has_the_table() -> None:
    _, found = README.read_text().split("<!-- capabilities:begin -->\n\n")
    found, _ = found.split("\n\n<!-- capabilities:end -->")
    assert found == capability_table(), "run python -m spmd_serve.frontend.capabilities and put it into README.md"


def test_every_field_is_in_the_table() -> None:
    table = capability_table()
    for body in (CompletionBody, ChatBody):
        for name in (*body.model_fields, *body.refused_fields):
            assert f"`{name}`" in table
