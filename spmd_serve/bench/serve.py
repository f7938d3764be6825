"""`bench serve`: load on the HTTP server, from client processes of its own.

--url URL                 against a server that runs
--model M --ranks N       against one that it starts with torchrun
--dummy-engine            against the frontend alone, with an engine that just emits tokens: CPU time per token
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from spmd_serve.bench.client import Job
from spmd_serve.bench.dummy_core import DummyCore
from spmd_serve.bench.stats import Timings, percentiles_ms
from spmd_serve.bench.torchrun import environment, torchrun
from spmd_serve.bench.workloads import MAX_TOKEN_ID, parse_count, parse_range, parse_rate
from spmd_serve.config import Config, ModelOptions, ServerOptions
from spmd_serve.distributed.process import children_of
from spmd_serve.errors import REFUSED, ConfigError
from spmd_serve.frontend.server import Frontend, ProcessFrontend, start_frontend
from spmd_serve.types import Lengths, ModelInfo, ServiceState

START_TIMEOUT = 300.0  # seconds for a server to load its model
DUMMY_RATE = 20_000.0  # tokens/s
ERROR = "spmd_serve.bench: error:"


def make_parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench serve", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--url", help="server to load (default: start one)")
    parser.add_argument("--api-key", default=os.environ.get("SPMD_SERVE_API_KEY", ""), help="[env SPMD_SERVE_API_KEY]")
    parser.add_argument("--model", help="model of the server to start (default: the bundled one)")
    parser.add_argument("--ranks", type=parse_count, help="ranks of the server to start (default: 1)")
    parser.add_argument("--server-args", help="more options for the server to start, in one string")
    parser.add_argument("--dummy-engine", action="store_true", help="measure the frontend alone")
    number = partial(parse_rate, or_zero=True)
    parser.add_argument(
        "--dummy-rate", type=number, help=f"tokens/s of the dummy engine, 0: unlimited (default: {DUMMY_RATE:g})"
    )
    parser.add_argument("--frontend", help="of --dummy-engine: thread, process or process:N (default: thread)")
    parser.add_argument("--streams", type=parse_count, default=16, help="requests open at once (default: 16)")
    parser.add_argument("--requests", type=parse_count, help="requests in all (default: as many as streams)")
    lengths = "N, or LOW,HIGH for random lengths (default: %(default)s)"
    parser.add_argument("--prompt-tokens", type=parse_range, default="128", help=lengths)
    parser.add_argument("--output-tokens", type=parse_range, default="64", help=lengths)
    parser.add_argument(
        "--max-token-id",
        type=parse_count,
        default=MAX_TOKEN_ID,
        help="prompts are random ids below it (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=number, default=0.6, help="(default: 0.6)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and lengths (default: 0)")
    parser.add_argument("--clients", type=parse_count, default=2, help="client processes (default: 2)")
    parser.add_argument(
        "--warmup", type=partial(parse_count, least=0), default=2, help="requests before the measured ones (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON line")
    return parser


def make_bodies(args: argparse.Namespace, count: int) -> list[msgspec.Raw]:
    """Random prompts of token ids, as bodies of streamed completions."""
    rng = random.Random(args.seed)
    bodies = []
    for _ in range(count):
        prompt = [rng.randrange(args.max_token_id) for _ in range(rng.randint(*args.prompt_tokens))]
        body = {
            "prompt": prompt,
            "max_tokens": rng.randint(*args.output_tokens),
            "temperature": args.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bodies.append(msgspec.Raw(json.dumps(body).encode()))
    return bodies


def run_clients(
    url: str,
    bodies: list[msgspec.Raw],
    *,
    streams: int,
    clients: int,
    api_key: str,
    progress: Callable[[int], None] = lambda events: None,
    done_line: bool = True,
) -> Timings:
    """Send all bodies from `clients` processes, which begin together when all are up.

    `progress` gets the number of events so far.
    """
    clients = min(clients, streams, len(bodies))
    counts = [0] * clients
    up = threading.Semaphore(0)

    def read(index: int, process: subprocess.Popen[bytes]) -> tuple[Timings, float]:
        """What a client process has seen, and when it came to its end."""
        assert process.stdout is not None
        process.stdout.readline()
        up.release()  # also if it failed
        for line in process.stdout:
            if line[:1] == b"{":
                return msgspec.json.decode(line, type=Timings), time.perf_counter()
            counts[index] = int(line)
            progress(sum(counts))
        raise RuntimeError(f"client process {index} ended with code {process.wait()}; see its error above")

    command = [sys.executable, "-m", "spmd_serve.bench.client"]
    with ThreadPoolExecutor(clients) as threads, ExitStack() as stack:
        processes = []
        for _ in range(clients):  # Ctrl-C is for this process, which ends them
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
            stack.enter_context(process)  # waits, and closes its pipes
            stack.callback(process.kill)
            processes.append(process)
        readers = [threads.submit(read, index, process) for index, process in enumerate(processes)]
        for index, process in enumerate(processes):
            concurrency = streams // clients + (index < streams % clients)
            job = Job(url, "/v1/completions", bodies[index::clients], concurrency, api_key, done_line)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.flush()
        for _ in processes:
            up.acquire()
        began = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        total = Timings()
        for reader in readers:
            timings, ended = reader.result()
            total.add(timings)
            total.wall = max(total.wall, ended - began)
    return total


def report_of(timings: Timings) -> dict[str, Any]:
    """The figures; times in milliseconds."""
    return {
        "requests": len(timings.ended),
        "failed": timings.failures,
        "wall_s": round(timings.wall, 3),
        "prompt_tokens": timings.prompt_tokens,
        "output_tokens": timings.output_tokens,
        "output_tokens_per_s": round(timings.output_tokens / timings.wall, 1),
        **percentiles_ms("ttft", timings.first),
        **percentiles_ms("inter_token", timings.between),
        **percentiles_ms("request", timings.ended),
    }


# ---- servers ------------------------------------------------------------------------------------------------------


@contextmanager
def started_server(model: str | None, ranks: int, options: str, **variables: str) -> Iterator[str]:
    """A server under torchrun; its URL. Without one it exits: with 2 and no word when the server has said what it refuses.

    Args:
        model: None is the server's default.
        options: more options of the server, in one string.
        variables: more variables for it.
    """
    with tempfile.TemporaryDirectory(prefix="spmd_serve-bench-") as folder:
        address = Path(folder) / "address"
        command = torchrun(ranks, "-m", "spmd_serve", "--port", "0", "--address-file", str(address))
        command += ["--model", model] if model else []
        command += split_options("--server-args", options)
        # Ranks leave word of a refusal in the folder, and then torchrun adds no traceback to their one line.
        environ = environment() | variables | {"SPMD_SERVE_OUTCOME_DIR": folder}
        # A group of its own: Ctrl-C is for this process, which ends the server as it ends after a run.
        server = subprocess.Popen(command, stdout=sys.stderr, env=environ, process_group=0)
        handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while not (address.is_file() and (url := address.read_text().strip())):
                if server.poll() is not None:
                    if any(Path(folder).glob("*.refused")):
                        raise SystemExit(REFUSED)
                    raise SystemExit(f"{ERROR} the server ended with code {server.returncode}; see its messages above")
                if time.monotonic() > deadline:
                    raise SystemExit(f"{ERROR} the server was not ready within {START_TIMEOUT:g} s")
                time.sleep(0.1)
            yield url
        finally:
            try:
                if server.poll() is None:
                    _stop(server.pid)
                server.wait(60)
            finally:  # it hangs, or the user insists
                server.kill()
                for number, handler in handlers.items():
                    signal.signal(number, handler)


def _leave(number: int, frame: object) -> NoReturn:
    """A signal ends this process, but not before the server that it has started."""
    raise SystemExit(128 + number)


def split_options(name: str, options: str) -> list[str]:
    """The options in the value of `name`, with quotes as in a shell."""
    try:
        return shlex.split(options)
    except ValueError as exc:
        raise ConfigError(f"{name} {options} cannot be read ({exc})") from None


def _stop(torchrun: int) -> None:
    """SIGTERM to one rank, upon which all of them leave: torchrun itself prints a traceback when it is signalled."""
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(next(iter(children_of(torchrun)), torchrun), signal.SIGTERM)


@dataclass
class DummyServer:
    """A frontend over a dummy engine, and what CPU time both have used."""

    frontend: Frontend
    core: DummyCore

    def cpu_seconds(self) -> float:
        """CPU time of the frontend, and of handing it the outputs."""
        if isinstance(self.frontend, ProcessFrontend):
            return self.core.publish_seconds + sum(_process_seconds(pid) for pid in self.frontend.pids)
        http = next(t for t in threading.enumerate() if t.name == "http")
        assert http.ident is not None
        return self.core.publish_seconds + time.clock_gettime(time.pthread_getcpuclockid(http.ident))


def _process_seconds(pid: int) -> float:
    """User and system time of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def dummy_server(args: argparse.Namespace, folder: Path, vocab_size: int) -> Iterator[DummyServer]:
    """The frontend with the tokenizer of `folder` over an engine that repeats some ordinary tokens."""
    config = Config(server=ServerOptions(port=0, frontend=args.frontend or "thread"))
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=max(256, args.streams)))
    info = ModelInfo("dummy", str(folder), Lengths(1 << 20, 1 << 20), vocab_size, ())
    frontend = start_frontend(config, info)
    rate = DUMMY_RATE if args.dummy_rate is None else args.dummy_rate
    interval = args.streams / rate if rate else 0.0
    core = DummyCore(
        frontend.link,
        lambda request: itertools.cycle(range(300, 1300)),
        vocab_size=vocab_size,
        max_running=args.streams,
        step_interval=interval,
    )
    core.start()
    frontend.link.set_state(ServiceState.READY)
    try:
        yield DummyServer(frontend, core)
    finally:
        core.stop()
        frontend.stop(1.0)


# ---- the benchmark ------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, url: str, cpu_seconds: Callable[[], float] | None) -> dict[str, Any]:
    """Load `url`; with `cpu_seconds`, also CPU time per token."""
    count = args.requests or args.streams
    bodies = make_bodies(args, count)
    interactive = sys.stderr.isatty() and not args.json

    def progress(events: int) -> None:
        if interactive:
            print(f"\r{events} events", end="", file=sys.stderr, flush=True)

    options: dict[str, Any] = {"clients": args.clients, "api_key": args.api_key, "progress": progress}
    if args.warmup:
        run_clients(url, bodies[: args.warmup], streams=args.warmup, **options)
    used = cpu_seconds() if cpu_seconds else 0.0
    timings = run_clients(url, bodies, streams=args.streams, **options)
    if interactive:
        print("\r", end="", file=sys.stderr)
    report = report_of(timings)
    if cpu_seconds is not None:
        report["cpu_us_per_token"] = round(1e6 * (cpu_seconds() - used) / max(1, timings.output_tokens), 2)
        report["events_per_token"] = round(timings.events / max(1, timings.output_tokens), 3)
    if timings.failures:
        report["failure"] = timings.failure
    return report


def _check_what_is_loaded(args: argparse.Namespace) -> None:
    """Raises ConfigError for options of another server than the one that is loaded: they would have no effect."""
    others: tuple[str, ...]
    if args.dummy_engine:
        loaded, others = "--dummy-engine", ("url", "ranks", "server_args")
    elif args.url:
        loaded, others = "--url, whose server runs", ("model", "ranks", "server_args", "dummy_rate", "frontend")
    else:
        loaded, others = "a server to start (it takes --server-args)", ("dummy_rate", "frontend")
    for name in others:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on {loaded}; leave it away")


def _check_reachable(url: str) -> None:
    """Raises ConfigError where nothing answers, or not in plain HTTP."""
    if url.startswith("https:"):
        raise ConfigError(f"--url {url}: the clients speak no TLS; give the server's own http:// address")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"{url}/health", timeout=10.0).close()
    except urllib.error.HTTPError:  # somebody answers; what requests get is in the report
        pass
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--url {url} cannot be reached ({exc}); give one such as http://127.0.0.1:8000") from None


def main(argv: list[str]) -> int:
    """Run the benchmark and print its report; 1 if a request failed."""
    args = make_parser().parse_args(argv)
    _check_what_is_loaded(args)
    if args.dummy_engine:
        from spmd_serve.distributed.ranks import RankInfo  # these bring torch, which a load on a URL does not need
        from spmd_serve.models.registry import load_model_config
        from spmd_serve.models.resolve import resolve_model

        options = ModelOptions(model=args.model) if args.model else ModelOptions()
        folder = resolve_model(options, RankInfo())
        with dummy_server(args, folder, load_model_config(folder).vocab_size) as server:
            report = measure(args, server.frontend.url, server.cpu_seconds)
    elif args.url:
        url = args.url.rstrip("/")
        _check_reachable(url)
        report = measure(args, url, None)
    else:
        with started_server(args.model, args.ranks or 1, args.server_args or "") as url:
            report = measure(args, url, None)
    if args.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:22} {value}")
    return 1 if report["failed"] else 0
