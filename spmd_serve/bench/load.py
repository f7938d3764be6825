"""`bench load`: how long the weights take to load and how many bytes each rank reads, against reading the files whole.

Runs alone or under torchrun. Every rank loads its shard as the server does; then rank 0 alone reads the same files with
safetensors.torch.load_file. Each is done with the files out of the page cache (as far as the system lets go of them) and
again with them in it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from spmd_serve.assembly import make_plan
from spmd_serve.bench.workloads import ENGINE_OPTIONS
from spmd_serve.config import parse_args
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.ranks import join_group, leave_group, rank_info, threads_per_rank
from spmd_serve.engine.build import build_decoder


@dataclass(frozen=True)
class Measurement:
    """One load on one rank; `rank` None is load_file on rank 0."""

    rank: int | None
    cached: bool
    bytes_read: int
    seconds: float


def main(argv: list[str]) -> int:
    """Print a table; options that are not listed are the engine's (--model, --dtype, ...)."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench load", description=__doc__, epilog=ENGINE_OPTIONS, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per load")
    args, engine_options = parser.parse_known_args(argv)
    ranks = rank_info(os.environ)
    config = parse_args(engine_options)
    torch.set_num_threads(config.engine.threads or threads_per_rank(ranks))
    join_group(ranks, None, config.control.control_timeout)
    plan = make_plan(config, ranks)
    comm = Communicator.create(ranks, plan.device)
    files = sorted(plan.folder.glob("*.safetensors"))

    def load_shard() -> int:
        _, _, report = build_decoder(plan, comm)
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
        return report.bytes_read

    def load_whole() -> int:
        # load_file maps the files; the copy is what reads them.
        return sum(tensor.clone().nbytes for file in files for tensor in load_file(file).values())

    found: list[Measurement] = []
    for cached in (False, True):
        own = _measure(load_shard, ranks.rank, cached, files)
        found += _from_all_ranks(own, ranks.world_size)
        if ranks.rank == 0:
            found.append(_measure(load_whole, None, cached, files))
        _from_all_ranks(own, ranks.world_size)  # the others wait
    if ranks.rank == 0:
        _report(found, sum(file.stat().st_size for file in files), args.json)
    leave_group()
    return 0


def _measure(load: Callable[[], int], rank: int | None, cached: bool, files: list[Path]) -> Measurement:
    if not cached:
        for file in files:
            _forget(file)
    began = time.perf_counter()
    bytes_read = load()
    return Measurement(rank, cached, bytes_read, time.perf_counter() - began)


def _forget(file: Path) -> None:
    """Ask the system to drop the file from its page cache (Linux; it keeps what others have mapped)."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _from_all_ranks(own: Measurement, world_size: int) -> list[Measurement]:
    """Every rank's measurement. Collective."""
    if world_size == 1:
        return [own]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, own)
    return gathered


def _report(found: list[Measurement], file_bytes: int, as_json: bool) -> None:
    if as_json:
        for measurement in found:
            print(json.dumps(asdict(measurement)))
        return
    print(f"{'':30}{'MB read':>10}{'seconds':>10}{'GB/s':>8}")
    for m in found:
        label = ("load_file, 1 process" if m.rank is None else f"rank {m.rank}") + (", cached" if m.cached else "")
        print(f"{label:30}{m.bytes_read / 1e6:>10.0f}{m.seconds:>10.2f}{m.bytes_read / m.seconds / 1e9:>8.2f}")
    shards = sum(m.bytes_read for m in found if m.rank is not None and m.cached)
    print(f"all ranks together read {shards / max(file_bytes, 1):.3f} of the files' {file_bytes / 1e6:.0f} MB")
