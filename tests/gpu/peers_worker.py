"""What each rank of test_two_gpus.py runs for the sums over ranks: every kernel of peers.cu, and copy
engines, against sums in float32, bit for bit.

torchrun --nproc-per-node=2 tests/gpu/peers_worker.py
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from spmd_serve.distributed import copied_sums
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.ranks import join_group, leave_group, rank_info

SIZES = (4, 8, 1024, 1020, 1028, 5120, 8192, 327_680, 524_288, 1_310_720, 2_097_152, 60, 1924, 500_000, 41_943_040)
TURNS = 300
LARGEST = (4096, 5120)
copied_sums.MIN_BYTES = 1


def main() -> None:
    ranks = rank_info(os.environ)
    join_group(ranks, None, 60.0)
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    comm = Communicator.create(ranks, device)
    comm.use_symmetric_memory(torch.bfloat16, device, LARGEST)
    assert comm.choices, "these GPUs cannot map each other's memory"
    symmetric = comm._symmetric
    assert symmetric is not None and symmetric._peers is not None, "peers.cu was not compiled"
    peers = symmetric._peers
    own = torch.Generator(device=device).manual_seed(5 + ranks.rank)
    common = torch.Generator(device=device).manual_seed(3)  # equal on all ranks
    for turn in range(TURNS):
        count = SIZES[turn % len(SIZES)]
        form = "lines" if count > 524_288 or turn % 2 else "cells"
        x = torch.randn(count, device=device, generator=own).bfloat16()
        residual = torch.randn(count, device=device, generator=common).bfloat16()
        total = comm.all_gather(x).float().sum(dim=0)
        if turn % 7 == ranks.rank:
            time.sleep(0.002)  # one comes late
        added = peers.all_reduce(x, form, residual.clone())
        assert torch.equal(added, (total + residual.float()).bfloat16()), (turn, count, form)
        assert torch.equal(peers.all_reduce(x.clone(), form), total.bfloat16()), (turn, count, form)
        rows = turn % 256 + 1
        values = torch.randn(rows, device=device, generator=own).round(decimals=1)  # with ties
        indices = torch.arange(rows, device=device) + 1000 * ranks.rank
        winner = comm.all_gather(values).argmax(dim=0)  # the first of equals
        expected = comm.all_gather(indices).gather(0, winner[None])[0]
        assert torch.equal(comm.best_index(values, indices), expected), (turn, rows)
    for turn in range(40):
        tokens = LARGEST[0] - turn * 61
        x = torch.randn(tokens, LARGEST[1], device=device, generator=own).bfloat16()
        residual = torch.randn(tokens, LARGEST[1], device=device, generator=common).bfloat16()
        assert comm.overlaps(x) and not comm.overlaps(torch.cat((x, x, x)))  # the latter is more than LARGEST
        expected = (comm.all_gather(x).float().sum(dim=0) + residual.float()).bfloat16()
        sums = []
        for half, into in zip(x.tensor_split(2), residual.tensor_split(2), strict=True):
            if turn % 5 == ranks.rank:
                time.sleep(0.002)
            sums.append(comm.start_all_reduce_add_(half.clone(), into))
        for add in sums:
            add()
        assert torch.equal(residual, expected), turn
    print(f"rank {ranks.rank}: {TURNS} turns alike", flush=True)
    dist.barrier()
    leave_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as in tp_worker.py
