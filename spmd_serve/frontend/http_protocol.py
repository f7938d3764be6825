"""uvicorn's HTTP protocol, for clients that are many, slow, silent, gone or of another version of HTTP."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from spmd_serve.errors import OverloadedError
from spmd_serve.frontend.answers import error_body
from spmd_serve.frontend.responses import CONNECTION

HEAD_TIMEOUT = 30.0  # seconds from a connection, or a request's first byte, to its complete head
REST_TIMEOUT = 60.0  # seconds from an answer before the end of its request's body to the next request's head
UNREAD_LIMIT = 60.0  # seconds in which a client must read something of a finished answer
MAX_HEAD = 64 * 1024  # bytes of request line and headers; of what else comes that is no body, as trailers are
MAX_PIPELINED = 2048  # requests of a connection that wait for the answers to those before them
LEFT_INTERVAL = 0.25  # seconds between looks whether a client has left whose connection is not read

_FULL_BODY = orjson.dumps(error_body(OverloadedError("too many connections (--max-connections); try later")))
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n" % len(_FULL_BODY)
) + _FULL_BODY


class DirectConnection:
    """Past uvicorn's `send` to the transport, for the pieces of a stream whose head uvicorn has sent."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def writable(self) -> bool:
        return not self._flow.write_paused and not self._transport.is_closing()

    def write_chunk(self, data: bytes) -> None:
        if self._cycle.chunked_encoding:  # as the head says
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()


class _Parser(httptools.HttpRequestParser):
    """Goes on with HTTP/1.1 when a client offers an upgrade (RFC 9110 7.8), as Java's does with `Upgrade: h2c`.

    llhttp stops behind such a head and leaves the body to the other protocol; so the head is read again without the offer.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        super().__init__(self._protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does, to answer what came before

    def feed_data(self, data: Any) -> None:
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("this is not a proxy") from None
                rest = rest[upgrade.args[0] :]
            head = self._head_without_offer()
            self._begin()
            super().feed_data(head)

    def _head_without_offer(self) -> bytes:
        first = b"%b %b HTTP/%b" % (self.get_method(), self._protocol.url, self.get_http_version().encode())
        fields = [b"%b: %b" % field for field in self._protocol.headers if field[0] != b"upgrade"]
        return b"\r\n".join([first, *fields, b"", b""])


def _answer_http_1_0(cycle: RequestResponseCycle) -> None:
    """What uvicorn does not know of HTTP/1.0: it has neither chunks (RFC 9112 6.1) nor 100 Continue (RFC 9110 10.1.1).

    A body whose length is not announced ends with the connection.
    """
    send = cycle.send
    endless = False

    async def send_plain(message: Any) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if endless:
                cycle.chunked_encoding = False
        elif endless:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False


class LimitedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's HTTP protocol with limits on connections and on request heads, and a way past `send`.

    `count_response` gets the status of answers that no application gives.
    """

    _in_head = True  # a request's head is expected or incomplete
    _head_came = False  # in the data that is being handled
    _body_came = False  # the same
    _head_size = 0
    _head_timer: asyncio.TimerHandle | None = None
    _left_timer: asyncio.TimerHandle | None = None

    def __init__(
        self, *arguments: Any, max_connections: int, count_response: Callable[[int], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._max_connections = max_connections
        self._count_response = count_response
        self.parser = _Parser(self)
        self._unfinished: deque[RequestResponseCycle] = deque()  # the one in work, and those that wait behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._count_response(503)
            transport.write(_FULL)
            transport.close()
            return
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, transport.abort)

    def data_received(self, data: bytes) -> None:
        in_head = self._in_head
        self._head_came = self._body_came = False
        super().data_received(data)
        if self.flow.read_paused and self._left_timer is None:
            self._left_timer = self.loop.call_later(LEFT_INTERVAL, self._look_whether_left)
        if in_head != self._in_head or self._head_came or self._body_came:
            return
        self._head_size += len(data)  # or of a body's frame: a chunk's extension, trailers
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._head_size > MAX_HEAD:
            self._cut_off()
        elif in_head and self._head_timer is None and not answering:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # nobody reads trailers, and uvicorn would keep them, however many come
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser reads it again
        if len(self.pipeline) >= MAX_PIPELINED:
            # uvicorn reads no further, but what it has read at once may be ten thousand heads: a second and 100 MB.
            self._cut_off()
            raise httptools.HttpParserError("too many requests at once")
        self._in_head = False
        self._head_came = True
        self._head_size = 0
        self._stop_head_timer()
        super().on_headers_complete()
        self._unfinished.append(self.cycle)
        if self.scope["http_version"] != "1.1":
            _answer_http_1_0(self.cycle)
        self.scope["extensions"] = {CONNECTION: DirectConnection(self.cycle)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        self._head_size = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        answered = self._unfinished.popleft()
        super().on_response_complete()
        if answered.more_body and not self.transport.is_closing():
            # The rest is read and dropped. uvicorn's timer for idle connections ends with its first byte, and for good.
            self._head_timer = self.loop.call_later(REST_TIMEOUT, self.transport.abort)
        self._watch_unread(None)

    def _watch_unread(self, before: int | None) -> None:
        """Cut a client that does not read the rest of its answer; one that reads, however slowly, is left alone."""
        unread = self.transport.get_write_buffer_size()
        if before is not None and unread >= before:
            self.transport.abort()
        elif unread:
            self.loop.call_later(UNREAD_LIMIT, self._watch_unread, unread)

    def eof_received(self) -> None:
        """The client has left; None closes the transport.

        It may also only have ended its sending (shutdown) and wait for its answer. Both arrive as the same FIN, and
        only a write would show which it was, which a request that waits for its whole answer does not make. Work of
        clients that have left must be freed within a second, so those that half-close get no answer.
        """

    def _look_whether_left(self) -> None:
        """End a connection whose client has left, while reading, which would tell, waits for an answer to end.

        The kernel knows, as long as it holds all that the client has sent (about 64 KiB more than has been read).
        """
        self._left_timer = None
        if not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._left_timer = self.loop.call_later(LEFT_INTERVAL, self._look_whether_left)

    def _abandon(self) -> None:
        """Tell all requests that nobody waits for their answers; uvicorn tells only the newest."""
        for cycle in self._unfinished:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unfinished.clear()

    def _cut_off(self) -> None:
        self._abandon()
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # as it is when the parser has been stopped by `_cut_off`
            self._count_response(400)
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._left_timer is not None:
            self._left_timer.cancel()
        self._abandon()
        super().connection_lost(exc)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
