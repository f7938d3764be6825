"""What each of four ranks of test_collectives.py runs: shared memory of 2, 3 and 4 of them against gloo's own sums."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.host_memory import HostMemory
from spmd_serve.distributed.ranks import join_group, leave_group, rank_info

SHAPES = [(1, 576), (16, 576), (512, 576), (2000, 576), (5,), (0, 3)]


def check(memory: HostMemory, group: dist.ProcessGroup) -> None:
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


def main() -> None:
    torch.set_num_threads(1)
    ranks = rank_info(os.environ)
    join_group(ranks, None, 30.0)
    for size in (2, 3, 4):
        group = dist.new_group(list(range(size)))  # collective, also for those that are not in it
        if ranks.rank < size:
            memory = HostMemory.create(group, 30.0)
            assert memory is not None
            check(memory, group)
    comm = Communicator.create(ranks, torch.device("cpu"), 30.0)
    assert comm.all_reduce(torch.ones(3).expand(2, 3)).tolist() == [[4.0] * 3] * 2
    assert int(comm.all_reduce_min_(torch.tensor(10 + ranks.rank))) == 10
    assert not any("spmd_serve" in name for name in os.listdir("/dev/shm")), "the memory has no name"
    assert Path("/proc/self/maps").read_text().count("memfd:spmd_serve") >= 2
    print(f"rank {ranks.rank} done", flush=True)
    leave_group()


if __name__ == "__main__":
    sys.exit(main())
