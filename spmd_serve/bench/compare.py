"""`bench compare`: this server beside `transformers serve --continuous-batching`, over HTTP.

Both serve the same files with the same compute type and number of threads, at temperature 0, on prompts of the same
texts, and take turns: every round loads one and then the other, while the one that is not measured is stopped (SIGSTOP), so that
it takes no CPU time. Reported are the medians of the rounds and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch
from tokenizers import Tokenizer

from spmd_serve.bench.serve import run_clients, split_options, started_server
from spmd_serve.bench.stats import Timings
from spmd_serve.bench.workloads import parse_count
from spmd_serve.config import DEFAULT_MODEL, ModelOptions
from spmd_serve.distributed.process import children_of
from spmd_serve.distributed.ranks import RankInfo, threads_per_rank
from spmd_serve.engine.build import pick_dtype
from spmd_serve.errors import ConfigError
from spmd_serve.models.registry import load_model_config
from spmd_serve.models.resolve import resolve_model

START_TIMEOUT = 300.0  # seconds for the peer to load its model
WORDS = (
    "time people water place year work world house school story night light city river music paper garden window "
    "morning summer winter bread letter friend train bridge ocean forest market doctor teacher history country"
)


@dataclass(frozen=True)
class Engine:
    """A server that runs. `pids`: all its processes."""

    name: str
    url: str
    pids: tuple[int, ...]
    dialect: dict[str, object]  # what its requests have besides the common fields
    done_line: bool

    def pause(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Figures:
    """Tokens per second of one round."""

    concurrent: float
    single: float


def make_parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench compare", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--peer", required=True, help="the `transformers` command of an environment that can serve")
    parser.add_argument("--peer-args", default="", help="more options for the peer, in one string")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what both serve (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="compute type of both (default: what spmd_serve takes here)")
    parser.add_argument("--threads", type=parse_count, help="CPU threads of each server in all (default: all cores)")
    parser.add_argument(
        "--ranks", type=parse_count, default=1, help="ranks of spmd_serve, which share the threads (default: 1)"
    )
    parser.add_argument("--server-args", default="", help="more options for spmd_serve, in one string")
    parser.add_argument("--streams", type=parse_count, default=16, help="requests at once (default: 16)")
    parser.add_argument("--prompt-tokens", type=parse_count, default=128, help="of each request (default: 128)")
    parser.add_argument("--output-tokens", type=parse_count, default=64, help="of each request (default: 64)")
    parser.add_argument("--rounds", type=parse_count, default=3, help="loads of each server, in turns (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON line")
    return parser


def make_prompts(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[str]:
    """Texts of exactly `tokens` tokens; another seed gives texts that share no prefix with these."""
    rng, words = random.Random(seed), WORDS.split()
    prompts: list[str] = []
    while len(prompts) < count:
        text = f"{seed}.{len(prompts)}: " + " ".join(rng.choice(words) for _ in range(tokens))
        text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids[:tokens])
        if len(tokenizer.encode(text).ids) == tokens:
            prompts.append(text)
    return prompts


def measure(engine: Engine, prompts: list[str], output_tokens: int) -> Timings:
    """All prompts at once.

    Raises:
        RuntimeError: a request failed or did not have as many tokens as were asked for.
    """
    bodies = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0.0, "stream": True} | engine.dialect
        bodies.append(msgspec.Raw(json.dumps(body).encode()))
    timings = run_clients(engine.url, bodies, streams=len(bodies), clients=1, api_key="", done_line=engine.done_line)
    if timings.failures:
        raise RuntimeError(f"{engine.name} failed {timings.failures} requests: {timings.failure}")
    if timings.output_tokens != len(prompts) * output_tokens:
        raise RuntimeError(f"{engine.name} gave {timings.output_tokens} tokens for {len(prompts)} x {output_tokens}")
    return timings


def measure_round(engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace, seed: int) -> Figures:
    """The concurrent requests, then one alone; prompts are those of `seed`.

    Raises:
        RuntimeError: as in `measure`, or the tokens of the one alone all came at the same time, which gives no rate.
    """
    together = measure(engine, make_prompts(tokenizer, args.streams, args.prompt_tokens, seed), args.output_tokens)
    alone = measure(engine, make_prompts(tokenizer, 1, args.prompt_tokens, seed + 1), args.output_tokens)
    decoding = sum(alone.between)  # begins after the first token
    if not decoding:
        raise RuntimeError(f"all tokens of a stream of {engine.name} came at once; take more --output-tokens")
    # All requests began together, so the longest is the wall time.
    return Figures(together.output_tokens / max(together.ended), (args.output_tokens - 1) / decoding)


# ---- servers ------------------------------------------------------------------------------------------------------


@contextmanager
def own_engine(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[Engine]:
    """spmd_serve under torchrun."""
    threads = max(1, args.threads // args.ranks)
    server_args = f"--dtype {dtype} --threads {threads} --log-level warning {args.server_args}"
    before = set(children_of(os.getpid()))
    with started_server(str(folder), args.ranks, server_args, OMP_NUM_THREADS=str(threads)) as url:
        pids = tuple(p for child in set(children_of(os.getpid())) - before for p in _family(child))
        yield Engine(
            "spmd_serve", url, pids, {"ignore_eos": True, "stream_options": {"include_usage": True}}, done_line=True
        )


@contextmanager
def peer_engine(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[Engine]:
    """transformers serve. An EOS id that no vocabulary has makes it go on to the last token that is asked for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [args.peer, "serve", str(folder), "--continuous-batching", "--dtype", dtype, "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), *split_options("--peer-args", args.peer_args)]
    environ = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(f"{url}/health"):
            if server.poll() is not None:
                raise RuntimeError(f"`{' '.join(command)}` ended with code {server.returncode}; run it to see why")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the peer was not ready within {START_TIMEOUT:g} s")
            time.sleep(0.2)
        generation = {"eos_token_id": -1, "max_new_tokens": args.output_tokens, "do_sample": False}
        dialect: dict[str, object] = {"generation_config": json.dumps(generation)}
        yield Engine("transformers", url, tuple(_family(server.pid)), dialect, done_line=False)
    finally:
        server.kill()
        server.wait()


def _answers(url: str) -> bool:
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has another idea of 127.0.0.1
        with direct.open(url, timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(p for child in children_of(pid) for p in _family(child))]


# ---- the benchmark ------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run the rounds and print the table."""
    args = make_parser().parse_args(argv)
    if shutil.which(args.peer) is None:
        raise ConfigError(
            f"--peer {args.peer} is no program; give the path of `transformers` in an environment that can serve"
        )
    args.threads = args.threads or threads_per_rank(RankInfo())
    folder = resolve_model(ModelOptions(model=args.model), RankInfo())
    dtype = str(pick_dtype(args.dtype, load_model_config(folder), torch.device("cpu"))).removeprefix("torch.")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    figures: dict[str, list[Figures]] = {}
    with ExitStack() as stack:
        engines: list[Engine] = []
        for start in (own_engine, peer_engine):
            engine = stack.enter_context(start(args, folder, dtype))
            stack.callback(engine.resume)
            measure(engine, make_prompts(tokenizer, 2, args.prompt_tokens, -1), args.output_tokens)  # warm-up
            engine.pause()
            engines.append(engine)
        for index in range(args.rounds):
            for engine in engines:
                engine.resume()
                found = measure_round(engine, tokenizer, args, 2 * index)
                engine.pause()
                figures.setdefault(engine.name, []).append(found)
                print(
                    f"round {index + 1} {engine.name:14} {found.concurrent:8.1f} {found.single:8.1f}", file=sys.stderr
                )
    own, peer = (_medians(figures[engine.name]) for engine in engines)
    report = {
        "model": folder.name,
        "dtype": dtype,
        "threads": args.threads,
        "ranks": args.ranks,
        "cpu": _cpu_name(),
        "concurrent": {"spmd_serve": own.concurrent, "transformers": peer.concurrent},
        "single": {"spmd_serve": own.single, "transformers": peer.single},
        "concurrent_ratio": round(own.concurrent / peer.concurrent, 2),
        "single_ratio": round(own.single / peer.single, 2),
    }
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"{folder.name}, {dtype}, {args.threads} threads, {args.ranks} rank(s), {_cpu_name()}")
    load = f"{args.streams} x ({args.prompt_tokens} + {args.output_tokens})"
    print(f"{'tokens/s, median of ' + str(args.rounds):28} {'spmd_serve':>12} {'transformers':>12} {'ratio':>7}")
    for name, ours, theirs in (
        (load, own.concurrent, peer.concurrent),
        ("one stream, decode", own.single, peer.single),
    ):
        print(f"{name:28} {ours:12.1f} {theirs:12.1f} {ours / theirs:7.2f}")
    return 0


def _medians(rounds: list[Figures]) -> Figures:
    return Figures(round(median(f.concurrent for f in rounds), 1), round(median(f.single for f in rounds), 1))


def _cpu_name() -> str:
    """As the kernel calls it, with family and model (Linux)."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return f"{fields.get('model name', 'CPU')} family {fields.get('cpu family')} model {fields.get('model')}"
