"""Fixtures for tests of all kinds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

# Before torch is imported. Tests share the cores with each other, and threads that spin for each other take them away.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some hundred processes import this package: only the first of them shall have to compile it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from support.server import Server, serving

if TYPE_CHECKING:
    from support.reference import Answers, Reference

# Files that take long, the longest first: started last they would run when all others are done. Not to be kept up to date
# by all means; the other files follow in pytest's order.
LONG = (
    "test_serve_sbatch.py",
    "test_faults.py",
    "test_time_limit.py",  # mostly waits
    "test_text.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """`start_server(*options, ranks=2)`: a ready server that lives as long as the module's tests and then ends cleanly."""
    with ExitStack() as stack:
        yield lambda *options, **arguments: stack.enter_context(
            serving(tmp_path_factory.mktemp("server"), *options, **arguments)
        )


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The bundled model in transformers, loaded once for all files that a process runs."""
    from support.reference import Reference  # seconds to import, and most files need none

    return Reference()


@pytest.fixture(scope="session")
def answers(reference: Reference) -> Answers:
    """What it says, each answer computed once."""
    from support.reference import Answers

    return Answers(reference)
