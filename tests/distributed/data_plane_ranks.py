"""What each of four ranks of test_data_plane.py runs: everything in one job, since to start one takes longer than the work.

    torchrun --nproc-per-node=4 tests/distributed/data_plane_ranks.py MODELS OUT

MODELS has a folder for each family; OUT gets their differences from transformers on 2 and on 3 ranks. Then `bench load` runs.
"""

import json
import os
import platform
import sys
from array import array
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import families

from spmd_serve.bench import load
from spmd_serve.distributed.channel import GlooChannel
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.host_memory import HostMemory
from spmd_serve.distributed.ranks import RankInfo, join_group, leave_group, rank_info
from spmd_serve.types import Request, SamplingParams, StepInput

SHAPES = [(1, 576), (16, 576), (512, 576), (2000, 576), (5,), (0, 3)]
TIMEOUT_S = 60.0


def check_memory(memory: HostMemory, group: dist.ProcessGroup) -> None:
    """Shared memory against gloo's own sums."""
    generator = torch.Generator().manual_seed(group.rank())
    for turn in range(10):
        for shape in SHAPES[turn % 3 :: 3] if turn else SHAPES:
            tensor = torch.randn(shape, generator=generator)
            by_gloo = tensor.clone()
            dist.all_reduce(by_gloo, group=group)
            gathered = memory.all_gather(tensor)
            summed = memory.all_reduce_(tensor.clone())
            assert torch.equal(gathered[group.rank()], tensor)
            torch.testing.assert_close(summed, by_gloo)
            in_order = gathered[0].clone()
            for other in gathered[1:]:
                in_order += other
            assert torch.equal(summed, in_order), "the sum is in rank order, so that all ranks hold the same bits"


def check_collectives(ranks: RankInfo, groups: dict[int, dist.ProcessGroup]) -> None:
    for size, group in groups.items():
        if ranks.rank < size:
            memory = HostMemory.create(group, TIMEOUT_S)
            assert memory is not None
            check_memory(memory, group)
    comm = Communicator.create(ranks, torch.device("cpu"), TIMEOUT_S)
    assert comm.all_reduce(torch.ones(3).expand(2, 3)).tolist() == [[4.0] * 3] * 2
    assert int(comm.all_reduce_min_(torch.tensor(10 + ranks.rank))) == 10
    assert not any("spmd_serve" in name for name in os.listdir("/dev/shm")), "the memory has no name"
    assert Path("/proc/self/maps").read_text().count("memfd:spmd_serve") >= 2
    print(f"rank {ranks.rank} done", flush=True)


def check_channel(rank: int) -> None:
    """Inputs of all sizes reach every rank, also those that need a second broadcast, and what is posted while others wait."""
    channel = GlooChannel(rank)
    for step, prompt in enumerate((0, 10, 900, 1000, 5, 40_000, 1)):
        ids = array("i", range(prompt)).tobytes()
        sent = StepInput(step, 1.5, arrivals=(Request(7, ids, SamplingParams(max_tokens=3)),) * 2)
        channel.post(sent if rank == 0 else None)
        assert channel.receive() == sent


def family_differences(models: Path, rank: int, group: dist.ProcessGroup) -> list[Any]:
    """Of each rank of the group: family -> way of computing -> largest difference. Collective in the group."""
    comm = Communicator(rank, group.size(), group)
    comm._host_memory = HostMemory.create(group, TIMEOUT_S)  # as Communicator.create does for all ranks
    found = {folder.name: families.largest_difference(folder, comm) for folder in sorted(models.iterdir())}
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, found, group=group)
    return everywhere


def main(models: Path, out: Path) -> int:
    torch.set_num_threads(1)
    ranks = rank_info(os.environ)
    # Keys of its own: `bench load` makes its process group with the plain store, as when it runs alone.
    store, _, _ = next(dist.rendezvous("env://"))
    join_group(ranks, dist.PrefixStore("data plane", store), TIMEOUT_S)
    check_channel(ranks.rank)
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}  # collective, also for who is not in it
    if platform.machine() == "x86_64":  # memory is shared there alone
        check_collectives(ranks, groups)
    differences = {size: family_differences(models, ranks.rank, groups[size]) for size in (2, 3) if ranks.rank < size}
    if ranks.rank == 0:
        out.write_text(json.dumps(differences))
    leave_group()
    return load.main(["--json", "--device", "cpu"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
