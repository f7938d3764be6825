"""`bench trace`: where the time of decode steps goes: a profiler trace, the ten costliest kernels, the share of idle time.

Under torchrun they are rank 0's.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from spmd_serve.bench.workloads import ENGINE_OPTIONS, parse_count
from spmd_serve.distributed.ranks import rank_info
from spmd_serve.errors import ConfigError
from spmd_serve.llm import LLM
from spmd_serve.types import SamplingParams

_TOP = 10
_WARM_TOKENS = 8


def main(argv: list[str]) -> int:
    """Trace and print the table; options that are not listed are the engine's (--model, --dtype, ...)."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench trace", description=__doc__, epilog=ENGINE_OPTIONS, allow_abbrev=False
    )
    parser.add_argument("--batch-size", type=parse_count, default=8, help="sequences that decode together (default: 8)")
    parser.add_argument("--prompt-len", type=parse_count, default=128, help="tokens of each prompt (default: 128)")
    parser.add_argument("--steps", type=parse_count, default=64, help="decode steps in the trace (default: 64)")
    parser.add_argument("--output", type=Path, default=None, help="where to write the Chrome trace (default: nowhere)")
    options, engine_options = parser.parse_known_args(argv)
    if options.output is not None:  # the profiler itself only logs that it cannot write, when all is done
        try:
            options.output.open("ab").close()
        except OSError as error:
            raise ConfigError(f"--output: {options.output} cannot be written ({error.strerror})") from None
    llm = LLM(*engine_options)
    prompts = [[(7 * i + j) % 1000 + 10 for j in range(options.prompt_len)] for i in range(options.batch_size)]

    def run(tokens: int) -> None:
        llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.6, ignore_eos=True))

    run(_WARM_TOKENS)
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as profiler:
        run(options.steps)
        if cuda:
            torch.cuda.synchronize()
    if rank_info(os.environ).rank == 0:
        if options.output is not None:
            profiler.export_chrome_trace(str(options.output))
            print(f"trace: {options.output}")
        print(_summary(profiler.events()) if cuda else _cpu_table(profiler))
    llm.close()
    return 0


def _summary(events: Sequence[Any] | None) -> str:
    """A table of kernels over the decode steps (the prefill is cut off), with idle time between them."""
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in events or ()
        if e.device_type.name == "CUDA" and not e.name.startswith(("Activity Buffer", "nccl:"))
    )
    if not kernels:
        return "no GPU kernels in the trace"
    first, last = kernels[0][0], max(end for _, end, _ in kernels)
    start = first + (last - first) * 0.25  # the prefill and the first steps are behind then
    busy, reached = 0.0, start
    by_name: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in kernels:
        if begin < start:
            continue
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
        by_name[name].append(end - begin)
    total = last - start
    lines = [
        f"{total / 1000:.2f} ms traced, idle {100 * (1 - busy / total):.1f}%",
        f"{'kernel':70} calls  mean us  share",
    ]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_TOP]:
        lines.append(f"{name[:70]:70} {len(times):5} {sum(times) / len(times):8.1f} {100 * sum(times) / total:5.1f}%")
    return "\n".join(lines)


def _cpu_table(profiler: profile) -> str:
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_TOP))
