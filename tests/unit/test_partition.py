"""The partition: everything owned once, KV heads where their query heads are, one GQA ratio per rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_serve.distributed.partition import Partition, make_partition, split_evenly
from spmd_serve.errors import ModelError


def shares(
    world_size: int, group_size: int, kv_heads: int, ffn: int = 64, vocab: int = 128, experts: int = 0, unit: int = 1
) -> list[Partition]:
    return [
        make_partition(
            rank=rank,
            world_size=world_size,
            num_q_heads=group_size * kv_heads,
            num_kv_heads=kv_heads,
            intermediate_size=ffn,
            vocab_size=vocab,
            num_experts=experts,
            ffn_unit=unit,
        )
        for rank in range(world_size)
    ]


@given(st.integers(0, 300), st.integers(1, 40))
def test_split_evenly_covers_in_order_and_is_balanced(total: int, parts: int) -> None:
    ranges = split_evenly(total, parts)
    assert len(ranges) == parts
    assert [i for r in ranges for i in r] == list(range(total))
    lengths = [len(r) for r in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(
    world_size=st.integers(1, 24),
    group_size=st.integers(1, 16),
    kv_heads=st.integers(1, 16),
    ffn=st.integers(1, 500),
    vocab=st.integers(1, 500),
    experts=st.integers(0, 70),
    unit=st.integers(1, 130),
)
def test_everything_is_owned_once(
    world_size: int, group_size: int, kv_heads: int, ffn: int, vocab: int, experts: int, unit: int
) -> None:
    ranks = shares(world_size, group_size, kv_heads, ffn, vocab, experts, unit)
    assert [h for p in ranks for h in p.q_heads] == list(range(group_size * kv_heads))
    assert [c for p in ranks for c in p.ffn] == list(range(ffn))
    assert all(p.ffn.start % unit == 0 or p.ffn.start == ffn for p in ranks)
    assert [v for p in ranks for v in p.vocab] == list(range(vocab))
    assert [e for p in ranks for e in p.experts] == list(range(experts))
    for p in ranks:
        # A KV head is where its query heads are, and nowhere else.
        assert set(p.kv_heads) == {h // group_size for h in p.q_heads}
        if p.q_heads:
            ratio, rest = divmod(len(p.q_heads), len(p.kv_heads))
            assert rest == 0
            assert all(h // group_size == p.kv_heads[i // ratio] for i, h in enumerate(p.q_heads))


@given(world_size=st.integers(1, 24), group_size=st.integers(1, 16), kv_heads=st.integers(1, 16))
def test_heads_are_balanced(world_size: int, group_size: int, kv_heads: int) -> None:
    loads = [len(p.q_heads) for p in shares(world_size, group_size, kv_heads)]
    if world_size <= kv_heads:
        assert max(loads) == -(-kv_heads // world_size) * group_size
        assert max(loads) - min(loads) <= group_size
    else:
        ranks_of_a_group = world_size // kv_heads
        assert max(loads) == -(-group_size // ranks_of_a_group)


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [(1, [9]), (2, [6, 3]), (3, [3, 3, 3]), (4, [3, 3, 2, 1]), (9, [1] * 9), (10, [1] * 9 + [0])],
)
def test_smollm2(world_size: int, expected: list[int]) -> None:
    assert [len(p.q_heads) for p in shares(world_size, 3, 3)] == expected


def test_eight_groups_on_three_ranks() -> None:
    assert [list(p.kv_heads) for p in shares(3, 4, 8)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_replicated_kv_head() -> None:
    ranks = shares(4, 3, 3)
    assert [list(p.kv_heads) for p in ranks] == [[0], [1], [2], [2]]


def test_heads_that_form_no_groups_are_refused() -> None:
    with pytest.raises(ModelError, match="10 query heads"):
        make_partition(rank=0, world_size=2, num_q_heads=10, num_kv_heads=3, intermediate_size=8, vocab_size=8)
