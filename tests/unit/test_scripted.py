"""Decoding by TorchScript gives what the same layers give in plain torch, and stands for them wherever it can."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from support import families
from support.thread_ranks import on_ranks
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.kernels import packed
from spmd_serve.kernels.fp8 import FP8

PLAIN = {"mixtral", "qwen3-moe", "gemma2", "gemma3", "olmo2"}  # experts, norms after the blocks, a norm over all heads
ORDERS = {"plain": torch.float32, "onednn": torch.float32, "half": torch.bfloat16}
# Slots of a page table: one row, rows of similar length, and rows of very different lengths, which are grouped.
STEPS = ([(0, 9)], [(1, 30), (2, 33), (3, 24)], [(0, 40), (4, 0)])


def decode(shard: families.Shard, rows: list[tuple[int, int]]) -> Tensor:
    return shard.step([(slot, position, 7 + slot) for slot, position in rows], [])


def plain(shard: families.Shard, rows: list[tuple[int, int]]) -> Tensor:
    scripted, shard.decoder._scripted = shard.decoder._scripted, None
    try:
        return decode(shard, rows)
    finally:
        shard.decoder._scripted = scripted


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_scripted_equals_plain(family: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if order != "plain" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("weights are packed on x86 alone")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if order == "plain":
        monkeypatch.setattr(packed, "_has_onednn", lambda: False)
    families.write_family(family, tmp_path)
    shard = families.Shard(tmp_path, Communicator(), 5, None, ORDERS[order])
    scripted = shard.decoder._scripted
    assert (scripted is None) == any(family.startswith(name) for name in PLAIN)
    if scripted is None:
        return
    assert {
        weight.order
        for layer in shard.decoder.layers
        for weight in (w and w.script_weight for w in layer.linears())
        if weight
    } == {order}
    for slot in range(5):
        shard.step([], [(slot, 0, torch.arange(slot, slot + families.MAX_LEN) % families.VOCAB)])
    for table in (shard.page_table, shard.page_table.sort().values):  # pages in no order, and side by side
        shard.page_table = table
        for rows in STEPS:
            torch.testing.assert_close(decode(shard, rows), plain(shard, rows), rtol=1e-5, atol=1e-5)


def test_another_type_of_cache_is_left_to_plain_torch(tmp_path: Path) -> None:
    families.write_family("llama", tmp_path)
    shard = families.Shard(tmp_path, Communicator(), 2, None, torch.float32)
    shard.kv.layers = [(k.to(FP8), v.to(FP8)) for k, v in shard.kv.layers]
    assert torch.equal(decode(shard, [(0, 0)]), plain(shard, [(0, 0)]))


def test_a_rank_without_heads_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven ranks for six heads; where no weight is packed, nothing else tells that rank's layers from the others'."""
    monkeypatch.setattr(packed, "_has_onednn", lambda: False)
    families.write_family("llama", tmp_path)
    found = on_ranks(7, lambda comm: families.largest_difference(tmp_path, comm))
    assert max(max(of_rank.values()) for of_rank in found) < families.TOLERANCE
