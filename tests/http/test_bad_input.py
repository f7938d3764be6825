"""No input takes the server down: each gets OpenAI's error body, and the next request is served."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest
from support.fake_service import CONTEXT, MODEL, FakeService

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
BODY_LIMIT = 8 * 2**20


def serves(service: FakeService) -> bool:
    answer = service.client.completions.create(model=MODEL, prompt="still here", max_tokens=50)
    return bool(answer.choices[0].text == "still here")


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 5_000_000}),
        ("seed", {"seed": 10**20}),
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 2}),
        ("max_tokens", {"max_tokens": -1}),
        ("priority", {"priority": 1}),
        ("guided_json", {"guided_json": 5}),
        ("guided_json", {"guided_json": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}}),
        ("prompt_logprobs", {"prompt": [5] * 8000, "prompt_logprobs": 20, "n": 100}),
        ("nothing", {"nothing": 1}),
        ("prompt", {"prompt": [49152]}),
        ("prompt", {"prompt": [5] * (CONTEXT + 1)}),
        ("prompt", {"prompt": ""}),
        ("logprobs", {"logprobs": 10**6}),
        ("suffix", {"suffix": "x"}),
    ],
)
def test_wrong_fields(service: FakeService, stream: bool, param: str, fields: dict[str, Any]) -> None:
    """The official client raises BadRequestError with the field's name, streaming or not."""
    with pytest.raises(openai.BadRequestError) as caught:
        service.client.completions.create(
            model=MODEL, prompt=fields.get("prompt", "x"), stream=stream, extra_body=fields
        )
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert serves(service)


def test_unknown_model(service: FakeService) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        service.client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1]",
        b"\x00",
        b"\xff",
        b'{"temperature": NaN}',
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'"' + b"x" * 10**6,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_garbage(service: FakeService, path: str, data: bytes) -> None:
    named = "temperature" if b"temperature" in data else None
    check_error(service.http.post(path, content=data), 400, named)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_large_bodies(service: FakeService, path: str) -> None:
    data = b'{"prompt": "' + b"x" * (10 * 2**20) + b'"}'
    error = check_error(service.http.post(path, content=data), 413)
    assert str(BODY_LIMIT) in error["message"]

    def chunks() -> Any:  # no Content-Length
        for start in range(0, len(data), 2**18):
            yield data[start : start + 2**18]

    check_error(service.http.post(path, content=chunks()), 413)
    assert serves(service)


def test_a_body_that_fits_but_is_too_long_a_prompt(service: FakeService) -> None:
    response = service.http.post("/v1/completions", json={"prompt": "x " * 3_000_000})
    error = check_error(response, 400, "prompt")
    assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 not http\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET " + b"/x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_hardly_http(service: FakeService, data: bytes) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    connect = socket.create_connection((host, int(port)), timeout=5)
    with connect as connection, contextlib.suppress(OSError):  # it may be reset
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    assert serves(service)


def test_an_unexpected_failure_is_a_500_with_a_body(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("spmd_serve.frontend.plan.Planner.chat_ids", broken)
    body = {"messages": [{"role": "user", "content": "x"}]}
    response = service.http.post("/v1/chat/completions", json=body)
    error = check_error(response, 500)
    assert response.headers["connection"] == "close", "uvicorn ends it"
    assert "a bug" not in json.dumps(error)
    assert serves(service)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("piece", [b"[],", b'{"a":[]},', b'"[",[],'])
def test_a_million_lists(service: FakeService, path: str, piece: bytes) -> None:
    """They held the interpreter, and with it every stream, for two seconds."""
    data = b'{"prompt":[' + piece * ((BODY_LIMIT - 100) // len(piece)) + b"[]]}"
    error = check_error(service.http.post(path, content=data), 400)
    assert "lists and objects" in error["message"]
    assert serves(service)


def test_a_text_of_brackets(service: FakeService) -> None:
    """They are no lists; and strings are told from the rest in linear time, also those that do not end."""
    text = '[{"' * 2**18
    error = check_error(service.http.post("/v1/completions", json={"prompt": text}), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    began = time.monotonic()
    check_error(service.http.post("/v1/completions", content=b"[" * 2**19 + b'"' + b'\\"' * 2**21), 400)
    assert time.monotonic() - began < 5  # 0.1 alone; days if it were quadratic
