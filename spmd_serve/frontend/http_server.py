"""uvicorn in a thread of its own, on a socket that is already bound."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from spmd_serve.config import Config
from spmd_serve.errors import FrontendError
from spmd_serve.frontend.app import make_app, make_services
from spmd_serve.frontend.http_protocol import LimitedProtocol
from spmd_serve.frontend.link import FrontLink
from spmd_serve.frontend.metrics import Metrics
from spmd_serve.types import ModelInfo

logger = logging.getLogger(__name__)

OWN_FILES = 256  # open files that are no client's: weights, sockets between ranks, a GPU's devices
KEEP_ALIVE_TIMEOUT = 30  # seconds that an idle connection is kept
BEAT_INTERVAL = 0.5  # seconds between signs of life of the event loop


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
        self._failure = ""  # why the thread ends by itself
        self._started = threading.Event()
        protocol = partial(
            LimitedProtocol,
            max_connections=allow_connections(config.server.max_connections),
            count_response=self._services.metrics.count_response,
        )
        settings = uvicorn.Config(
            make_app(config, self._services),  # type: ignore[arg-type]
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level=None,  # as set_up_logs has it
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
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            logger.exception("the HTTP server failed")
            self._failure = f"the HTTP server failed: {error}"
        finally:
            self._started.set()
            if not self._stopping:
                self._on_death(self._failure or "the HTTP server ended")

    async def _serve(self) -> None:
        self._services.dispatcher.start(self._give_up)
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

    def _give_up(self, reason: str) -> None:
        """End the thread, and with it the service; open responses have a moment to tell their clients."""
        self._failure = reason
        self._server.should_exit = True

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
