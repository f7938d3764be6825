"""uvicorn in a thread of its own, on a socket that is already bound."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
KEEP_ALIVE_TIMEOUT = 30  # seconds that an idle connection is kept

_FULL_BODY = (
    b'{"error":{"message":"too many connections (--max-connections); try later","type":"overloaded_error",'
    b'"param":null,"code":"overloaded"}}'
)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n" % len(_FULL_BODY)
) + _FULL_BODY


class DirectConnection:
    """Past uvicorn's `send` to the transport, for the pieces of a stream whose head uvicorn has sent (chunked)."""

    __slots__ = ("_flow", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def writable(self) -> bool:
        return not self._flow.write_paused and not self._transport.is_closing()

    def write_chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        self._transport.abort()


def make_protocol(max_connections: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with limits on connections and on request heads, and a way past `send`."""

    class LimitedProtocol(HttpToolsProtocol):  # type: ignore[misc]
        _in_head = True  # a request's head is expected or incomplete
        _head_came = False  # in the data that is being handled
        _head_size = 0
        _head_timer: asyncio.TimerHandle | None = None

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
            if not (only_head and self._in_head) or self._head_came:
                return
            self._head_size += len(data)
            answering = self.cycle is not None and not self.cycle.response_complete
            if self._head_size > MAX_HEAD:
                self.transport.abort()
            elif self._head_timer is None and not answering:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = {CONNECTION: DirectConnection(self.transport, self.flow)}  # type: ignore[dict-item]

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_came = True
            self._head_size = 0
            self._stop_head_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head = True
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_unread(None)

        def _watch_unread(self, before: int | None) -> None:
            """Cut a client that does not read the rest of its answer; one that reads, however slowly, is left alone."""
            unread = self.transport.get_write_buffer_size()
            if before is not None and unread >= before:
                self.transport.abort()
            elif unread:
                self.loop.call_later(UNREAD_LIMIT, self._watch_unread, unread)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
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

    `on_death` is called, with a reason, if the thread ends without having been asked to. `shared_metrics` says that this
    process is one of several whose metrics are summed.
    """

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        link: FrontLink,
        listener: socket.socket,
        on_death: Callable[[str], None],
        *,
        shared_metrics: bool = False,
    ) -> None:
        self._services = make_services(config, info, link, Metrics(first=link.index == 0, shared=shared_metrics))
        self._listener = listener
        self._on_death = on_death
        self._stopping = False
        self._started = threading.Event()
        settings = uvicorn.Config(
            make_app(config, self._services),  # type: ignore[arg-type]
            http=make_protocol(config.server.max_connections),
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
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._started.set()
            await serving
        finally:
            self._services.dispatcher.close()


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
