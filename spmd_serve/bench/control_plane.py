"""`bench control_plane`: one control exchange against a bare gloo broadcast, and decode steps with and without exchanges.

Each measurement is a torchrun job of this very module. An exchange and a bare broadcast take turns in one loop, because the
machine's mood changes from run to run. A rank that comes early waits for the others, so times are those of rank 0, which sends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from spmd_serve.bench.stats import quantile
from spmd_serve.bench.torchrun import environment, torchrun
from spmd_serve.bench.workloads import parse_count, parse_counts
from spmd_serve.config import parse_args, resolved
from spmd_serve.distributed.beats import Progress
from spmd_serve.distributed.channel import StepChannel
from spmd_serve.step_loop import GivenLink, StepLoop
from spmd_serve.types import Request, SamplingParams, StepInput, StepOutput

PROMPT = 512  # token ids in the prompt of a request that is exchanged
REQUESTS = (0, 1, 16)
SYNC_LATENCIES = (0.0, 0.004, 0.25)  # seconds: an exchange in each step, the default, amortised over many
NO_EXCHANGE = -1.0  # in the place of a latency
TURNS = 3


def main(argv: Sequence[str]) -> int:
    """Run the jobs and print their tables."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench control_plane", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--ranks", type=parse_counts, default="2,4", help="rank counts, with commas (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=parse_count, default=400, help="exchanges of each size (default: %(default)s)")
    parser.add_argument(
        "--batch", type=parse_counts, default="1,16", help="sequences that decode, with commas (default: %(default)s)"
    )
    parser.add_argument("--decode-tokens", type=int, default=32, help="of each sequence (default: %(default)s)")
    parser.add_argument("--no-decode", action="store_true", help="leave out the decode steps (they need a model)")
    parser.add_argument("--worker", choices=("exchange", "decode"), help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="after --: the server's options for the decode steps")
    args = parser.parse_args(argv)
    if args.worker == "exchange":
        return _exchange_worker(args.rounds)
    if args.worker == "decode":
        return _decode_worker(args.batch, args.decode_tokens, args.options)
    counts = args.ranks
    if min(counts) < 2 or args.decode_tokens < 8:
        parser.error("an exchange needs --ranks of 2 or more, and decode steps --decode-tokens of 8 or more")
    print(
        f"one exchange, microseconds on rank 0, p50 / p99 of {args.rounds}; requests carry {PROMPT} token ids",
        flush=True,
    )
    print(f"{'ranks':>5}  {'bare broadcast':>16}" + "".join(f"{f'{n} requests':>18}" for n in REQUESTS), flush=True)
    code = 0
    for count in counts:
        code = code or _launch(count, "--worker", "exchange", "--rounds", str(args.rounds))
    if not args.no_decode:
        print(f"\ndecode steps on {counts[0]} ranks, ms; lost: against steps without any exchange")
        print(f"{'batch':>5}  {'--sync-latency':>14}  {'mean':>8}  {'p50':>8}  {'p99':>8}  {'lost':>8}", flush=True)
        sizes = ("--batch", ",".join(map(str, args.batch)), "--decode-tokens", str(args.decode_tokens))
        code = code or _launch(counts[0], "--worker", "decode", *sizes, "--", *args.options)
    return code


def _launch(ranks: int, *arguments: str) -> int:
    command = torchrun(ranks, "-m", "spmd_serve.bench", "control_plane", *arguments)
    # A group of its own: Ctrl-C is for this process, which kills torchrun, and with it its ranks.
    return subprocess.run(command, env=environment(), process_group=0, check=False).returncode


# ---- one exchange -------------------------------------------------------------------------------------------------


def _exchange_worker(rounds: int) -> int:
    import torch
    import torch.distributed as dist

    from spmd_serve.distributed.channel import make_channel
    from spmd_serve.distributed.ranks import join_group, leave_group, rank_info

    ranks = rank_info(os.environ)
    join_group(ranks, None, 60.0)
    channel = make_channel(ranks)
    prompt = array("i", range(PROMPT)).tobytes()
    requests = [Request(uid, prompt, SamplingParams(max_tokens=64)) for uid in range(max(REQUESTS))]
    number = torch.zeros(1, dtype=torch.int64)

    def exchange(count: int) -> None:
        step_input = StepInput(0, 0.0, arrivals=tuple(requests[:count])) if ranks.rank == 0 else None
        channel.exchange(step_input)

    actions: list[Callable[[], object]] = [lambda: dist.broadcast(number, src=0)]
    actions += [lambda n=n: exchange(n) for n in REQUESTS]  # type: ignore[misc]
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 20):
        for samples, action in zip(times, actions, strict=True):
            began = time.perf_counter()
            action()  # collective: every rank, the same one
            if turn >= 20:
                samples.append(time.perf_counter() - began)
    if ranks.rank == 0:
        cells = [f"{1e6 * quantile(s, 0.5):.0f} / {1e6 * quantile(s, 0.99):.0f}" for s in times]
        print(f"{ranks.world_size:>5}  {cells[0]:>16}" + "".join(f"{cell:>18}" for cell in cells[1:]), flush=True)
    dist.barrier()  # nobody closes its connections while another one still waits
    leave_group()
    return 0


# ---- decode steps ---------------------------------------------------------------------------------------------------


class _Link(GivenLink):
    """Brings one batch of requests, and notes when the steps that compute nothing but decodes are done."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self._last = 0.0
        self.steps: list[float] = []

    def publish(self, output: StepOutput) -> None:
        now = time.perf_counter()
        if self._last and not output.finished:
            self.steps.append(now - self._last)
        self._last = 0.0 if output.started or not output.tokens else now


class _NoExchange(StepChannel):
    """One exchange, for the requests. After that each rank tells itself that nothing has happened."""

    def __init__(self, channel: StepChannel, progress: Progress) -> None:
        self._channel: StepChannel | None = channel
        self._progress = progress
        self._posted: StepInput | None = None

    def post(self, step_input: StepInput | None) -> None:
        if self._channel is not None:
            self._channel.post(step_input)
            return
        step = (self._progress.step or 0) + 1
        self._posted = StepInput(step if step_input is None else step_input.step, 0.0)

    def receive(self) -> StepInput:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            return replace(channel.receive(), digest=None, now=0.0)
        assert self._posted is not None
        return self._posted


def _decode_worker(batches: list[int], tokens: int, options: list[str]) -> int:
    """Decode with the model: the same batch with an exchange in each step, with amortised ones and with none, in turns."""
    import torch

    from spmd_serve.assembly import assemble, make_plan, make_scheduler
    from spmd_serve.distributed.channel import make_channel
    from spmd_serve.distributed.ranks import join_group, leave_group, rank_info, threads_per_rank

    ranks = rank_info(os.environ)
    config = parse_args(options)
    torch.set_num_threads(config.engine.threads or threads_per_rank(ranks))
    join_group(ranks, None, 60.0)
    plan = make_plan(config, ranks)
    assembly = assemble(plan, ranks)
    uid = 0
    for batch in batches:
        steps: dict[float, list[float]] = {latency: [] for latency in (NO_EXCHANGE, *SYNC_LATENCIES)}
        for latency in list(steps) * TURNS:
            params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
            requests = [Request(uid + i, array("i", [9, 2 + i, 3]).tobytes(), params) for i in range(batch)]
            uid += batch
            link, progress, channel = _Link(requests), Progress(), make_channel(ranks)
            StepLoop(
                ranks,
                _NoExchange(channel, progress) if latency == NO_EXCHANGE else channel,
                make_scheduler(plan, assembly.num_pages),
                assembly.runner,
                replace(config.control, sync_latency=max(latency, 0.0)),
                overlap=resolved(plan.config.engine.overlap),
                progress=progress,
                link=link if ranks.rank == 0 else None,
            ).run(until_idle=True)
            steps[latency] += link.steps
        if ranks.rank == 0:
            _print_steps(batch, steps)
    torch.distributed.barrier()  # nobody closes its connections while another one still waits
    assembly.runner.close()
    leave_group()
    return 0


def _print_steps(batch: int, steps: dict[float, list[float]]) -> None:
    """A line for each latency. steps: seconds."""
    alone = statistics.mean(steps[NO_EXCHANGE])
    for latency, values in steps.items():
        name = "no exchange" if latency == NO_EXCHANGE else f"{latency:g}"
        mean = statistics.mean(values)
        cells = "".join(f"  {1000 * value:>8.3f}" for value in (mean, quantile(values, 0.5), quantile(values, 0.99)))
        print(f"{batch:>5}  {name:>14}{cells}  {100 * (1 - alone / mean):>6.1f} %", flush=True)
