"""Rank 0's frontend: a thread of this process, or child processes on one port."""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from spmd_serve.config import Config
from spmd_serve.errors import FrontendError
from spmd_serve.frontend.http_server import HttpThread, bind
from spmd_serve.frontend.link import CoreLink, FrontLink, LinkAddress
from spmd_serve.frontend.metrics import MULTIPROCESS_VARIABLE
from spmd_serve.types import ModelInfo, ServiceState

START_TIMEOUT = 60.0  # seconds for child processes to load the tokenizer and listen
LOOK_INTERVAL = 0.5  # seconds in which a child's sign of life may be looked for late
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's address
REAP_TIMEOUT = 1.0  # seconds for the kernel to tell how a child ended whose files are closed


class ChildSettings(msgspec.Struct):
    """What a child process is told on its standard input."""

    config: Config
    info: ModelInfo
    address: LinkAddress
    index: int
    listener: int  # file descriptor
    beats: int  # file descriptor of a pipe, for signs of life
    parent: int  # process id


class Frontend:
    """What the step loop's side holds.

    Attributes:
        link: requests and outputs.
        url: where HTTP is served.
    """

    def __init__(
        self, link: CoreLink, url: str, context: zmq.Context[zmq.Socket[bytes]], on_death: Callable[[str], None]
    ) -> None:
        self.link = link
        self.url = url
        self._context = context
        self._on_death = on_death

    def _died(self, reason: str) -> None:
        """Nothing can be served any more. The step loop hears it from the link; it may not have begun, or be in a long step."""
        self.link.fail(reason)
        self._on_death(reason)

    def stop(self, timeout_s: float) -> None:
        """End what is still open with an error, let responses reach their clients for at most `timeout_s`, close all.

        The step loop has ended, so nothing open can go on; the word comes after all outputs on the same socket.
        """
        self.link.set_state(ServiceState.FAILED, "the server has stopped")
        if self._stop_serving(timeout_s):
            self.link.close()
            self._context.term()

    def _stop_serving(self, timeout_s: float) -> bool:
        """False when the frontend still holds sockets of the context, which then must not be waited for."""
        raise NotImplementedError


class _Silence:
    """How long a frontend has given no sign of life, looked for every LOOK_INTERVAL."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def look(self, heard: bool) -> None:
        now = time.monotonic()
        took, self._last = now - self._last, now
        if heard:
            self.seconds = 0.0
        elif took < 2 * LOOK_INTERVAL:  # else this process was suspended, perhaps as they were
            self.seconds += took


def _silence_limit(config: Config) -> float:
    """How long a frontend may be silent: as long as a rank."""
    return min(config.control.step_timeout, config.control.control_timeout)


class ThreadFrontend(Frontend):
    """HTTP in a thread of this process, over inproc sockets."""

    def __init__(self, config: Config, info: ModelInfo, on_death: Callable[[str], None]) -> None:
        (listener,) = bind(config.server.host, config.server.port, 1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = LinkAddress("inproc://inbox", ("inproc://outbox.0",))
        link = CoreLink(address, context)
        super().__init__(link, url_of(listener), context, on_death)
        self._thread: HttpThread | None = None
        self._stopping = self._stands_still = False
        self._beat = threading.Event()
        self._silence_limit = _silence_limit(config)
        front = FrontLink(address, 0, context)
        try:
            self._thread = HttpThread(config, info, front, listener, self._died, on_beat=self._beat.set)
            self._thread.start()
            link.await_frontends(START_TIMEOUT, lambda: None)
        except BaseException:
            front.close()
            listener.close()
            self.stop(0)
            raise
        threading.Thread(target=self._watch_thread, name="frontend-watch", daemon=True).start()

    def _watch_thread(self) -> None:
        """An event loop that stands still would keep its clients waiting, in a job whose ranks are all well."""
        silence = _Silence()
        while not self._stopping:
            silence.look(self._beat.wait(LOOK_INTERVAL))
            self._beat.clear()
            if silence.seconds > self._silence_limit and not self._stopping:
                self._stands_still = True
                self._died(f"the HTTP frontend has given no sign of life for {silence.seconds:.1f} s")
                return

    def _stop_serving(self, timeout_s: float) -> bool:
        self._stopping = True
        if self._stands_still:  # it would be waited for until this process is ended by force, with the reason untold
            return False
        return self._thread is None or self._thread.stop(timeout_s)


class ProcessFrontend(Frontend):
    """HTTP in `count` child processes, over ipc sockets in a private folder. A child that dies, or is silent, ends the job.

    Each has a pipe for signs of life, whose end also tells that the child is gone.
    """

    def __init__(self, config: Config, info: ModelInfo, count: int, on_death: Callable[[str], None]) -> None:
        listeners = bind(config.server.host, config.server.port, count)
        share = math.ceil(config.server.max_connections / count)
        config = replace(config, server=replace(config.server, max_connections=share))
        self._folder = _new_folder()
        self._cleaner = _clean_up_after_us(self._folder)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = LinkAddress(
            f"ipc://{self._folder}/inbox", tuple(f"ipc://{self._folder}/outbox.{i}" for i in range(count))
        )
        link = CoreLink(address, context)
        super().__init__(link, url_of(listeners[0]), context, on_death)
        link.explain = lambda: self._how_one_ended(REAP_TIMEOUT)
        self._stopping = False
        self._silence_limit = _silence_limit(config)
        self._children: list[subprocess.Popen[bytes]] = []
        self._beats: list[int] = []  # the pipes' ends here, by child
        for index, listener in enumerate(listeners):
            own_end, child_end = os.pipe()
            settings = ChildSettings(config, info, address, index, listener.fileno(), child_end, os.getpid())
            self._children.append(self._spawn(settings))
            self._beats.append(own_end)
            os.close(child_end)
        for listener in listeners:
            listener.close()
        self._watch = threading.Thread(target=self._watch_children, name="frontend-watch", daemon=True)
        try:
            link.await_frontends(START_TIMEOUT, self._check_children)
        except BaseException:
            self.stop(0)
            raise
        self._watch.start()

    def _spawn(self, settings: ChildSettings) -> subprocess.Popen[bytes]:
        environment = os.environ | {MULTIPROCESS_VARIABLE: str(self._folder)}
        child = subprocess.Popen(
            [sys.executable, "-m", "spmd_serve.frontend.child"],
            stdin=subprocess.PIPE,
            pass_fds=[settings.listener, settings.beats],
            env=environment,
        )
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(settings) + b"\n")
        child.stdin.flush()  # it stays open: its end tells the child that this process is gone
        return child

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [child.pid for child in self._children]

    def _check_children(self) -> None:
        reason = self._how_one_ended()
        if reason is not None:
            raise FrontendError(reason)

    def _how_one_ended(self, patience_s: float = 0.0) -> str | None:
        """What is to be said of a child that has ended; None if there is none."""
        deadline = time.monotonic() + patience_s
        while True:
            for index, child in enumerate(self._children):
                code = child.poll()
                if code is not None:
                    return f"HTTP frontend process {index} ended with code {code}; see the log above"
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)

    def _watch_children(self) -> None:
        poller = select.poll()
        for beats in self._beats:
            poller.register(beats, select.POLLIN)
        silences = [_Silence() for _ in self._beats]
        while not self._stopping:
            heard = [beats for beats, _ in poller.poll(1000 * LOOK_INTERVAL)]
            for index, beats in enumerate(self._beats):
                silence = silences[index]
                silence.look(beats in heard)
                reason = None
                if beats in heard and not os.read(beats, 4096):
                    reason = self._how_one_ended(REAP_TIMEOUT) or f"HTTP frontend process {index} is gone"
                elif silence.seconds > self._silence_limit:
                    reason = f"HTTP frontend process {index} has given no sign of life for {silence.seconds:.1f} s"
                if reason is not None:
                    if not self._stopping:
                        self._died(reason)
                        self._children[index].kill()  # a stopped one would keep its clients waiting
                    return

    def _stop_serving(self, timeout_s: float) -> bool:
        self._stopping = True
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        deadline = time.monotonic() + timeout_s + 5
        for child in self._children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self._watch.ident is not None:
            self._watch.join()
        for beats in self._beats:
            os.close(beats)
        self._cleaner.communicate()
        return True


def _new_folder() -> Path:
    """A new folder that is ours alone (mode 0700), with a path that is short enough for the addresses of sockets.

    Clusters give jobs a TMPDIR of a hundred characters and more. ZeroMQ wants a path as UTF-8, which other letters than ASCII's
    are not in every locale, and counts its bytes.
    """
    longest = MAX_SOCKET_PATH - len("/spmd_serve-12345678/outbox.64")
    usual = tempfile.gettempdir()
    try:
        return Path(tempfile.mkdtemp("", "spmd_serve-", usual if usual.isascii() and len(usual) <= longest else "/tmp"))
    except OSError as error:
        raise FrontendError(
            f"there is no folder for the frontend's sockets ({error}); set TMPDIR to one of at most {longest} ASCII characters"
        ) from None


def _clean_up_after_us(folder: Path) -> subprocess.Popen[bytes]:
    """A process that removes the folder when its standard input ends: we have closed it, or are gone, if by kill -9.

    Nobody else could do it then, as the kernel kills the children with their parent. Signals to all processes are not for it.
    """
    wait_and_remove = 'trap "" HUP INT TERM; read -r _; exec rm -rf "$0"'
    return subprocess.Popen(["sh", "-c", wait_and_remove, str(folder)], stdin=subprocess.PIPE, start_new_session=True)


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket; an unspecified address is shown as this host, by a name that resolves."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
        try:
            socket.getaddrinfo(host, port, socket.AF_INET if listener.family == socket.AF_INET else 0)
        except OSError:
            host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def start_frontend(config: Config, info: ModelInfo, on_death: Callable[[str], None] = lambda reason: None) -> Frontend:
    """Start what --frontend asks for; it listens at once and answers 503 until the link's state is READY. auto is a thread here.

    Args:
        on_death: called by another thread, with the reason, if it ends without having been asked to.

    Raises:
        FrontendError: the port is in use, or the frontend did not start.
        ModelError: tokenizer or chat template cannot be used.
    """
    kind, _, count = config.server.frontend.partition(":")
    if kind != "process":
        return ThreadFrontend(config, info, on_death)
    return ProcessFrontend(config, info, int(count or 1), on_death)
