"""HTTP itself, over real sockets: offers of an upgrade, pipelining, HTTP/1.0, HEAD, encodings, half-closed connections."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_service import MODEL, FakeService
from support.server import wait_until

from spmd_serve.types import FinishReason

Start = Callable[..., FakeService]
TEXT = "one two three"
WHOLE = {"model": MODEL, "prompt": TEXT, "max_tokens": 50}
LONG = {"model": MODEL, "prompt": "again ", "max_tokens": 8000, "ignore_eos": True}
# What Java's HttpClient sends on cleartext with each request.
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"


def connect(service: FakeService) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def post(fields: dict[str, Any], head: bytes = b"", version: bytes = b"1.1", padding: int = 0) -> bytes:
    body = json.dumps(fields).encode() + b" " * padding
    first = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n" % (version, len(body))
    return first + head + b"\r\n" + body


def everything(connection: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


def answers(connection: socket.socket, count: int) -> list[tuple[int, dict[str, Any]]]:
    """Status and body of `count` answers with a Content-Length."""
    received, found = b"", []
    while len(found) < count:
        head, end, rest = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if end and length and len(rest) >= int(length[1]):
            found.append((int(head.split()[1]), json.loads(rest[: int(length[1])])))
            received = rest[int(length[1]) :]
            continue
        piece = connection.recv(1 << 16)
        assert piece, f"closed after {received!r}"
        received += piece
    assert not received
    return found


def text_of(answer: tuple[int, dict[str, Any]]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["text"])


# ---- offers of an upgrade -----------------------------------------------------------------------------------------


def whole(data: bytes) -> list[bytes]:
    return [data]


def head_and_body(data: bytes) -> list[bytes]:
    at = data.index(b"\r\n\r\n") + 4
    return [data[:at], data[at:]]


def inside_the_head(data: bytes) -> list[bytes]:
    at = data.index(b"h2c") + 1
    return [data[:at], data[at:]]


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@pytest.mark.parametrize("cut", [whole, head_and_body, inside_the_head, bytewise])
def test_an_offer_of_http2_is_not_taken(service: FakeService, cut: Callable[[bytes], list[bytes]]) -> None:
    """The request is answered in HTTP/1.1 however its bytes arrive, and so is the next one on the connection."""
    with connect(service) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(2):
            for piece in cut(post(WHOLE | {"prompt": f"{TEXT} {number}"}, OFFER)):
                connection.sendall(piece)
            assert text_of(*answers(connection, 1)) == f"{TEXT} {number}"


def test_an_offer_with_a_chunked_body(service: FakeService) -> None:
    body = json.dumps(WHOLE).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + OFFER + b"\r\n"
    with connect(service) as connection:
        connection.sendall(head + chunks + b"0\r\n\r\n" + post(WHOLE))
        assert [text_of(answer) for answer in answers(connection, 2)] == [TEXT, TEXT]


def test_many_pipelined_offers(service: FakeService) -> None:
    with connect(service) as connection:
        connection.sendall((b"GET /health HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n") * 1500)
        assert {status for status, _ in answers(connection, 1500)} == {200}


def test_an_offer_keeps_the_rest_of_the_head(service: FakeService) -> None:
    """Close together with an upgrade closes; 100-continue is answered; HTTP/1.0 stays it; what follows a close is dropped."""
    closing = OFFER.replace(b"Connection: ", b"Connection: close, ")
    with connect(service) as connection:
        connection.sendall(post(WHOLE, closing) + post(WHOLE, OFFER))
        received = everything(connection)
        assert received.count(b"HTTP/1.1 200 OK") == 1 and b"connection: close\r\n" in received
    with connect(service) as connection:
        head, body = head_and_body(post(WHOLE, OFFER + b"Expect: 100-continue\r\n"))
        connection.sendall(head)
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert text_of(*answers(connection, 1)) == TEXT
    with connect(service) as connection:
        connection.sendall(post(WHOLE, OFFER, version=b"1.0"))
        assert b"connection: close\r\n" in everything(connection)


def test_a_stream_to_a_client_that_offers_an_upgrade(service: FakeService) -> None:
    with connect(service) as connection:
        connection.sendall(post(WHOLE | {"stream": True}, b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"))
        assert everything(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
        b"CONNECT /v1/completions HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n",
        b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["connect", "connect-path", "websocket", "http2"],
)
def test_what_cannot_go_on_is_refused(service: FakeService, data: bytes) -> None:
    with connect(service) as connection:
        connection.sendall(data)
        received = everything(connection)
    assert re.match(rb"HTTP/1\.1 4\d\d ", received), received
    assert service.http.get("/health").status_code == 200


# ---- pipelining clients that leave --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("behind", [post(LONG) + post(LONG), post(LONG)[:-5]], ids=["two", "half"])
def test_a_pipelining_client_that_leaves(
    start: Start, caplog: pytest.LogCaptureFixture, stream: bool, later: bool, behind: bytes
) -> None:
    """The request in work is aborted, those behind it never start, and nothing is logged."""
    service = start(step_interval=0.005)
    with connect(service) as connection:
        first = post(LONG | {"stream": stream})
        connection.sendall(first if later else first + behind)
        wait_until("it runs", lambda: service.core.busy == 1, 20)
        if later:
            connection.sendall(behind)
            time.sleep(0.1)  # for the server to have read it: nothing shows when
    wait_until("it is aborted", lambda: service.core.busy == 0, 1)
    assert [reason for _, reason in service.core.aborted] == [FinishReason.ABORT]
    assert len(service.core.seen) == 1
    service.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_client_that_leaves_behind_much_unread(start: Start) -> None:
    """More than is read ahead while an answer is in work, so that the end of the connection is not read either."""
    service = start(step_interval=0.005)
    with connect(service) as connection:
        connection.sendall(post(LONG))
        wait_until("it runs", lambda: service.core.busy == 1, 20)
        connection.sendall(post(LONG | {"prompt": "x" * 100_000}))
    wait_until("it is aborted", lambda: service.core.busy == 0, 1)


def test_garbage_behind_a_stream_ends_it(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = start(step_interval=0.005)
    with connect(service) as connection:
        connection.sendall(post(LONG | {"stream": True}))
        wait_until("it runs", lambda: service.core.busy == 1, 20)
        connection.sendall(b"nonsense\r\n\r\n")
        everything(connection)
        wait_until("it is aborted", lambda: service.core.busy == 0, 1)
    service.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_pipelined_requests_are_answered_in_order(service: FakeService) -> None:
    texts = [f"{TEXT} {i}" for i in range(20)]
    with connect(service) as connection:
        connection.sendall(b"".join(post(WHOLE | {"prompt": text}) for text in texts))
        assert [text_of(answer) for answer in answers(connection, 20)] == texts
        connection.sendall(post(WHOLE, padding=300_000) * 2)
        assert [text_of(answer) for answer in answers(connection, 2)] == [TEXT, TEXT]


# ---- HTTP/1.0 -----------------------------------------------------------------------------------------------------


def test_streams_in_http_1_0_are_plain(start: Start) -> None:
    """Events as they are, to the end of the connection; also those that go past uvicorn, and for a client that would keep it."""
    service = start(step_interval=0.1)
    for head in (b"", b"Connection: keep-alive\r\n"):
        with connect(service) as connection:
            connection.sendall(post(WHOLE | {"stream": True}, head, version=b"1.0"))
            top, _, rest = everything(connection).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in top and b"content-length" not in top
        assert b"connection: close" in top
        events = rest.removesuffix(b"\n\n").split(b"\n\n")
        assert events[-1] == b"data: [DONE]"
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
        assert len(chunks) > 2
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT


def test_other_answers_in_http_1_0(service: FakeService) -> None:
    for data in (post(WHOLE, version=b"1.0"), post(WHOLE, b"Expect: 100-continue\r\n", version=b"1.0")):
        with connect(service) as connection:
            connection.sendall(data)
            top, _, rest = everything(connection).partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 200") and b"content-length: %d" % len(rest) in top
        assert json.loads(rest)["choices"][0]["text"] == TEXT


# ---- HEAD, trailing slashes, encodings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/docs", "/openapi.json"]
)
def test_head_is_get_without_the_body(service: FakeService, path: str) -> None:
    get, head = service.http.get(path), service.http.head(path)
    assert head.status_code == get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0 and head.content == b""


def test_head_where_there_is_no_get(service: FakeService) -> None:
    refused = service.http.head("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert service.http.delete("/health").headers["allow"] == "GET, HEAD"
    assert service.http.head("/nothing").status_code == 404
    with connect(service) as connection:  # nothing of a body stays in the way of the next answer
        connection.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert everything(connection).endswith(b"\r\n\r\n")


def test_a_slash_at_the_end_means_nothing(service: FakeService) -> None:
    """No redirect either: few clients follow one with a body, and behind a TLS proxy it would lead nowhere."""
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/version"):
        answer = service.http.get(path + "/")
        assert (answer.status_code, answer.json()) == (200, service.http.get(path).json())
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = (
            {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
        )
        assert service.http.post(path + "/", json=body).status_code == 200
    assert service.http.get("/").status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_encoded_bodies_are_refused_by_name(service: FakeService, path: str) -> None:
    body = json.dumps(WHOLE).encode()
    for encoding in ("gzip", "GZIP", "identity, gzip", "br"):
        headers = {"content-encoding": encoding}
        response = service.http.post(path, content=gzip.compress(body), headers=headers)
        assert response.status_code == 415
        assert f"Content-Encoding '{encoding}'" in response.json()["error"]["message"]


def test_transfer_codings_but_chunks_are_refused_by_name(service: FakeService) -> None:
    body = gzip.compress(json.dumps(WHOLE).encode())
    for coding, status in ((b"gzip, chunked", 415), (b"gzip , Chunked", 415), (b"Chunked", 400)):  # 400: it is not JSON
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: " + coding + b"\r\n\r\n"
        with connect(service) as connection:
            connection.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            ((found, answer),) = answers(connection, 1)
        assert found == status
        assert ("Transfer-Encoding" in answer["error"]["message"]) == (status == 415)


def test_a_body_encoded_as_identity(service: FakeService) -> None:
    response = service.http.post("/v1/completions", json=WHOLE, headers={"content-encoding": "Identity"})
    assert response.json()["choices"][0]["text"] == TEXT


# ---- half-closed connections --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_sending_counts_as_gone(start: Start, stream: bool) -> None:
    """It looks like one that has left (see eof_received), and those must not hold work."""
    service = start(step_interval=0.005)
    with connect(service) as connection:
        connection.sendall(post(LONG | {"stream": stream}))
        wait_until("it runs", lambda: service.core.busy == 1, 20)
        connection.shutdown(socket.SHUT_WR)
        wait_until("it is aborted", lambda: service.core.busy == 0, 1)


SERVE = """
import sys
from support.fake_service import start_fake
from spmd_serve.logs import set_up_logs
set_up_logs("info", 0, lambda: None)
service = start_fake()
print(service.url, flush=True)
sys.stdin.read()
service.close()
"""


def test_what_is_no_request_is_not_logged() -> None:
    """Anybody who reaches the port can send it, as fast as lines can be written."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, stdin=pipe, stdout=pipe, stderr=pipe
    ) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().rpartition(b":")[2])
            for garbage in (b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                    connection.sendall(garbage)
                    assert connection.recv(100).startswith(b"HTTP/1.1 400")
            assert server.communicate(timeout=60)[1] == b""
        finally:
            server.kill()


# ---- what is neither head nor body --------------------------------------------------------------------------------

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 4096),
        (b"2\r\n{}\r\n0\r\na: ", b"b" * 16384),
        (b"1;", b"b" * 16384),
    ],
    ids=["trailers", "a trailer", "a chunk's extension"],
)
def test_frames_without_end(service: FakeService, begin: bytes, piece: bytes) -> None:
    """uvicorn keeps trailers, and httptools puts a long one together in quadratic time: 60 MiB took 1.2 GB, or seconds."""
    with connect(service) as connection, pytest.raises(ConnectionError):
        connection.sendall(CHUNKED + begin)
        for _ in range(4096):
            connection.sendall(piece)
    assert service.http.get("/health").status_code == 200


def test_a_few_trailers(service: FakeService) -> None:
    body = json.dumps(WHOLE).encode()
    data = CHUNKED + b"%x\r\n%b\r\n0\r\nExpires: never\r\n\r\n" % (len(body), body)
    with connect(service) as connection:
        for _ in range(2):
            connection.sendall(data)
            assert [text_of(answer) for answer in answers(connection, 1)] == [TEXT]


def test_ten_thousand_requests_at_once(service: FakeService) -> None:
    """They would be taken in at once: 1.2 s of the event loop for each 256 KiB, and 5 KB of memory for each request."""
    service.core.paused.set()
    try:
        with connect(service) as connection:
            connection.sendall(post(LONG))
            wait_until("the first request is there", lambda: service.core.busy == 1, 10)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10_000)
            wait_until("the connection is cut, and its work is aborted", lambda: service.core.busy == 0, 10)
    finally:
        service.core.paused.clear()
    with connect(service) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        assert [status for status, _ in answers(connection, 200)] == [200] * 200
