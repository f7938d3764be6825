#!/usr/bin/env python3
"""Compare spmd_serve with `transformers serve --continuous-batching` on the bundled model, over HTTP, in one run.

    launch/compare_transformers.py --transformers /path/to/venv/bin/transformers [--dtype float32] [--threads 2] [--rounds 3]

Both servers get the same text prompts with greedy sampling, the same dtype and number of threads, one process each, and
take turns; medians over the rounds and their ratio are printed. The other server needs an environment of its own:
`pip install 'transformers[serving]'` beside a CPU build of torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from spmd_serve.config import DEFAULT_MODEL, ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.models.resolve import resolve_model

WORDS = [
    "time",
    "people",
    "water",
    "place",
    "year",
    "work",
    "world",
    "house",
    "school",
    "night",
    "light",
    "city",
    "river",
    "music",
    "paper",
    "garden",
    "window",
    "morning",
    "summer",
    "winter",
    "bread",
    "letter",
    "friend",
    "train",
    "bridge",
    "ocean",
    "forest",
    "market",
    "doctor",
    "teacher",
]
OUTPUT_TOKENS = 64
READY_S = 180.0


def make_prompts(tokenizer: Tokenizer, count: int, length: int, seed: int) -> list[str]:
    """Texts of exactly `length` tokens."""
    rng = random.Random(seed)
    found: list[str] = []
    while len(found) < count:
        ids = tokenizer.encode(" ".join(rng.choice(WORDS) for _ in range(2 * length))).ids[:length]
        text = tokenizer.decode(ids)
        if len(tokenizer.encode(text).ids) == length:
            found.append(text)
    return found


async def stream(port: int, body: dict[str, Any]) -> tuple[int, list[float]]:
    """One streamed completion: its tokens, and when pieces of it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    received, times = b"", []
    while piece := await reader.read(2**18):
        if b"data: " in piece:
            times.append(time.perf_counter())
        received += piece
    writer.close()
    usage = received.rfind(b'"completion_tokens":')
    if usage < 0:
        raise SystemExit(f"no usage in the answer: {received[-300:]!r}")
    return int(received[usage + 20 :].split(b",")[0].split(b"}")[0]), times


async def measure(port: int, ours: bool, prompts: list[str]) -> tuple[float, float]:
    """(tokens per second of all, tokens per second of the first stream after its first token)."""
    bodies: list[dict[str, Any]] = []
    for prompt in prompts:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "stream": True}
        if ours:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        else:
            generation = {"eos_token_id": -1, "max_new_tokens": OUTPUT_TOKENS, "do_sample": False}
            body["generation_config"] = json.dumps(generation)
        bodies.append(body)
    began = time.perf_counter()
    results = await asyncio.gather(*(stream(port, body) for body in bodies))
    took = time.perf_counter() - began
    tokens, times = results[0]
    return sum(n for n, _ in results) / took, (tokens - 1) / (times[-1] - times[0])


@contextmanager
def server(command: list[str], port: int, threads: int) -> Iterator[None]:
    """Run a server until the block ends."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY_S
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise SystemExit(f"{command[0]} did not come up:\n{log.read().decode()[-2000:]}") from None
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", required=True, help="the transformers program of the other environment")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="(default: float32)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: all cores)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    options = parser.parse_args()
    folder = resolve_model(ModelOptions(model=DEFAULT_MODEL), RankInfo())
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    rates: dict[tuple[str, str], list[float]] = {}
    for round_ in range(options.rounds):
        for name in ("transformers", "spmd_serve"):
            port = free_port()
            if name == "spmd_serve":
                command = [sys.executable, "-m", "spmd_serve", "--port", str(port), "--dtype", options.dtype]
                command += ["--threads", str(options.threads), "--prefix-cache", "off"]
            else:
                command = [options.transformers, "serve", str(folder), "--continuous-batching", "--device", "cpu"]
                command += ["--dtype", options.dtype, "--port", str(port)]
            with server(command, port, options.threads):
                ours = name == "spmd_serve"
                asyncio.run(measure(port, ours, make_prompts(tokenizer, 2, 16, 99)))  # warm
                many, _ = asyncio.run(measure(port, ours, make_prompts(tokenizer, 16, 128, round_)))
                _, single = asyncio.run(measure(port, ours, make_prompts(tokenizer, 1, 32, 100 + round_)))
            print(
                f"round {round_ + 1} {name:12} 16 concurrent {many:6.1f} tok/s, one stream {single:5.1f} tok/s",
                flush=True,
            )
            rates.setdefault((name, "16 concurrent"), []).append(many)
            rates.setdefault((name, "one stream"), []).append(single)
    for what in ("16 concurrent", "one stream"):
        own, other = (statistics.median(rates[name, what]) for name in ("spmd_serve", "transformers"))
        print(
            f"{what}: spmd_serve {own:.1f}, transformers {other:.1f} tok/s (medians of {options.rounds}): {own / other:.2f}x"
        )


if __name__ == "__main__":
    main()
