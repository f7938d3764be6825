"""Who may ask, how much, and how slowly: API key, CORS, limits, clients that do not read."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from support.fake_service import MODEL, FakeService, bundled_tokenizer
from support.server import wait_until

from spmd_serve.config import Config, ServerOptions
from spmd_serve.frontend import body, dispatcher, http_protocol, http_server, server

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., FakeService]
BODY = {"prompt": "hello", "max_tokens": 3}


def address(service: FakeService) -> tuple[str, int]:
    host, port = service.url.removeprefix("http://").split(":")
    return host, int(port)


def until(connection: socket.socket, mark: bytes) -> bytes:
    """What comes until `mark` is in it: head and body of an answer may come in pieces."""
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        assert piece, f"closed after {received!r}"
        received += piece
    return received


# ---- key and origin -----------------------------------------------------------------------------------------------


def test_api_key(start: Start) -> None:
    service = start(Config(server=ServerOptions(api_key="sécret")))
    for path in ("/health", "/ready"):
        assert service.http.get(path).status_code == 200
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic x"},
        {"authorization": "sécret".encode()},
    ):
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/nothing"),
        ):
            response = service.http.request(method, path, headers=headers, json=BODY)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} sécret".encode()}
        assert service.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(("given", "name"), [("k", MODEL), ("wrong", "unknown"), ("", "unknown")])
def test_a_server_is_ready_for_those_too_who_wait_without_its_key(start: Start, given: str, name: str) -> None:
    """As a container's health check, whose environment does not have what was given as --api-key."""
    service = start(Config(server=ServerOptions(api_key="k")))
    command = [sys.executable, "launch/wait_ready.py", service.url, "--seconds", "0"]
    environ = os.environ | {"SPMD_SERVE_API_KEY": given}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr


def test_cors_is_off_by_default_and_by_origin(service: FakeService, start: Start) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    response = service.http.options("/v1/completions", headers=headers)
    assert not any(name.startswith("access-control") for name in response.headers)
    open_to = start(Config(server=ServerOptions(cors_origin=("https://a.example",), api_key="k")))
    response = open_to.http.options("/v1/completions", headers=headers)  # a browser's preflight has no key
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = open_to.http.options("/v1/completions", headers=headers | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in response.headers
    key = {"origin": "https://a.example", "authorization": "Bearer k"}
    for stream in (False, True):
        response = open_to.http.post("/v1/completions", json=BODY | {"stream": stream}, headers=key)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
    for _ in range(2):  # what CORS adds to one answer is not in the next
        response = open_to.http.post(
            "/v1/completions", json=BODY | {"stream": True}, headers={"authorization": "Bearer k"}
        )
        assert response.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in response.headers


# ---- bodies and connections ---------------------------------------------------------------------------------------


def test_body_size_is_an_option(start: Start) -> None:
    service = start(Config(server=ServerOptions(max_body_size=2048)))
    assert service.http.post("/v1/completions", json=BODY).status_code == 200
    assert service.http.post("/v1/completions", json=BODY | {"user": "x" * 3000}).status_code == 413


def test_all_bodies_together_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow senders of large bodies: beyond the budget one gets 503, and the budget comes back."""
    monkeypatch.setattr(body, "BODIES_AT_ONCE", 2)
    service = start(Config(server=ServerOptions(max_body_size=100_000)))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(socket.create_connection(address(service), timeout=5)) for _ in range(3)]
        for sender in senders:
            sender.sendall(head + b" " * 80_000)
        deadline = time.monotonic() + 5
        answers: list[bytes] = []
        while not answers and time.monotonic() < deadline:
            for sender in senders:
                sender.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    answers.append(sender.recv(65536))
        assert answers[0].startswith(b"HTTP/1.1 503")
    wait_until("bodies are gone", lambda: service.http.post("/v1/completions", json=BODY).status_code == 200, 3)


def test_a_body_that_never_comes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "READ_TIMEOUT", 0.2)
    service = start()
    with socket.create_connection(address(service), timeout=5) as sender:
        sender.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert sender.recv(65536).startswith(b"HTTP/1.1 408")


def test_a_body_that_has_not_come_when_the_server_stops(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Whether a body was announced whole or in chunks: its client hears what any other does, and the log has no traceback."""
    service = start()
    heads = (b"Content-Length: 100", b"Transfer-Encoding: chunked")
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address(service), timeout=20)) for _ in heads]
        for connection, head in zip(connections, heads, strict=True):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n1\r\n{")
        time.sleep(0.1)  # for the server to have read it: nothing shows when
        service.close()
        for connection in connections:
            received = until(connection, b"the server is shutting down")
            assert received.startswith(b"HTTP/1.1 503 ") and b"retry-after: 5" in received
    assert not [record for record in caplog.records if record.exc_info]


def test_connections_are_bounded(start: Start) -> None:
    service = start(Config(server=ServerOptions(max_connections=5)))
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(address(service), timeout=5))
        with socket.create_connection(address(service), timeout=5) as sixth:
            assert until(sixth, b"--max-connections").startswith(b"HTTP/1.1 503")
            while sixth.recv(65536):  # until it is closed
                pass
    wait_until("there is room again", lambda: httpx.get(f"{service.url}/health").status_code == 200, 3)
    assert service.metric('spmd_serve_http_responses_total{status="503"}') >= 1


def test_what_is_no_http_is_counted_too(start: Start) -> None:
    service = start()
    with socket.create_connection(address(service), timeout=5) as sender:
        sender.sendall(b"HELO me\r\n\r\n")
        assert sender.recv(65536).startswith(b"HTTP/1.1 400")
    assert service.metric('spmd_serve_http_responses_total{status="400"}') == 1


def test_a_low_limit_of_open_files_is_raised(start: Start) -> None:
    """Most shells have 1,024, which is fewer than the connections that are allowed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit[1]))
    try:
        service = start(Config(server=ServerOptions(frontend="process", max_connections=200)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address(service), 10)) for _ in range(150)]
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in connections)


def test_a_limit_that_cannot_be_raised_bounds_the_connections(caplog: pytest.LogCaptureFixture) -> None:
    """The others get their 503, and the process keeps files for itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = http_server.allow_connections(most)
    assert allowed == max(most - http_server.OWN_FILES, most // 2)
    assert f"{allowed} connections, not {most}" in caplog.text


@pytest.mark.parametrize("name", ["localhost", "no.such.host.invalid"])
def test_the_url_of_all_addresses_has_a_name_that_resolves(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    (listener,) = http_server.bind("0.0.0.0", 0, 1)
    with listener:
        assert server.url_of(listener) == f"http://localhost:{listener.getsockname()[1]}"


def test_silent_connections_are_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT", 0.2)
    service = start()
    with socket.create_connection(address(service), timeout=5) as silent, contextlib.suppress(ConnectionResetError):
        silent.sendall(b"POST /v1/comp")
        assert silent.recv(1) == b""
    with socket.create_connection(address(service), timeout=5) as second, contextlib.suppress(ConnectionResetError):
        second.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in until(second, b"}")
        second.sendall(b"GET /health HT")  # of a later request too
        assert second.recv(1) == b""


@pytest.mark.parametrize("rest", [b"x", b"x" * 1000], ids=["part", "whole"])
@pytest.mark.parametrize(("path", "length"), [("/nope", 1000), ("/v1/completions", 10**9)])
def test_what_follows_an_early_answer_is_awaited_for_a_while_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, length: int, rest: bytes
) -> None:
    """A client that sends some or all of its body behind a refusal, and then nothing, would keep its connection for ever."""
    monkeypatch.setattr(http_protocol, "REST_TIMEOUT", 0.3)
    service = start()
    with socket.create_connection(address(service), timeout=5) as client, contextlib.suppress(ConnectionResetError):
        client.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), length))
        assert b"HTTP/1.1 4" in until(client, b"}}")
        client.sendall(rest)
        assert client.recv(1) == b""


def test_a_request_behind_one_whose_answer_came_early(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REST_TIMEOUT", 0.3)
    service = start(step_interval=0.05)
    with socket.create_connection(address(service), timeout=5) as client:
        client.sendall(b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
        assert b"404" in until(client, b"}}")
        body = b'{"prompt": "again ", "max_tokens": 12, "ignore_eos": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(b"rest" + head + body)
        assert b"200 OK" in until(client, b"usage")  # after longer than that


def test_heads_are_bounded(service: FakeService) -> None:
    with socket.create_connection(address(service), timeout=5) as endless, pytest.raises(ConnectionError):
        endless.sendall(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(10_000):
            endless.sendall(b"y" * 65536)
    with socket.create_connection(address(service), timeout=5) as pipelined, pytest.raises(ConnectionError):
        body = b'{"prompt": "x", "max_tokens": 8000, "ignore_eos": true, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        pipelined.sendall(head + body)
        pipelined.sendall(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(10_000):
            pipelined.sendall(b"y" * 65536)
    assert service.http.get("/health", headers={"x": "y" * 30_000}).status_code == 200


# ---- clients that do not read -------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_is_cut_off(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is held as text, not as events, while it stalls; then its work is aborted. Others are not disturbed."""
    monkeypatch.setattr(dispatcher, "STALL_LIMIT", 0.5)
    monkeypatch.setattr(dispatcher, "SWEEP_INTERVAL", 0.1)
    service = start(script=lambda request: itertools.cycle(range(300, 1300)))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address(service))
        fields = b'{"prompt": "x", "max_tokens": 8000, "n": 64, "stream": true}'
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(fields) + fields)
        wait_until("it runs", lambda: service.core.busy == 64, 5)
        answer = service.client.completions.create(model=MODEL, prompt="x", max_tokens=20)
        assert answer.usage is not None and answer.usage.completion_tokens == 20
        wait_until("it is cut off", lambda: service.core.busy == 0, 20)
    aborted = service.metric('spmd_serve_requests_total{outcome="abort"}')
    ended = service.metric('spmd_serve_requests_total{outcome="length"}')
    assert aborted + ended == 65
    assert aborted > 0


def test_a_whole_answer_that_nobody_reads_is_dropped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_LIMIT", 0.2)
    service = start()
    longest = max(range(49152), key=lambda i: len(bundled_tokenizer().token_bytes(i)))
    with contextlib.ExitStack() as stack:
        for kind in (b"close", b"keep-alive"):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(address(service))
            fields = b'{"tokens": [%b]}' % b",".join([b"%d" % longest] * 200_000)
            head = b"POST /detokenize HTTP/1.1\r\nhost: x\r\nconnection: %b\r\ncontent-length: %d\r\n\r\n"
            deaf.sendall(head % (kind, len(fields)) + fields)
            deaf.settimeout(30)
            head, _, received = deaf.recv(4096).partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            count = len(received)
            time.sleep(1)  # reads nothing
            with contextlib.suppress(ConnectionResetError):
                while piece := deaf.recv(1 << 20):
                    count += len(piece)
            assert length > 6_000_000  # more than the kernel's buffers hold
            assert count < length


def test_a_slow_reader_gets_everything_in_few_pieces(start: Start) -> None:
    """What piles up while it does not read comes as one event for each choice, not one for each token."""
    service = start(script=lambda request: itertools.cycle(range(300, 1300)))
    fields = {"prompt": "x", "max_tokens": 8000, "stream": True, "n": 8, "stream_options": {"include_usage": True}}
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address(service))
        data = httpx.Request("POST", "http://x", json=fields).content
        slow.sendall(b"POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        wait_until("the engine has done its part", lambda: service.core.tokens == 64_000, 30)
        received = b""
        while piece := slow.recv(1 << 20):
            received += piece
    assert b'"completion_tokens":64000' in received
    assert received.count(b"data: ") < 40_000
