"""ZeroMQ sockets that join the step loop and the frontends inside rank 0; msgpack frames, never pickle.

    frontend 0..N-1   --- PUSH --->  inbox (one, bound by the core)      requests and aborts
    frontend i        <-- PUSH ----  outbox i (bound by the core)        step outputs and the service's state

The same code runs over `inproc://` (the frontend is a thread) and `ipc://` (child processes). A request's uid names the
frontend that it came from, so that outputs find their way back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from spmd_serve.errors import FrontendError
from spmd_serve.types import Abort, Request, ServiceState, StepOutput

UID_SHIFT = 40  # a uid is (frontend index << UID_SHIFT) + a counter
# Bytes of requests after which the step loop goes on; the rest waits for the next steps. The step that takes a request in
# has all ranks read it, and one client may send hundreds of sequences with prompts and biases of 100 KB each. Not less,
# because whoever comes behind them, and their aborts too, waits for as many steps.
INTAKE = 2**20
OUTBOX_LIMIT = 10_000  # step outputs that may wait for one frontend; beyond it the frontend is taken for dead


class LinkAddress(msgspec.Struct, frozen=True):
    """Where the sockets are: `inbox` and one outbox for each frontend."""

    inbox: str
    outboxes: tuple[str, ...]


class ToCore(msgspec.Struct, array_like=True):
    """One message from a frontend, with one request at most. `hello` is sent once, when it can take output."""

    requests: list[Request] = []
    aborts: list[Abort] = []
    hello: int | None = None


class ToFrontend(msgspec.Struct, array_like=True):
    """One message to a frontend: what a step produced, or a new state of the service with its reason."""

    output: StepOutput | None = None
    state: ServiceState | None = None
    reason: str = ""


class CoreLink:
    """The step loop's side. The main thread owns it; `set_state`, `wake` and `fail` may be called by any thread.

    `lock` guards the outboxes. The inbox is the main thread's alone; a pipe wakes it, because a pipe may be written
    from any thread and from a signal handler.
    """

    def __init__(self, address: LinkAddress, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._inbox = context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(address.inbox)
        self._outboxes = []
        for endpoint in address.outboxes:
            outbox = context.socket(zmq.PUSH)
            outbox.setsockopt(zmq.SNDHWM, OUTBOX_LIMIT)
            outbox.setsockopt(zmq.LINGER, 2000)  # ms; lets the last outputs reach a child process
            outbox.bind(endpoint)
            self._outboxes.append(outbox)
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._stuck: int | None = None  # a frontend that does not take its output
        self._pipe_out, self._pipe_in = os.pipe()
        os.set_blocking(self._pipe_out, False)
        os.set_blocking(self._pipe_in, False)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._pipe_out, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()
        self._hellos: set[int] = set()
        self._closed = False
        # Why a frontend does not take its output, if that is known.
        self.explain: Callable[[], str | None] = lambda: None

    def await_frontends(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until every frontend is connected both ways. `check` is called meanwhile and raises if one has died.

        Raises:
            FrontendError: not all of them came within the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._hellos) < len(self._outboxes):
            check()
            if time.monotonic() > deadline:
                raise FrontendError(f"the HTTP frontend did not start within {timeout_s:g} s")
            if self.wait(0.05):
                self.drain()
        for outbox in self._outboxes:
            if not outbox.poll(max(1, int(1000 * (deadline - time.monotonic()))), zmq.POLLOUT):
                raise FrontendError(f"the HTTP frontend did not connect within {timeout_s:g} s")

    def drain(self) -> tuple[list[Request], list[Abort]]:
        """What the frontends have queued, in order, up to INTAKE bytes; does not wait.

        Raises:
            FrontendError: a frontend has died or does not take its output.
        """
        if self._failure is None and self._stuck is not None:
            self._failure = self.explain() or f"HTTP frontend {self._stuck} does not take its output"
        if self._failure is not None:
            raise FrontendError(self._failure)
        requests: list[Request] = []
        aborts: list[Abort] = []
        taken = 0
        while taken < INTAKE:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            taken += len(data)
            message = self._decoder.decode(data)
            requests += message.requests
            aborts += message.aborts
            if message.hello is not None:
                self._hellos.add(message.hello)
        return requests, aborts

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to drain, or `wake`; True when there is, False after `timeout_s`."""
        events = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._pipe_out in events:
            os.read(self._pipe_out, 4096)
        return bool(events)

    def wake(self) -> None:
        """Make `wait` return (now, or when it is called next)."""
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wakes already
                os.write(self._pipe_in, b"\0")

    def fail(self, message: str) -> None:
        """Make `drain` raise FrontendError: a frontend has died."""
        self._failure = message
        self.wake()

    def publish(self, output: StepOutput) -> None:
        """Hand a step's output to the frontends that its rows belong to; statistics go to all of them."""
        count = len(self._outboxes)
        for index, part in enumerate(split_output(output, count) if count > 1 else [output]):
            self._send(index, ToFrontend(output=part))

    def set_state(self, state: ServiceState, reason: str = "") -> None:
        """Tell every frontend what the service is doing; FAILED ends all open requests with an error."""
        for index in range(len(self._outboxes)):
            self._send(index, ToFrontend(state=state, reason=reason))

    def close(self) -> None:
        """Close the sockets; what was published before still reaches the frontends. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.close(0)
            for outbox in self._outboxes:
                outbox.close()
            os.close(self._pipe_in)
            os.close(self._pipe_out)

    def _send(self, index: int, message: ToFrontend) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                self._outboxes[index].send(self._encoder.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self._stuck = index


class FrontLink:
    """A frontend's side; one thread (the event loop's) owns it."""

    def __init__(self, address: LinkAddress, index: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._inbox = context.socket(zmq.PUSH)
        self._inbox.setsockopt(zmq.SNDHWM, 0)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.connect(address.inbox)
        self._outbox = context.socket(zmq.PULL)
        self._outbox.setsockopt(zmq.RCVHWM, OUTBOX_LIMIT)
        self._outbox.connect(address.outboxes[index])
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._encoder = msgspec.msgpack.Encoder()
        self.index = index

    def fileno(self) -> int:
        """A descriptor that becomes readable when messages come. `receive` until it returns nothing, each time."""
        return int(self._outbox.getsockopt(zmq.FD))

    def hello(self) -> None:
        """Say that this frontend is ready to take output."""
        self._inbox.send(self._encoder.encode(ToCore(hello=self.index)))

    def send(self, requests: list[Request], aborts: list[Abort]) -> None:
        """Queue requests and aborts for the step loop, each request as a message (see INTAKE); never waits."""
        for request in requests[:-1]:
            self._inbox.send(self._encoder.encode(ToCore([request])))
        self._inbox.send(self._encoder.encode(ToCore(requests[-1:], aborts)))

    def receive(self, limit: int) -> list[ToFrontend]:
        """Up to `limit` messages that have come; does not wait."""
        messages = []
        try:
            for _ in range(limit):
                messages.append(self._decoder.decode(self._outbox.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        return messages

    def close(self) -> None:
        self._inbox.close(0)
        self._outbox.close(0)


def split_output(output: StepOutput, parts: int) -> list[StepOutput]:
    """One StepOutput for each frontend index, with the rows whose uid names it; all of them carry the statistics."""
    split = [StepOutput(step=output.step, stats=output.stats) for _ in range(parts)]
    for row, uid in enumerate(output.uids):
        part = split[uid >> UID_SHIFT]
        if row in output.logprobs:
            part.logprobs[len(part.uids)] = output.logprobs[row]
        part.uids.append(uid)
        part.tokens.append(output.tokens[row])
    for started in output.started:
        split[started[0] >> UID_SHIFT].started.append(started)
    for chunk in output.prompt_logprobs:
        split[chunk[0] >> UID_SHIFT].prompt_logprobs.append(chunk)
    for finish in output.finished:
        split[finish.uid >> UID_SHIFT].finished.append(finish)
    return split
