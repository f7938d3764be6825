"""The shared memory of a host's ranks, which are threads here: right sums, equal bits, no slot reused too early."""

import mmap
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_serve.distributed.host_memory import SLOT_BYTES, HostMemory, memory_size
from spmd_serve.errors import ControlTimeoutError, RankLostError

T = TypeVar("T")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def on_ranks(world_size: int, work: Callable[[int, HostMemory], T]) -> list[T]:
    """`work(rank, its access)` on every rank at once; the results in rank order."""
    memory = mmap.mmap(-1, memory_size(world_size))
    ranks = [HostMemory(memory, rank, world_size, timeout_s=60) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(work, range(world_size), ranks))


def tensor_of(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64])
def test_sum_in_rank_order_with_equal_bits(world_size: int, dtype: torch.dtype) -> None:
    shapes = [(1, 576), (16, 576), (7,), (3, 5, 11), (0, 4), (1,)]

    def work(rank: int, memory: HostMemory) -> list[Tensor]:
        return [memory.all_reduce_(tensor_of(rank, turn, shape, dtype)) for turn, shape in enumerate(shapes)]

    results = on_ranks(world_size, work)
    for turn, shape in enumerate(shapes):
        expected = tensor_of(0, turn, shape, dtype)
        for rank in range(1, world_size):
            expected = expected + tensor_of(rank, turn, shape, dtype)
        assert all(torch.equal(result[turn], expected) for result in results)


def test_the_sum_is_in_place() -> None:
    def work(rank: int, memory: HostMemory) -> bool:
        tensor = torch.full((4, 8), float(rank + 1))
        return memory.all_reduce_(tensor) is tensor and bool((tensor == 3).all())

    assert on_ranks(2, work) == [True, True]


def test_tensors_larger_than_a_slot() -> None:
    numel = SLOT_BYTES // 4 * 2 + 77

    def work(rank: int, memory: HostMemory) -> tuple[Tensor, Tensor]:
        tensor = torch.arange(numel, dtype=torch.float32) + rank
        return memory.all_gather(tensor.view(1, -1)), memory.all_reduce_(tensor)

    for gathered, summed in on_ranks(2, work):
        plain = torch.arange(numel, dtype=torch.float32)
        assert torch.equal(gathered, torch.stack((plain, plain + 1))[:, None])
        assert torch.equal(summed, plain + (plain + 1))


@pytest.mark.parametrize("world_size", [2, 4])
def test_gather_in_rank_order(world_size: int) -> None:
    def work(rank: int, memory: HostMemory) -> Tensor:
        return memory.all_gather(torch.tensor([[rank, 10 * rank], [7, 8]])[:, 1:])  # not contiguous

    expected = torch.tensor([[[10 * rank], [8]] for rank in range(world_size)])
    assert all(torch.equal(result, expected) for result in on_ranks(world_size, work))


def test_no_slot_is_reused_while_somebody_reads_it() -> None:
    """Ranks that hurry and dawdle at random, turn after turn: a slot that is written too early shows as a wrong sum."""
    world_size, turns, numel = 3, 400, 4096

    def work(rank: int, memory: HostMemory) -> list[int]:
        rng = random.Random(rank)
        wrong = []
        for turn in range(turns):
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.004)
            summed = memory.all_reduce_(torch.full((numel,), float(turn * (rank + 1))))
            if not bool((summed == turn * 6).all()):
                wrong.append(turn)
        return wrong

    assert on_ranks(world_size, work) == [[], [], []]


def test_more_sizes_than_views_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_serve.distributed.host_memory._VIEWS", 3)

    def work(rank: int, memory: HostMemory) -> bool:
        return all(bool((memory.all_reduce_(torch.ones(n)) == 2).all()) for n in [*range(10), *range(10)])

    assert on_ranks(2, work) == [True, True]


def test_where_files_may_not_be_that_large_all_ranks_go_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gather(gathered: list[object], own: object, group: object) -> None:
        gathered[:] = [own]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        assert HostMemory.create(dist.ProcessGroup(0, 1), 1.0) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "gloo sums all tensors: no shared memory (rank 0: [Errno 27] File too large)" in caplog.text


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    memory = HostMemory(mmap.mmap(-1, memory_size(2)), 0, 2, pids=(os.getpid(), os.getpid()), timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(ControlTimeoutError, match="rank 1"):
        memory.all_reduce_(torch.ones(4))
    assert time.monotonic() - began < 5


def test_a_rank_that_has_died_ends_the_wait_at_once() -> None:
    peer = subprocess.Popen([sys.executable, "-c", ""])
    peer.wait()
    memory = HostMemory(mmap.mmap(-1, memory_size(2)), 0, 2, pids=(os.getpid(), peer.pid), timeout_s=60)
    began = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        memory.all_reduce_(torch.ones(4))
    assert time.monotonic() - began < 5
