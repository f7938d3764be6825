"""The frontend over a dummy engine; one for each module, on a free port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.fake_service import FakeService, start_fake


@pytest.fixture(scope="module")
def service() -> Iterator[FakeService]:
    """One service with default options."""
    with ExitStack() as stack:
        fake = start_fake()
        stack.callback(fake.close)
        yield fake


@pytest.fixture
def start() -> Iterator[Callable[..., FakeService]]:
    """`start(config, script, ...)`: a service of the test's own."""
    with ExitStack() as stack:

        def begin(*arguments: object, **options: object) -> FakeService:
            fake = start_fake(*arguments, **options)  # type: ignore[arg-type]
            stack.callback(fake.close)
            return fake

        yield begin
