"""The bundled model behind a real server, against transformers. One reference and its answers for the whole session."""

from __future__ import annotations

import pytest
from support.reference import Answers, Reference


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def answers(reference: Reference) -> Answers:
    return Answers(reference)
