"""uvicorn in a thread of its own, on a socket that is already bound."""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from spmd_serve.config import Config
from spmd_serve.errors import FrontendError
from spmd_serve.frontend.app import make_app, make_services
from spmd_serve.frontend.link import FrontLink
from spmd_serve.frontend.metrics import Metrics
from spmd_serve.frontend.responses import CONNECTION
from spmd_serve.types import ModelInfo

logger = logging.getLogger(__name__)

HEAD_TIMEOUT = 30.0  # seconds from a connection, or a request's first byte, to its complete head
UNREAD_LIMIT = 60.0  # seconds in which a client must read something of a finished answer
MAX_HEAD = 64 * 1024  # bytes of request line and headers
OWN_FILES = 256  # open files that are no client's: weights, sockets between ranks, a GPU's devices
KEEP_ALIVE_TIMEOUT = 30  # seconds that an idle connection is kept
BEAT_INTERVAL = 0.5  # seconds between signs of life of the event loop
LEFT_INTERVAL = 0.25  # seconds between looks whether a client has left whose connection is not read

_FULL_BODY = (
    b'{"error":{"message":"too many connections (--max-connections); try later","type":"overloaded_error",'
    b'"param":null,"code":"overloaded"}}'
)
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


def make_protocol(max_connections: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with limits on connections and on request heads, and a way past `send`."""

    class LimitedProtocol(HttpToolsProtocol):  # type: ignore[misc]
        _in_head = True  # a request's head is expected or incomplete
        _head_came = False  # in the data that is being handled
        _head_size = 0
        _head_timer: asyncio.TimerHandle | None = None
        _left_timer: asyncio.TimerHandle | None = None

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.parser = _Parser(self)
            self._unfinished: deque[RequestResponseCycle] = deque()  # the one in work, and those that wait behind it

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.write(_FULL)
                transport.close()
                return
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, transport.abort)

        def data_received(self, data: bytes) -> None:
            only_head = self._in_head
            self._head_came = False
            super().data_received(data)
            if self.flow.read_paused and self._left_timer is None:
                self._left_timer = self.loop.call_later(LEFT_INTERVAL, self._look_whether_left)
            if not (only_head and self._in_head) or self._head_came:
                return
            self._head_size += len(data)
            answering = self.cycle is not None and not self.cycle.response_complete
            if self._head_size > MAX_HEAD:
                self._abandon()
                self.transport.abort()
            elif self._head_timer is None and not answering:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)

        def on_headers_complete(self) -> None:
            if self.parser.should_upgrade():
                return  # the parser reads it again
            self._in_head = False
            self._head_came = True
            self._head_size = 0
            self._stop_head_timer()
            super().on_headers_complete()
            self._unfinished.append(self.cycle)
            if self.scope["http_version"] != "1.1":
                _answer_http_1_0(self.cycle)
            self.scope["extensions"] = {CONNECTION: DirectConnection(self.cycle)}  # type: ignore[dict-item]

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            self._in_head = True
            super().on_message_complete()

        def on_response_complete(self) -> None:
            self._unfinished.popleft()
            super().on_response_complete()
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

    return LimitedProtocol


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class HttpThread:
    """One frontend: an event loop in a thread that serves HTTP and talks to the step loop.

    `on_death` is called, with a reason, if the thread ends without having been asked to; `on_beat` by the event loop, every
    BEAT_INTERVAL. `shared_metrics` says that this process is one of several whose metrics are summed.
    """

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        link: FrontLink,
        listener: socket.socket,
        on_death: Callable[[str], None],
        *,
        on_beat: Callable[[], None] = lambda: None,
        shared_metrics: bool = False,
    ) -> None:
        self._services = make_services(config, info, link, Metrics(first=link.index == 0, shared=shared_metrics))
        self._listener = listener
        self._on_death = on_death
        self._on_beat = on_beat
        self._stopping = False
        self._started = threading.Event()
        settings = uvicorn.Config(
            make_app(config, self._services),  # type: ignore[arg-type]
            http=make_protocol(allow_connections(config.server.max_connections)),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
            timeout_graceful_shutdown=1,
            backlog=2048,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Listen; returns when connections are taken.

        Raises:
            FrontendError: it did not come up.
        """
        self._thread.start()
        self._started.wait(30)
        if not self._started.is_set() or not self._thread.is_alive():
            raise FrontendError("the HTTP server did not start; see the log above")

    def stop(self, timeout_s: float) -> bool:
        """Let open responses end for `timeout_s`, then close everything. False if the thread did not end."""
        self._stopping = True
        self._server.config.timeout_graceful_shutdown = max(1, round(timeout_s))
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s + 5)
        self._services.threads.shutdown(wait=False, cancel_futures=True)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason = "the HTTP server ended"
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            logger.exception("the HTTP server failed")
            reason = f"the HTTP server failed: {error}"
        finally:
            self._started.set()
            if not self._stopping:
                self._on_death(reason)

    async def _serve(self) -> None:
        self._services.dispatcher.start()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        beating = asyncio.create_task(self._beat())
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._started.set()
            await serving
        finally:
            beating.cancel()
            self._services.dispatcher.close()

    async def _beat(self) -> None:
        while True:
            self._on_beat()
            await asyncio.sleep(BEAT_INTERVAL)


def allow_connections(wanted: int) -> int:
    """Raise this process's limit of open files as far as `wanted` connections need it; returns how many of them fit.

    Shells and services mostly give 1,024, and allow more. Beyond the limit clients would be cut off without an answer, and
    nothing else in this process could open a file either.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + OWN_FILES
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    allowed = min(wanted, max(files - OWN_FILES, files // 2))
    if allowed < wanted:
        logger.warning(
            "only %d files may be open here (ulimit -Hn): there can be %d connections, not %d", files, allowed, wanted
        )
    return allowed


def bind(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` listening sockets on one address; port 0 takes a free port.

    More than one share the port by SO_REUSEPORT, and the kernel deals connections to them. The address is bound alone
    first, because SO_REUSEPORT would let two servers of one user share a port without knowing.

    Raises:
        FrontendError: the address cannot be bound.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        first = _listen(family, kind, proto, address, reuse_port=False)
        if count == 1:
            return [first]
        address = first.getsockname()
        first.close()
        return [_listen(family, kind, proto, address, reuse_port=True) for _ in range(count)]
    except OSError as error:
        raise FrontendError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port"
        ) from None


def _listen(family: int, kind: int, proto: int, address: Any, *, reuse_port: bool) -> socket.socket:
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
