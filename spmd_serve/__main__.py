"""The entry under torchrun, the same on every rank: config -> ranks -> build -> step loop -> teardown.

Rank 0 alone reads the command line; its Config reaches the others over the board. What a user did wrong is one line of rank 0
and exit code 2 on every rank, which the launch scripts do not restart; a failure is exit code 1; a stop by signal is exit code 0.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from spmd_serve.config import Config, ignored_options, parse_args, resolved
from spmd_serve.distributed.process import allow_files, fill_standard_files, leave_process, say_error
from spmd_serve.distributed.ranks import RankInfo, die_with_parent, join_group, leave_group, rank_info, threads_per_rank
from spmd_serve.distributed.signals import Stopped, StopSignals
from spmd_serve.errors import REFUSALS, REFUSED, ConfigError, FrontendError, RankLostError, SpmdServeError
from spmd_serve.logs import set_up_logs
from spmd_serve.types import Lengths, ModelInfo, ServiceState, StepOutput

if TYPE_CHECKING:
    from spmd_serve.distributed.beats import Progress
    from spmd_serve.distributed.board import Board
    from spmd_serve.distributed.liveness import Liveness
    from spmd_serve.engine.build import Plan

logger = logging.getLogger("spmd_serve")

FRONTEND_STOP_S = 2.0
OWN_FILES, FILES_PER_RANK = 48, 4  # that a rank has open, beside its clients' connections; for each rank of the job
PORT_FREE_S = 10.0


class _Over(NamedTuple):
    """The job ends before it begins: there is nothing to run."""

    exit_code: int
    reason: str


def main() -> int:
    """Run this rank to its end. Returns its exit code."""
    fill_standard_files()
    # Read when torch is imported. Lost connections are told by us.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Of another program, as images for other servers set it: prometheus_client, which reads it when it is imported, would keep
    # our numbers in that program's files, and go on counting from those of an earlier process with the same id.
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)
    signals = StopSignals()
    signals.install()
    try:
        ranks = rank_info(os.environ)
        signals.interrupts = ranks.world_size == 1  # else the others are told first, once all have met
        if ranks.under_agent:
            die_with_parent()
        allow_files(OWN_FILES + FILES_PER_RANK * ranks.world_size)
        options = _rank0_options(sys.argv[1:]) if ranks.rank == 0 else None
        if isinstance(options, _Over) and ranks.world_size == 1:
            return options.exit_code
        with _missing_packages_are_refusals():
            return _run_rank(ranks, options, signals)
    except Stopped:
        return 0
    except SpmdServeError as exc:
        if not isinstance(exc, RankLostError):  # else the rank at fault has said it
            say_error("spmd_serve", exc)
        return REFUSED if isinstance(exc, REFUSALS) else 1


@contextlib.contextmanager
def _missing_packages_are_refusals() -> Iterator[None]:
    """What is not installed is one line too, and not a traceback: mostly it is another Python than the one that was meant."""
    try:
        yield
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package in ("", "spmd_serve"):
            raise
        raise ConfigError(
            f"{sys.executable} has no package '{package}': start the server with the Python that has it, or run "
            f"`{sys.executable} -m pip install .` in the checkout"
        ) from exc


def _rank0_options(argv: Sequence[str]) -> Config | _Over:
    """The options, or why there is nothing to run."""
    try:
        config = parse_args(argv)
        _rank0_check_port(config)
        if config.server.address_file is not None:
            _check_address_file(Path(config.server.address_file))
    except ConfigError as exc:
        return _Over(REFUSED, say_error("spmd_serve", exc))
    except SystemExit as exc:  # --help has been printed
        return _Over(int(exc.code or 0), "--help")
    return config


def _check_address_file(file: Path) -> None:
    """Fail before anything is loaded: the file is written at the very end of the start, which may be minutes away."""
    if not file.parent.is_dir():
        raise ConfigError(f"--address-file: there is no folder {file.parent}")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--address-file: {file} cannot be written; give the name of a file")


def _rank0_check_port(config: Config) -> None:
    """Fail before anything is loaded when the port is taken. A predecessor before a restart gets time to let go of it."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    deadline = time.monotonic() + (PORT_FREE_S if restarted else 0.0)
    host, port = config.server.host, config.server.port
    while True:
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            return
        except OSError as exc:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"host {socket.gethostname()} cannot listen on {host} port {port} ({exc.strerror}); give another --host or "
                    "--port"
                ) from None
            time.sleep(0.1)


def _run_rank(ranks: RankInfo, options: Config | _Over | None, signals: StopSignals) -> int:
    """From the meeting of the ranks to their end. options: rank 0's; None on the others."""
    from spmd_serve.distributed.beats import Progress
    from spmd_serve.distributed.board import Failure, open_board
    from spmd_serve.distributed.liveness import Liveness

    progress = Progress()
    set_up_logs(options.server.log_level if isinstance(options, Config) else "info", ranks.rank, lambda: progress.step)
    gc.disable()  # until it serves: what is imported and built now stays, and to walk through it takes a tenth of the start
    board = open_board(ranks, lambda: signals.stopped_at)
    if isinstance(options, _Over):
        board.fail(Failure(ranks.rank, ranks.hostname, "refused" if options.exit_code else "help", options.reason))
        board.await_others()
        return options.exit_code
    liveness = Liveness(board, progress, signals)
    stack = ExitStack()
    try:
        signals.interrupts = True
        liveness.start()
        with _missing_packages_are_refusals():
            _serve(board.share("config", options), ranks, board, liveness, progress, stack)
        stack.close()
        leave_group()
        return liveness.leave_together()  # still watched: a rank that does not come to its end would be waited for
    except BaseException as exc:
        stopped = isinstance(exc, Stopped) or liveness.stopped_while_starting  # what else fails then is a consequence
        if stopped and liveness.failure is None:  # else torchrun's SIGTERM is itself the consequence of a failure
            code = liveness.leave_together()
            if code == 0 and ranks.rank == 0:
                logger.info("stopped while starting")
            return code
        return _fail(exc, board, liveness, stack)
    finally:
        stack.close()
        leave_group()


def _fail(exc: BaseException, board: Board, liveness: Liveness, stack: ExitStack) -> int:
    """Find the rank at fault; if it is this one, its message or traceback is the last thing in the log."""
    failure = liveness.conclude(exc)
    liveness.leave()
    stack.close()  # rank 0: open requests end with an error
    leave_group()  # peers that wait for this rank wake up
    own = failure.rank == board.ranks.rank and failure.kind in ("refused", "error") and not liveness.spoken
    with contextlib.suppress(RuntimeError):  # the store may be gone as well
        board.say_gone()
        if own:
            board.await_others()  # they speak before its traceback
    if own and failure.kind == "error":
        logger.error("%s", failure, extra={"details": failure.details})
    elif own and board.ranks.rank == 0:  # a follower's refusal is told by rank 0's watcher
        say_error("spmd_serve", exc)
    return failure.exit_code


def _serve(
    config: Config, ranks: RankInfo, board: Board, liveness: Liveness, progress: Progress, stack: ExitStack
) -> None:
    """Build everything, then run steps until the stop. What must be undone on every way out goes onto `stack`."""
    import torch

    from spmd_serve.assembly import assemble, make_agreed_plan
    from spmd_serve.distributed.channel import make_channel
    from spmd_serve.step_loop import StepLoop

    started = time.monotonic()
    set_up_logs(config.server.log_level, ranks.rank, lambda: progress.step)
    if ranks.rank > 0 and (ranks.local_rank == 0 or not ranks.under_agent):  # one agent's ranks have one command line
        ignored = ignored_options(sys.argv[1:], config)
        if ignored:
            logger.warning("rank 0's options count, those of host %s are ignored: %s", ranks.hostname, ignored)
    torch.set_num_threads(config.engine.threads or threads_per_rank(ranks))
    join_group(ranks, board.store, config.control.control_timeout)
    plan = make_agreed_plan(config, board)
    config = plan.config

    frontend = None
    if ranks.rank == 0:
        from spmd_serve.frontend.server import start_frontend  # the others need none of it, and start faster without

        if config.server.frontend == "thread":
            sys.setswitchinterval(0.0005)  # a busy HTTP thread would hold each exchange up for 16-39 ms instead of 1-3
        info = _model_info(plan)
        frontend = start_frontend(config, info, lambda reason: liveness.fail(FrontendError(reason)))
        stack.callback(frontend.stop, FRONTEND_STOP_S)
        liveness.on_failure = lambda reason: frontend.link.set_state(ServiceState.FAILED, reason)
        stack.callback(liveness.forget_frontend)

    assembly = assemble(plan, ranks, meet=lambda: board.gather("loaded", True))
    if plan.device.type == "cuda":  # a step may wait for the device anywhere, not in calls of torch.cuda alone
        progress.device_waits = lambda: not torch.cuda.default_stream(plan.device).query()
    loop = StepLoop(
        ranks,
        make_channel(ranks),
        assembly.scheduler,
        assembly.runner,
        config.control,
        overlap=resolved(config.engine.overlap),
        progress=progress,
        link=frontend.link if frontend else None,
        requested_phase=lambda: liveness.phase,
        exchange_times=liveness.exchange_times,
    )
    _begin(board, liveness, config, frontend.link.wake if frontend else lambda: None)
    if frontend:
        # /metrics knows the pages as soon as the service is ready: the first step may be a heartbeat away.
        frontend.link.publish(StepOutput(0, stats=assembly.scheduler.stats()))
        frontend.link.set_state(ServiceState.READY)
        _rank0_say_ready(frontend.url, info.name, config, time.monotonic() - started)
    gc.freeze()  # and no collection walks through it later, which would hold a step up for tens of milliseconds
    gc.enable()
    loop.run()
    progress.idle()
    board.gather("stopped", True)
    assembly.runner.close()
    if ranks.rank == 0:
        logger.info("stopped: all %d ranks have left the step loop after step %s", ranks.world_size, progress.step)


def _begin(board: Board, liveness: Liveness, config: Config, wake: Callable[[], None]) -> None:
    """The start is over, on all ranks: a stop that comes now drains. Raises Stopped if one has come before, on any rank."""
    try:
        board.gather("ready", True)
        begin = board.decide("serve")
        if begin == "serve":
            liveness.serve(config.control, wake)
    except Stopped:
        begin = board.decide("stop")
        if begin == "serve":  # others do already, and wait for this rank in their first step
            liveness.serve(config.control, wake)
    if begin == "stop":
        raise Stopped


def default_name(model: str) -> str:
    """The name in the API: the last part of the path or hub id, also where that is "." or ends with a slash."""
    return os.path.basename(os.path.abspath(model))


def _model_info(plan: Plan) -> ModelInfo:
    model, options, cache = plan.model, plan.config.model, plan.config.cache
    pool = cache.num_pages * cache.page_size if cache.num_pages else sys.maxsize
    return ModelInfo(
        name=options.served_model_name or default_name(options.model),
        folder=str(plan.tokenizer_folder),
        lengths=Lengths(resolved(options.max_model_len), pool),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        generation_defaults=model.generation_defaults,
        created=int(time.time()),
    )


def _rank0_say_ready(url: str, name: str, config: Config, seconds: float) -> None:
    """One line on stdout with a curl that works, and the address file."""
    # Few tokens: what is sampled without a limit may go on for the whole context.
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50})
    key = ""
    if config.server.api_key is not None:  # which is not for the log
        known = os.environ.get("SPMD_SERVE_API_KEY") == config.server.api_key
        key = f" -H 'Authorization: Bearer '{'$SPMD_SERVE_API_KEY' if known else 'THE_API_KEY'}"
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    with contextlib.suppress(OSError):  # nobody reads stdout any more, which is no reason not to serve
        print(f"spmd_serve: ready at {url} after {seconds:.1f} s; try: {curl}", flush=True)
    if config.server.address_file:
        path = Path(config.server.address_file)
        partial = path.with_name(path.name + ".part")
        try:
            partial.write_text(url + "\n")
            partial.replace(path)
        except OSError as error:  # the disk has filled up meanwhile, say
            raise ConfigError(f"--address-file: {path} cannot be written ({error.strerror})") from None


def run() -> NoReturn:
    """Run this rank and leave the process."""
    leave_process(main())  # all is torn down


if __name__ == "__main__":
    run()
