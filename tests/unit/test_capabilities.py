"""The README's table of request fields is what the schemas say."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_serve.frontend.capabilities import capability_table, with_table
from spmd_serve.frontend.schemas import ChatBody, CompletionBody

README = Path(__file__).parents[2] / "README.md"


def test_readme_has_the_table() -> None:
    text = README.read_text()
    assert with_table(text) == text, "run python -m spmd_serve.frontend.capabilities and put it into README.md"


def test_every_field_is_in_the_table() -> None:
    table = capability_table()
    for body in (CompletionBody, ChatBody):
        for name in (*body.model_fields, *body.refused_fields):
            assert f"`{name}`" in table


def test_a_readme_without_markers() -> None:
    with pytest.raises(ValueError, match="markers"):
        with_table("nothing")
