"""`bench collectives`: microseconds of one all-reduce by size and way, and which way is taken; under torchrun.

torchrun --nproc-per-node=2 -m spmd_serve.bench collectives                  on GPUs, or on CPUs where there are none
torchrun --nproc-per-node=2 -m spmd_serve.bench collectives --device cpu --dtype float32

On GPUs the ways are measured as at a server's start, inside CUDA graphs. On CPUs they take turns, since the machine's mood
changes; the figure is the median of the slowest rank's times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.ranks import RankInfo, join_group, leave_group, rank_info
from spmd_serve.distributed.symmetric import SIZES
from spmd_serve.engine.build import pick_device

REPEATS = 30  # rounds on CPUs


def main(argv: list[str]) -> int:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = "(default: %(default)s)"
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"), help=default)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help=default)
    parser.add_argument("--json", action="store_true", help="print one JSON line per size")
    args = parser.parse_args(argv)
    ranks = rank_info(os.environ)
    if ranks.world_size == 1:
        print("one rank sums nothing; start several: torchrun --nproc-per-node=2 ...", file=sys.stderr)
        return 2
    join_group(ranks, None, 60.0)
    device = pick_device(args.device, ranks.local_rank)
    dtype = getattr(torch, args.dtype)
    rows = (_on_gpus if device.type == "cuda" else _on_cpus)(ranks, device, dtype)
    if ranks.rank == 0:
        _report(rows, args.json)
    dist.barrier()  # nobody closes its connections while another one still waits
    leave_group()
    return 0


def _on_gpus(ranks: RankInfo, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Collective."""
    comm = Communicator.create(ranks, device)
    if ranks.one_host:
        comm.use_symmetric_memory(dtype, device)
    return [{"bytes": choice.size, "us": choice.times, "taken": choice.best} for choice in comm.choices]


def _on_cpus(ranks: RankInfo, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Collective."""
    torch.set_num_threads(1)
    comm = Communicator.create(ranks, device)
    ways: dict[str, Callable[[Tensor], object]] = {"gloo": dist.all_reduce}
    if comm.shares_memory:
        ways["shared_memory"] = comm.all_reduce
    rows = []
    for size in SIZES:
        tensor = torch.zeros(size // dtype.itemsize, dtype=dtype)
        times = torch.zeros(len(ways), REPEATS)
        for repeat in range(-2, REPEATS):
            for i, way in enumerate(ways.values()):
                began = time.perf_counter()
                way(tensor)  # collective
                if repeat >= 0:
                    times[i, repeat] = 1e6 * (time.perf_counter() - began)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)  # collective
        us = {name: statistics.median(row.tolist()) for name, row in zip(ways, times, strict=True)}
        rows.append({"bytes": size, "us": us, "taken": "shared_memory" if comm.shares_memory else "gloo"})
    return rows


def _report(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    if not rows:
        print("NCCL sums all tensors: the ranks are on several hosts, or their GPUs cannot map each other's memory")
        return
    names = list(rows[0]["us"])
    print(f"{'KiB':>6}" + "".join(f"{name + ', us':>20}" for name in names) + f"{'taken':>16}")
    for row in rows:
        cells = "".join(f"{row['us'][name]:>20.1f}" for name in names)
        print(f"{row['bytes'] // 1024:>6}{cells}{row['taken']:>16}")
