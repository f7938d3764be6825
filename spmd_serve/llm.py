"""Offline generation: `LLM(...).generate(...)` with the server's own step loop, alone or under torchrun.

    from spmd_serve.llm import LLM
    from spmd_serve.types import SamplingParams

    llm = LLM("--max-batch-tokens", "1024")
    for result in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16, temperature=0.0)):
        print(result.text)

Under torchrun every rank makes the same calls, rank 0's arguments count, and rank 0 gets the results.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index

from spmd_serve import errors
from spmd_serve.assembly import Assembly, assemble, make_agreed_plan
from spmd_serve.config import Config, ignored_options, parse_args, resolved
from spmd_serve.distributed.beats import Progress
from spmd_serve.distributed.board import Board, Failure, open_board
from spmd_serve.distributed.channel import is_peer_error, make_channel, peer_error
from spmd_serve.distributed.ranks import RankInfo, join_group, leave_group, rank_info, threads_per_rank
from spmd_serve.errors import ConfigError, RankLostError, RequestError, SpmdServeError
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.step_loop import GivenLink, StepLoop
from spmd_serve.types import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs

logger = logging.getLogger(__name__)

_EXPLAIN_S = 2.5  # how long a rank whose connection broke waits for the reason of the one that broke it


@dataclass
class Generation:
    """One prompt's result.

    Attributes:
        times: time.perf_counter() at which each token came out of the step loop, in seconds.
        cached_tokens: how many of the prompt's tokens were in the prefix cache.
        logprobs: of each generated token, if asked for.
        prompt_logprobs: of each prompt token from the second on, if asked for.
        error: why it ended in the midst, if finish_reason is "error"; what had come out until then is here.
        text: as the server would show it: without the token that stopped the generation, and without special tokens.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    text: str = ""


class _OfflineLink(GivenLink):
    """Stands where the frontend's link stands in the server: takes requests in a batch, outputs go into a dict."""

    def __init__(self) -> None:
        super().__init__([])
        self._results: dict[int, Generation] = {}
        self._on_tokens: Callable[[int], None] | None = None

    def submit(
        self, requests: list[Request], results: dict[int, Generation], on_tokens: Callable[[int], None] | None
    ) -> None:
        self._requests, self._results, self._on_tokens = requests, results, on_tokens

    def publish(self, output: StepOutput) -> None:
        now = time.perf_counter()
        for uid, cached in output.started:
            self._results[uid].cached_tokens = cached
        for i, (uid, token) in enumerate(zip(output.uids, output.tokens, strict=True)):
            result = self._results[uid]
            result.token_ids.append(token)
            result.times.append(now)
            if i in output.logprobs:
                result.logprobs.append(output.logprobs[i])
        if self._on_tokens is not None and output.uids:
            self._on_tokens(len(output.uids))
        for uid, _, logprobs in output.prompt_logprobs:
            self._results[uid].prompt_logprobs += logprobs
        for finish in output.finished:
            result = self._results[finish.uid]
            result.finish_reason, result.error = finish.reason, finish.message


@contextlib.contextmanager
def _torch_as_in_the_server(threads: int) -> Iterator[None]:
    """What the program has set for itself (threads, default dtype and device, autocast) changes nothing of ours, and stays."""
    import torch

    dtype, others = torch.get_default_dtype(), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if torch.get_default_device().type != "cpu":  # asked first: within it each call takes longer
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(others)
            torch.set_default_dtype(dtype)


class LLM:
    """The engine without HTTP. `arguments` are the server's command-line options.

    Of several ranks it makes torch.distributed's default process group (gloo), until it is closed.
    """

    def __init__(self, *arguments: str) -> None:
        self._ranks = rank_info(os.environ)
        # A store of its own: in torchrun's there may be addresses of an LLM that this process has closed.
        board = open_board(self._ranks)
        joined = False
        try:
            config = _share_config(board, arguments)
            join_group(self._ranks, board.store, config.control.control_timeout)
            joined = True
            self._threads = config.engine.threads or threads_per_rank(self._ranks)
            with _torch_as_in_the_server(self._threads):
                self._assembly, self._tokenizer = _build(board, config)
        except BaseException as exc:
            reason = _tell_others(board, exc)
            if joined:
                _leave_group(self._ranks, os.getpid())  # or this process could make no other LLM
            with contextlib.suppress(RuntimeError):  # the store is gone
                board.say_gone()
                if self._ranks.rank == 0:
                    board.await_others()  # the store, in which they read the reason, may end with this process
            if reason is None:
                raise
            raise reason from exc
        # Where nobody calls close(), with this object or the program: gloo's threads abort a process that ends beside them.
        self._leave = weakref.finalize(self, _leave_group, self._ranks, os.getpid())
        self._config = self._assembly.plan.config
        self._process = os.getpid()
        self._closed = False
        self._unusable = ""  # why
        self._busy = threading.Lock()
        self._next_uid = 0
        self._link = _OfflineLink()
        self._loop = StepLoop(
            self._ranks,
            make_channel(self._ranks),
            self._assembly.scheduler,
            self._assembly.runner,
            self._config.control,
            overlap=resolved(self._config.engine.overlap),
            progress=Progress(),
            link=self._link if self._ranks.rank == 0 else None,
        )

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """Generate for all prompts at once; returns when the last has ended. Collective; the results of ranks but 0 are empty.

        One that fails in the midst (a grammar that is not valid or comes to a dead end, numbers that overflow) takes no other
        with it: its Generation has the `error`.

        Args:
            prompts: texts or token ids.
            params: for all prompts, or one for each.
            on_tokens: called on rank 0 with the number of tokens that came out, step by step; for progress.

        Raises:
            RequestError: a prompt cannot be served (too long, say, or its params are wrong). Nothing was computed.
            TypeError, ValueError: prompts is one text, or params are not as many as prompts.
            RuntimeError: this LLM is closed or another process's, an earlier call ended in the midst of a step, or one has not ended: another
                thread's, or the one that calls on_tokens.
        """
        if os.getpid() != self._process:  # torch's threads have not come along, and would be waited for without end
            raise RuntimeError(
                'this LLM was made before a fork; make one in the process that uses it, started with multiprocessing\'s "spawn"'
            )
        if not self._busy.acquire(blocking=False):  # nor in turns: the ranks' threads need not come in the same order
            raise RuntimeError("another generate() of this LLM runs; give all prompts to one call, or wait for it")
        try:
            with _torch_as_in_the_server(self._threads):
                return self._generate(prompts, params, on_tokens)
        finally:
            self._busy.release()

    def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_tokens: Callable[[int], None] | None,
    ) -> list[Generation]:
        if self._unusable:
            raise RuntimeError(f"{self._unusable}; make a new LLM")
        results: dict[int, Generation] = {}
        requests: list[Request] = []
        wrong: Exception | None = None
        try:
            requests = self._read(prompts, params, results)
        except Exception as exc:
            wrong = exc
        # Wrong or not, every rank runs the loop: it does not know what the others were given.
        self._link.submit(requests, results, on_tokens)
        try:
            self._loop.run(until_idle=True)
        except BaseException:  # of on_tokens, or Ctrl-C: this rank's state may be half a step ahead
            self._unusable = "an earlier generate() was interrupted"
            raise
        if wrong is not None:
            raise wrong
        if self._tokenizer is not None:
            for result in results.values():
                result.text = _text_of(result, self._tokenizer)
        return list(results.values())

    def _read(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        results: dict[int, Generation],
    ) -> list[Request]:
        """The requests of one call; `results` gets an entry for each. Raises what `generate` says of its arguments."""
        if isinstance(prompts, str):
            raise TypeError("prompts is one text, where a sequence of them is expected; give [prompt]")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} params; give one for each, or one for all")
        requests = []
        refusal = ""
        for number, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            place = f"prompt {number + 1} of {len(prompts)}"
            ids, problem = self._ids(prompt, place)
            if not isinstance(sampling, SamplingParams):
                raise TypeError(f"{place}: its params are {sampling!r:.100}, not SamplingParams")
            results[self._next_uid] = Generation(ids)
            problem = problem or self._problem(ids, sampling)
            if not problem:
                requests.append(Request(self._next_uid, array("i", ids).tobytes(), sampling))
                problem = self._assembly.scheduler.misfit(requests[-1])
            if problem and not refusal:
                refusal = f"{place}: {problem}"
            self._next_uid += 1
        if refusal:
            raise RequestError(refusal)
        return requests

    def close(self) -> None:
        """Leave the ranks' process group and give the memory back. Nothing can be generated any more."""
        if self._closed:
            return
        self._closed = True
        self._unusable = self._unusable or "it has been closed"
        self._assembly.runner.close()
        self._leave()
        # Weights and pages, also while this object stays: the next LLM is made before the name is another one's.
        on_gpu = self._assembly.plan.device.type == "cuda"
        del self._assembly, self._loop
        gc.collect()
        if on_gpu:
            import torch

            torch.cuda.empty_cache()
        with contextlib.suppress(AttributeError):  # another C library than GNU's, which keeps what is in pieces
            ctypes.CDLL(None).malloc_trim(0)

    def _problem(self, ids: list[int], sampling: SamplingParams) -> str:
        """What is wrong with one prompt's ids or params, whatever the model's context; empty if nothing is."""
        vocab_size = self._assembly.plan.model.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            return f"it has the token id {bad}; ids go from 0 to {vocab_size - 1}"
        return sampling.problem(vocab_size)

    def _ids(self, prompt: str | Sequence[int], place: str) -> tuple[list[int], str]:
        """A prompt's ids, and why there are none."""
        if not isinstance(prompt, str):
            try:
                return [index(token) for token in prompt], ""
            except TypeError as exc:
                raise TypeError(f"{place}: {exc}; give a text or token ids") from exc
        if self._tokenizer is None:
            return [], "this model has no tokenizer.json; give token ids"
        try:
            return self._tokenizer.encode(prompt).tolist(), ""
        except RequestError as exc:
            return [], str(exc)


def _leave_group(ranks: RankInfo, process: int) -> None:
    """One rank has none: what there is then is the program's own. Nor has a fork of `process`."""
    if ranks.world_size > 1 and os.getpid() == process:
        leave_group()


def _share_config(board: Board, arguments: Sequence[str]) -> Config:
    """Rank 0's options, on every rank; what is wrong with them is raised on all of them."""
    options: Config | ConfigError | SystemExit | None = None
    if board.ranks.rank == 0:
        try:
            options = parse_args(arguments)
        except (ConfigError, SystemExit) as exc:  # --help has been printed
            options = exc
    # Gathered, not shared: rank 0 would meet the others for its next LLM before they have read what is wrong with this one.
    options = board.gather("config", options)[0]
    if not isinstance(options, Config):
        assert options is not None
        raise options
    ignored = ignored_options(arguments, options) if board.ranks.rank > 0 else ""
    if ignored:
        logger.warning("rank 0's arguments count, those of rank %d are ignored: %s", board.ranks.rank, ignored)
    return options


def _build(board: Board, config: Config) -> tuple[Assembly, TextTokenizer | None]:
    """What an LLM is made of, when all ranks have it. A config alone serves random weights and token ids, without a tokenizer."""
    # A queue limit protects a server from its clients; here everything that is given is wanted.
    config = replace(config, scheduler=replace(config.scheduler, max_queue=sys.maxsize))
    plan = make_agreed_plan(config, board)
    assembly = assemble(plan, board.ranks, meet=lambda: board.gather("loaded", True))
    tokenizer = None
    if (plan.tokenizer_folder / "tokenizer.json").exists():
        tokenizer = TextTokenizer(plan.tokenizer_folder, plan.model.vocab_size)
    board.gather("built", True)
    return assembly, tokenizer


def _tell_others(board: Board, exc: BaseException) -> SpmdServeError | None:
    """Say why this rank has no LLM, so that the others do not wait for it.

    Returns what this one is to raise instead, if `exc` only says that another rank has gone: that one's reason, by its name.
    """
    own = board.peers[board.ranks.rank]
    lost = is_peer_error(exc)
    with contextlib.suppress(RuntimeError):  # the store is gone
        deadline = time.monotonic() + _EXPLAIN_S
        while lost and board.failure() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ours = isinstance(exc, SpmdServeError)
        kind, message = ("refused", str(exc)) if ours else ("error", f"{type(exc).__name__}: {exc}")
        board.store.set(f"raised/{own.rank}", type(exc).__name__ if ours else RankLostError.__name__)
        first = board.fail(Failure(own.rank, own.hostname, kind, message))
        if lost and first.rank != own.rank:
            theirs: type[SpmdServeError] = getattr(errors, board.store.get(f"raised/{first.rank}").decode())
            return theirs(str(first))
    return peer_error(exc) if lost and isinstance(exc, RuntimeError) and not isinstance(exc, SpmdServeError) else None


def _text_of(result: Generation, tokenizer: TextTokenizer) -> str:
    shown = result.token_ids[:-1] if result.finish_reason is FinishReason.STOP else result.token_ids
    stream = tokenizer.stream()
    return "".join([stream.step(token) for token in shown]) + stream.flush()
