"""`bench offline`: tokens per second of the engine without HTTP, alone or under torchrun.

python -m spmd_serve.bench offline                                            offline-256
torchrun --nproc-per-node=2 -m spmd_serve.bench offline --batch-size 8        decode, 8 at once
... offline --requests 16 --prompt-tokens 128 --output-tokens 64 --model M    anything else; engine options too
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

from spmd_serve.bench.stats import percentiles_ms
from spmd_serve.bench.workloads import (
    ENGINE_OPTIONS,
    Workload,
    decode,
    make_workload,
    offline_256,
    parse_count,
    parse_range,
)
from spmd_serve.distributed.ranks import rank_info
from spmd_serve.errors import ConfigError, RequestError
from spmd_serve.llm import LLM, Generation
from spmd_serve.types import SamplingParams


def make_parser() -> argparse.ArgumentParser:
    """The options of this benchmark; all others are the engine's."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=ENGINE_OPTIONS,
        allow_abbrev=False,
    )
    parser.add_argument("--batch-size", type=parse_count, help="decode: so many requests of equal length at once")
    parser.add_argument("--requests", type=parse_count, help="requests of lengths from the ranges below (default: 256)")
    lengths = "N, or LOW,HIGH for random lengths (default: 100,1024); with --batch-size N (default: %s)"
    parser.add_argument("--prompt-tokens", type=parse_range, help=lengths % 128)
    parser.add_argument("--output-tokens", type=parse_range, help=lengths % 512)
    parser.add_argument("--temperature", type=float, default=0.6, help="(default: 0.6)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and prompts (default: 0)")
    parser.add_argument("--repeat", type=parse_count, default=1, help="runs, with new prompts each (default: 1)")
    parser.add_argument("--json", action="store_true", help="print each run as one JSON line")
    return parser


def chosen_workload(args: argparse.Namespace) -> Workload:
    """What the options ask for.

    Raises:
        ConfigError: --batch-size with what is for --requests.
    """
    if args.batch_size is not None:
        prompt, output = args.prompt_tokens or (128, 128), args.output_tokens or (512, 512)
        if args.requests is not None or prompt[0] < prompt[1] or output[0] < output[1]:
            raise ConfigError(
                "--batch-size is for requests of equal length at once; --requests and LOW,HIGH do without it"
            )
        return decode(args.batch_size, prompt[0], output[0])
    if args.requests is None and args.prompt_tokens is None and args.output_tokens is None and args.seed == 0:
        return offline_256()
    ranges = args.prompt_tokens or (100, 1024), args.output_tokens or (100, 1024)
    return make_workload("offline", args.requests or 256, *ranges, args.seed)


class Progress:
    """A line on a terminal that is written over a few times a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._count = 0
        self._began = self._shown = time.perf_counter()
        self._active = sys.stderr.isatty()

    def add(self, tokens: int) -> None:
        """`tokens` more have come out."""
        self._count += tokens
        now = time.perf_counter()
        if self._active and now - self._shown > 0.3:
            self._shown = now
            rate = self._count / (now - self._began)
            print(f"\r{self._count} of {self._total} tokens, {rate:.0f} tok/s ", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line."""
        if self._active:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run(llm: LLM, workload: Workload, sampling: SamplingParams, seed: int, rank: int) -> dict[str, Any]:
    """One run; figures on rank 0 (times in milliseconds), nothing on the others. Collective.

    sampling: how tokens are drawn; lengths and seeds come from `workload` and `seed`.
    """
    params = [
        replace(sampling, max_tokens=output, seed=seed + i, ignore_eos=True)
        for i, (_, output) in enumerate(workload.lengths)
    ]
    progress = Progress(workload.output_tokens)
    began = time.perf_counter()
    results = llm.generate(workload.prompts(seed), params, on_tokens=progress.add)
    wall = time.perf_counter() - began
    progress.close()
    failed = [result.error for result in results if result.error]
    if failed:
        raise RequestError(f"{len(failed)} of {len(results)} requests failed: {failed[0]}")
    return report_of(workload, results, began, wall) if rank == 0 else {}


def report_of(workload: Workload, results: list[Generation], began: float, wall: float) -> dict[str, Any]:
    """The figures of one run."""
    count = sum(len(result.token_ids) for result in results)
    first = [result.times[0] - began for result in results if result.times]
    between = [b - a for result in results for a, b in zip(result.times, result.times[1:], strict=False)]
    return {
        "workload": workload.name,
        "requests": len(results),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": count,
        "wall_s": round(wall, 3),
        "output_tokens_per_s": round(count / wall, 1),
        **percentiles_ms("ttft", first),
        **percentiles_ms("inter_token", between),
    }


def main(argv: list[str]) -> int:
    """Run the benchmark and print its report on rank 0."""
    args, engine_options = make_parser().parse_known_args(argv)
    ranks = rank_info(os.environ)
    workload = chosen_workload(args)
    llm = LLM(*engine_options)
    sampling = SamplingParams(max_tokens=1, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    warmup = decode(min(8, len(workload.lengths)), 64, 8)
    run(llm, warmup, sampling, 2**40, ranks.rank)
    rates = []
    for index in range(args.repeat):
        report = run(llm, workload, sampling, args.seed + 1_000_003 * index, ranks.rank)
        if ranks.rank > 0:
            continue
        rates.append(report["output_tokens_per_s"])
        if args.json:
            print(json.dumps({"ranks": ranks.world_size, **report}), flush=True)
        else:
            print(f"run {index + 1} of {args.repeat} on {ranks.world_size} rank(s)")
            print("\n".join(f"  {name:22} {value}" for name, value in report.items()), flush=True)
    if ranks.rank == 0 and args.repeat > 1 and not args.json:
        print(f"output tokens/s: median {median(rates):.1f}, from {min(rates):.1f} to {max(rates):.1f}")
    llm.close()
    return 0
