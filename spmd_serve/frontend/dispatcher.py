"""The way from step outputs to the responses that wait for them. All of it runs in the event loop's thread.

The loop is woken once for each batch of messages from the step loop, however many tokens they carry: all rows are
added to their choices, then each response that has something to send is woken once. When the loop falls behind, the
messages that have piled up are taken together, and a response sends what has become ready as one piece.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from spmd_serve.config import Config
from spmd_serve.errors import OverloadedError, RequestError
from spmd_serve.frontend.detokenizer import StopSearch
from spmd_serve.frontend.generation import Choice, Connection, Generation
from spmd_serve.frontend.link import UID_SHIFT, FrontLink
from spmd_serve.frontend.metrics import Metrics
from spmd_serve.frontend.plan import RequestPlan
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import Abort, Finish, FinishReason, Request, ServiceState, StepOutput

logger = logging.getLogger(__name__)

BATCH = 64  # messages taken before other tasks get a turn
STALL_LIMIT = 60.0  # seconds that a client may leave its socket full before it is cut off
SWEEP_INTERVAL = 5.0  # seconds between looks for such clients

# What a Finish's code means in HTTP; anything else is 500.
_STATUS_OF_CODE = {
    "context_length_exceeded": 400,
    "empty_prompt": 400,
    "overloaded": 503,
    "draining": 503,
    "shutdown": 503,
    "timeout": 504,
    "grammar": 400,
}
# Codes of requests that the scheduler did not accept. They are no sequences that ended: another frontend's requests may fill
# the queue, and a refusal must count the same whoever speaks it.
_REFUSALS = ("context_length_exceeded", "empty_prompt", "overloaded", "draining")


class Dispatcher:
    """Owns the link's frontend side and every open request.

    Attributes:
        state, reason: what the service does, as the step loop told last.
    """

    def __init__(self, config: Config, link: FrontLink, tokenizer: TextTokenizer, metrics: Metrics) -> None:
        self._link = link
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._capacity = config.scheduler.max_queue + config.scheduler.max_num_seqs
        self._choices: dict[int, Choice] = {}
        self._generations: set[Generation] = set()
        self._next_uid = (link.index << UID_SHIFT) + 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._on_failure: Callable[[str], None] = lambda reason: None
        self.state = ServiceState.STARTING
        self.reason = "the model is still loading"

    # ---- life

    def start(self, on_failure: Callable[[str], None]) -> None:
        """Begin to listen to the step loop; called in the event loop.

        Args:
            on_failure: called once with the reason if it cannot go on listening, before what is open ends with an error.
        """
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._link.fileno(), self._on_readable)
        self._sweep = self._loop.call_later(SWEEP_INTERVAL, self._cut_off_stalled)
        self._link.hello()
        self._on_readable()

    def close(self) -> None:
        """End what is open with an error and leave the link; called in the event loop."""
        self._end_all("the server has stopped")
        if self._loop is not None:
            self._loop.remove_reader(self._link.fileno())
        if self._sweep is not None:
            self._sweep.cancel()
        self._link.close()

    # ---- requests

    def check_ready(self) -> None:
        """Raise OverloadedError when new requests are not taken."""
        if self.state != ServiceState.READY:
            raise OverloadedError(self.reason, retry_after=5)

    def submit(self, plan: RequestPlan, connection: Connection) -> Generation:
        """Hand a plan to the step loop; `connection` is the client's.

        Raises:
            OverloadedError: the service is not ready, or its queue is full.
        """
        self.check_ready()
        count = len(plan.prompts) * plan.best_of
        if len(self._choices) + count > self._capacity:
            raise OverloadedError(
                f"{len(self._choices)} sequences run or wait, and {self._capacity} are allowed (--max-queue); try later"
            )
        generation = Generation(plan, connection)
        deadline = None if plan.timeout is None else generation.submitted + plan.timeout
        requests = []
        for prompt in plan.prompts:
            data = prompt.ids.tobytes()
            for number in range(plan.best_of):
                uid, self._next_uid = self._next_uid, self._next_uid + 1
                search = StopSearch(plan.stops, plan.include_stop) if plan.stops is not None else None
                stream = self._tokenizer.stream(plan.skip_special)
                choice = Choice(generation, uid, len(generation.choices), prompt, stream, search)
                generation.choices.append(choice)
                self._choices[uid] = choice
                params = plan.choice_params(prompt, number)
                requests.append(Request(uid, data, params, deadline, plan.priority, plan.cache_salt))
        generation.open = len(requests)
        self._generations.add(generation)
        self._link.send(requests, [])
        return generation

    def release(self, generation: Generation) -> None:
        """The response has ended, for whatever reason: what still runs is aborted."""
        self._generations.discard(generation)
        if generation.open == 0:
            return
        aborts = []
        for choice in generation.choices:
            if choice.finish is None:
                choice.finish = FinishReason.ABORT
                del self._choices[choice.uid]
                aborts.append(Abort(choice.uid))
                self._metrics.count_finish(FinishReason.ABORT)
        generation.open = 0
        self._link.send([], aborts)

    # ---- from the step loop

    def _on_readable(self) -> None:
        dirty: list[Generation] = []
        try:
            more = self._take_messages(dirty)
        except Exception as error:
            # Outputs are lost, so no request could be trusted to end, and the next ones may fail in the same way.
            logger.exception("the frontend failed on a step's output")
            more = False
            assert self._loop is not None
            self._loop.remove_reader(self._link.fileno())
            self._on_failure(f"the HTTP frontend failed on a step's output: {type(error).__name__}: {error}")
            self._set_state(ServiceState.FAILED, "the HTTP frontend has failed")
        _wake(dirty)
        if more:
            assert self._loop is not None
            # The descriptor is edge-triggered: look again until nothing is left, after the woken tasks had their turn.
            self._loop.call_soon(self._on_readable)

    def _take_messages(self, dirty: list[Generation]) -> bool:
        """Take in what has come from the step loop; False if there was nothing."""
        messages = self._link.receive(BATCH)
        now = time.monotonic()
        for message in messages:
            if message.output is not None:
                self._apply(message.output, now, dirty)
            if message.state is not None:
                self._set_state(message.state, message.reason)
        self._metrics.flush_intervals(now)
        return bool(messages)

    def _apply(self, output: StepOutput, now: float, dirty: list[Generation]) -> None:
        """Add an output's rows to their choices; generations that get something to send are added to `dirty`."""
        choices = self._choices
        if output.stats is not None:
            self._metrics.set_stats(output.stats)
        for uid, cached in output.started:
            if uid in choices:
                choices[uid].cached_tokens = cached
        for uid, first, logprobs in output.prompt_logprobs:
            if uid in choices:
                choices[uid].prompt_logprobs.update(enumerate(logprobs, first))
        hidden = _stopping_rows(output) if output.finished else None
        stopped: list[Abort] = []
        intervals = self._metrics.intervals
        for row, uid in enumerate(output.uids):
            choice = choices.get(uid)
            if choice is None:
                continue  # aborted, or ended by a stop string, while this was on its way
            if choice.num_tokens:
                previous = choice.last_token_time
                intervals[previous] = intervals.get(previous, 0) + 1
            else:
                self._metrics.first_token.observe(now - choice.generation.submitted)
            choice.last_token_time = now
            token = output.tokens[row]
            shown = hidden is None or row not in hidden or choice.generation.plan.include_stop
            matched = choice.push(token, shown)
            if output.logprobs and row in output.logprobs:
                logprob = output.logprobs[row]
                choice.cumulative_logprob += logprob.logprob
                choice.logprobs.append((token, logprob))
            if matched:
                choice.end_by_stop_string()
                stopped.append(Abort(uid, FinishReason.STOP))
                self._ended(choice, dirty)
            elif choice.text and not choice.queued and choice.generation.plan.stream:
                _queue(choice)
                dirty.append(choice.generation)
        for finish in output.finished:
            choice = choices.get(finish.uid)
            if choice is not None:
                self._finish(choice, finish, dirty)
        if stopped:
            self._link.send([], stopped)

    def _finish(self, choice: Choice, finish: Finish, dirty: list[Generation]) -> None:
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            choice.end(finish.reason)
        else:
            choice.end(FinishReason.ERROR)
            code = finish.code or "internal_error"
            status = _STATUS_OF_CODE.get(code, 500)
            message = finish.message or "the server ended this request"
            if choice.generation.error is None:
                choice.generation.error = RequestError(message, status=status, code=code)
                if status == 500:  # nobody but the operator can do something about it
                    logger.error("a request failed: %s", message)
        self._ended(choice, dirty, accepted=finish.code not in _REFUSALS)

    def _ended(self, choice: Choice, dirty: list[Generation], *, accepted: bool = True) -> None:
        generation = choice.generation
        del self._choices[choice.uid]
        generation.open -= 1
        assert choice.finish is not None
        if accepted:
            self._metrics.count_finish(choice.finish)
            if generation.open == 0:
                self._metrics.duration.observe(time.monotonic() - generation.submitted)
        if generation.plan.stream and not choice.queued:
            _queue(choice)
        dirty.append(generation)

    def _set_state(self, state: ServiceState, reason: str) -> None:
        if state <= self.state:
            return
        self.state = state
        self.reason = reason or state.name.lower()
        if state == ServiceState.FAILED:
            self._end_all(self.reason)

    def _end_all(self, message: str) -> None:
        dirty: list[Generation] = []
        for choice in list(self._choices.values()):
            self._finish(choice, Finish(choice.uid, FinishReason.ERROR, message, "shutdown"), dirty)
        _wake(dirty)

    def _cut_off_stalled(self) -> None:
        """Close connections whose client has not read for too long; their work is aborted like any client's that left."""
        now = time.monotonic()
        for generation in list(self._generations):
            if generation.sending_since is not None and now - generation.sending_since > STALL_LIMIT:
                logger.warning("a client has not read its stream for %g s; its connection is closed", STALL_LIMIT)
                generation.connection.abort()
        assert self._loop is not None
        self._sweep = self._loop.call_later(SWEEP_INTERVAL, self._cut_off_stalled)


def _wake(generations: list[Generation]) -> None:
    """Wake each response; one that cannot be written must not keep the others waiting."""
    for generation in generations:
        try:
            generation.wake()
        except Exception:
            logger.exception("a stream's events could not be made")
            generation.error = RequestError("internal error; the server's log has it", status=500, code="internal")
            generation.wake()


def _queue(choice: Choice) -> None:
    """Put a choice where its response's task looks."""
    choice.queued = True
    choice.generation.ready.append(choice)


def _stopping_rows(output: StepOutput) -> set[int]:
    """Rows with the token that stopped its request (EOS or a stop token id), which is not part of the text."""
    stops = {f.uid for f in output.finished if f.reason is FinishReason.STOP}
    last = {uid: row for row, uid in enumerate(output.uids) if uid in stops}
    return set(last.values())
