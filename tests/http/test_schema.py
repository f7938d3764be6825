"""schemathesis over /openapi.json: no input that the schema allows, or nearly allows, is a server error."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from support.fake_service import FakeService, fake_info, start_fake

from spmd_serve.types import Lengths

OPERATIONS = 10


@pytest.fixture(scope="module")
def service() -> Iterator[FakeService]:
    """A short context, because what the generator makes up asks for as much as it can."""
    fake = start_fake(info=fake_info(lengths=Lengths(128, 128)))
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def api(service: FakeService) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


def test_no_server_errors(api: schemathesis.BaseSchema) -> None:
    """All operations, with right and wrong bodies. (Without schemathesis' pytest plugin, which trails pytest's versions.)"""
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) == OPERATIONS
    statuses = set()

    for operation in operations:
        has_body = operation.method.upper() == "POST"
        for mode in schemathesis.GenerationMode if has_body else [schemathesis.GenerationMode.POSITIVE]:

            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            @hypothesis.settings(
                max_examples=25 if has_body else 3,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            def check(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict):
                    case.body.pop("timeout", None)  # a request past its time is a 504, and rightly
                response = case.call(timeout=20)
                case.validate_response(response, checks=[not_a_server_error])
                statuses.add(response.status_code)

            check()
    assert {200, 400} <= statuses


def test_the_schema_names_all_fields(service: FakeService) -> None:
    description = service.http.get("/openapi.json").json()
    schemas = description["components"]["schemas"]
    body = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/ChatBody")
    assert {"messages", "temperature", "logit_bias", "stop", "response_format"} <= set(
        schemas["ChatBody"]["properties"]
    )
    assert {"prompt", "best_of", "echo"} <= set(schemas["CompletionBody"]["properties"])
    for name in ("Message", "ToolCall", "StreamOptions", "ResponseFormat", "TokenizeBody", "DetokenizeBody"):
        assert name in schemas


def test_docs(service: FakeService) -> None:
    assert service.http.get("/docs").status_code == 200
