"""What the control channel costs: one exchange against a bare gloo broadcast, and its share of a decode step.

Each measurement is a torchrun job of this very module. An exchange and a bare broadcast take turns in one loop, because the
machine's mood changes from run to run. A rank that comes early waits for the others, so times are those of rank 0, which sends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from spmd_serve.config import parse_args
from spmd_serve.types import Abort, Request, SamplingParams, ServiceState, StepInput, StepOutput

PROMPT = 512  # token ids in the prompt of a request that is exchanged
REQUESTS = (0, 1, 16)
DECODE_TOKENS = 32
SYNC_LATENCIES = (0.0, 0.004, 0.25)  # seconds: an exchange in each step, the default, amortised over many
TURNS = 3


def main(argv: Sequence[str]) -> int:
    """Run the jobs and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m spmd_serve.bench control_plane", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="rank counts, with commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=400, help="exchanges of each size (default: %(default)s)")
    parser.add_argument("--batch", default="1,16", help="sequences that decode, with commas (default: %(default)s)")
    parser.add_argument("--no-decode", action="store_true", help="leave out the share of a decode step (needs a model)")
    parser.add_argument("--worker", choices=("exchange", "decode"), help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="after --: the server's options for the decode steps")
    args = parser.parse_args(argv)
    if args.worker == "exchange":
        return _exchange_worker(args.rounds)
    if args.worker == "decode":
        return _decode_worker([int(size) for size in args.batch.split(",")], args.options)
    counts = [int(count) for count in args.ranks.split(",")]
    print(
        f"one exchange, microseconds on rank 0, p50 / p99 of {args.rounds}; requests carry {PROMPT} token ids",
        flush=True,
    )
    print(f"{'ranks':>5}  {'bare broadcast':>16}" + "".join(f"{f'{n} requests':>18}" for n in REQUESTS), flush=True)
    code = 0
    for count in counts:
        code = code or _launch(count, "--worker", "exchange", "--rounds", str(args.rounds))
    if not args.no_decode:
        print(
            f"\nthe exchange's share of decode time, on {counts[0]} ranks\n{'batch':>5}  {'--sync-latency':>14}  {'share':>12}"
        )
        sys.stdout.flush()
        code = code or _launch(counts[0], "--worker", "decode", "--batch", args.batch, "--", *args.options)
    return code


def _launch(ranks: int, *arguments: str) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "spmd_serve.bench", "control_plane", *arguments]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ, check=False).returncode


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
        cells = [f"{1e6 * _quantile(s, 0.5):.0f} / {1e6 * _quantile(s, 0.99):.0f}" for s in times]
        print(f"{ranks.world_size:>5}  {cells[0]:>16}" + "".join(f"{cell:>18}" for cell in cells[1:]), flush=True)
    dist.barrier()  # nobody closes its connections while another one still waits
    leave_group()
    return 0


def _quantile(samples: list[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


# ---- share of a decode step ---------------------------------------------------------------------------------------


class _Link:
    """Brings one batch of requests, and adds up the times of the steps that compute nothing but decodes."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self.exchanges: list[float] = []
        self.steps: list[float] = []
        self._exchange_s = 0.0

    def drain(self) -> tuple[list[Request], list[Abort]]:
        requests, self._requests = self._requests, []
        return requests, []

    def wait(self, timeout_s: float) -> bool:
        return True

    def set_state(self, state: ServiceState, reason: str = "") -> None:
        pass

    def publish(self, output: StepOutput) -> None:
        stats = output.stats
        assert stats is not None
        had_exchange = stats.exchange_time != self._exchange_s  # the time of the last exchange stays while none is made
        self._exchange_s = stats.exchange_time
        if not output.started and not output.finished:
            self.steps.append(stats.step_time)
            self.exchanges.append(stats.exchange_time if had_exchange else 0.0)


def _decode_worker(batches: list[int], options: list[str]) -> int:
    """Decode with the model: the same batch with an exchange in each step and with amortised ones, in turns."""
    import torch

    from spmd_serve.assembly import assemble, make_plan, make_scheduler
    from spmd_serve.distributed.beats import Progress
    from spmd_serve.distributed.channel import make_channel
    from spmd_serve.distributed.ranks import join_group, leave_group, rank_info, threads_per_rank
    from spmd_serve.step_loop import StepLoop

    ranks = rank_info(os.environ)
    config = parse_args(options)
    torch.set_num_threads(config.engine.threads or threads_per_rank(ranks))
    join_group(ranks, None, 60.0)
    plan = make_plan(config, ranks)
    assembly = assemble(plan, ranks)
    uid = 0
    for batch in batches:
        shares: dict[float, list[float]] = {latency: [] for latency in SYNC_LATENCIES}
        steps: dict[float, list[float]] = {latency: [] for latency in SYNC_LATENCIES}
        for latency in SYNC_LATENCIES * TURNS:
            params = SamplingParams(DECODE_TOKENS, temperature=0.0, ignore_eos=True)
            requests = [Request(uid + i, array("i", [9, 2 + i, 3]).tobytes(), params) for i in range(batch)]
            uid += batch
            link = _Link(requests)
            StepLoop(
                ranks,
                make_channel(ranks),
                make_scheduler(plan.config, plan.model, assembly.num_pages),
                assembly.runner,
                replace(config.control, sync_latency=latency),
                overlap=bool(plan.config.engine.overlap),
                progress=Progress(),
                link=link if ranks.rank == 0 else None,
            ).run(until_idle=True)
            if ranks.rank == 0:
                shares[latency].append(sum(link.exchanges) / (sum(link.exchanges) + sum(link.steps)))
                steps[latency] += [e + s for e, s in zip(link.exchanges, link.steps, strict=True)]
        for latency, values in shares.items():
            if ranks.rank == 0:
                share, step_s = statistics.median(values), statistics.mean(steps[latency])
                print(f"{batch:>5}  {latency:>14g}  {100 * share:>10.2f} %  {1000 * step_s:>8.2f} ms", flush=True)
    torch.distributed.barrier()  # nobody closes its connections while another one still waits
    leave_group()
    return 0
