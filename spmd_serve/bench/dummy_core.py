"""Something that plays the step loop towards a frontend, without a model: it emits tokens that a function chooses.

`bench serve --dummy-engine` measures the frontend with it, and the HTTP tests talk to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spmd_serve.frontend.link import CoreLink
from spmd_serve.types import (
    Finish,
    FinishReason,
    Request,
    SamplingParams,
    StepOutput,
    StepStats,
    TokenLogprobs,
)


@dataclass
class _Running:
    request: Request
    tokens: Iterator[int]
    produced: int = 0


def fake_logprobs(token: int, top: int, vocab_size: int) -> TokenLogprobs:
    """Log-probabilities that depend on the token alone: it comes first, its successors follow."""
    ids = [(token + i) % vocab_size for i in range(top)]
    values = [-0.25 - (token % 7) / 8 - i for i in range(top)]
    return TokenLogprobs(-0.25 - (token % 7) / 8, 1, ids, values)


class DummyCore:
    """A thread that runs steps over a CoreLink: each gives one token to each running request.

    Args:
        script: the tokens of a request, endless or not; when they end, so does the request, with `stop`.
        eos: ids that end a request unless it ignores them.
        max_running: how many requests run at once; the others wait.
        step_interval: seconds from one step to the next; 0 steps as fast as it can.
    """

    def __init__(
        self,
        link: CoreLink,
        script: Callable[[Request], Iterator[int]],
        *,
        eos: tuple[int, ...] = (),
        vocab_size: int = 1000,
        max_running: int = 256,
        step_interval: float = 0.0,
    ) -> None:
        self._link = link
        self._script = script
        self._eos = frozenset(eos)
        self._vocab_size = vocab_size
        self._max_running = max_running
        self._step_interval = step_interval
        self._stopping = False
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, _Running] = {}
        self._ended: list[Finish] = []
        self._thread = threading.Thread(target=self._run, name="dummy-core", daemon=True)
        self.paused = threading.Event()  # while set, no step is made
        self.seen: list[Request] = []  # every request that came
        self.aborted: list[tuple[int, FinishReason]] = []
        self.steps = 0
        self.tokens = 0
        self.publish_seconds = 0.0  # CPU time

    def start(self) -> None:
        """Begin. The state is the caller's to set."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; open requests stay open."""
        self._stopping = True
        self._link.wake()
        self._thread.join(10)

    @property
    def busy(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            if self.paused.is_set() or not self.busy:
                self._link.wait(0.05)
            self._take_in()
            if self.paused.is_set():
                continue
            output = self._step()
            output.stats = self._stats()
            began = time.thread_time()
            self._link.publish(output)
            self.publish_seconds += time.thread_time() - began
            due = max(due + self._step_interval, time.monotonic() - self._step_interval)
            time.sleep(max(0.0, due - time.monotonic()))

    def _take_in(self) -> None:
        requests, aborts = self._link.drain()
        self.seen += requests
        self._waiting.update({r.uid: r for r in requests})
        for abort in aborts:
            self.aborted.append((abort.uid, abort.reason))
            if self._waiting.pop(abort.uid, None) or self._running.pop(abort.uid, None):
                self._ended.append(Finish(abort.uid, abort.reason))
        now = time.monotonic()
        late = [r for r in self._waiting.values() if r.deadline is not None and r.deadline < now]
        late += [r.request for r in self._running.values() if r.request.deadline and r.request.deadline < now]
        for request in late:
            self._waiting.pop(request.uid, None)
            self._running.pop(request.uid, None)
            self._ended.append(Finish(request.uid, FinishReason.ERROR, "the request's time is up", "timeout"))

    def _step(self) -> StepOutput:
        self.steps += 1
        output = StepOutput(self.steps, finished=self._ended)
        self._ended = []
        while self._waiting and len(self._running) < self._max_running:
            uid = next(iter(self._waiting))
            request = self._waiting.pop(uid)
            self._running[uid] = _Running(request, self._script(request))
            output.started.append((uid, 0))
            if request.params.prompt_logprobs is not None:
                top = request.params.prompt_logprobs
                known = [fake_logprobs(t, top, self._vocab_size) for t in request.prompt_ids()[1:]]
                output.prompt_logprobs.append((uid, 1, known))
        for uid, running in list(self._running.items()):
            if running.request.params.max_tokens == 0:
                reason: FinishReason | None = FinishReason.LENGTH
            else:
                token = next(running.tokens, None)
                reason = self._emit(uid, running, token, output) if token is not None else FinishReason.STOP
            if reason is not None:
                del self._running[uid]
                output.finished.append(Finish(uid, reason))
        self.tokens += len(output.tokens)
        return output

    def _emit(self, uid: int, running: _Running, token: int, output: StepOutput) -> FinishReason | None:
        params: SamplingParams = running.request.params
        if params.logprobs is not None:
            output.logprobs[len(output.uids)] = fake_logprobs(token, params.logprobs, self._vocab_size)
        output.uids.append(uid)
        output.tokens.append(token)
        running.produced += 1
        if token in params.stop_ids(self._eos) and running.produced > params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if running.produced >= params.max_tokens else None

    def _stats(self) -> StepStats:
        return StepStats(
            step=self.steps,
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=1024,
            pages_free=1024 - len(self._running),
            generation_tokens_total=self.tokens,
            step_time=1e-4,
            exchange_time=1e-5,
        )
