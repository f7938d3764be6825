"""Who owns which heads, columns, vocabulary rows and experts: a pure function of the model's sizes and the world size.

No size has to be divisible by anything. All ranges are contiguous and count in the whole model's numbers. A rank may own
nothing of a part (an empty range) and still joins every collective.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from spmd_serve.errors import ModelError


@dataclass(frozen=True)
class Partition:
    """One rank's share.

    Every query head, FFN column, vocabulary row and expert is owned by exactly one rank. A KV head is held by exactly
    the ranks that own one of its query heads. `len(q_heads)` is a multiple of `len(kv_heads)`, and query head
    `q_heads[i]` attends to KV head `kv_heads[i // (len(q_heads) // len(kv_heads))]`.
    """

    rank: int
    q_heads: range
    kv_heads: range
    ffn: range
    vocab: range
    experts: range = range(0)


def split_evenly(total: int, parts: int) -> list[range]:
    """Cut 0..total-1 into `parts` contiguous ranges whose lengths differ by at most one, the longer ones first."""
    assert total >= 0 and parts >= 1
    short, longer = divmod(total, parts)
    cuts = [i * short + min(i, longer) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def make_partition(
    *,
    rank: int,
    world_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    num_experts: int = 0,
    ffn_unit: int = 1,
) -> Partition:
    """The share of `rank` among `world_size` ranks.

    Args:
        ffn_unit: FFN columns that stay together; the last ones may be fewer.

    Raises:
        ModelError: the query heads cannot be grouped over the KV heads.
    """
    assert 0 <= rank < world_size
    if num_kv_heads < 1 or num_q_heads % num_kv_heads != 0:
        raise ModelError(f"{num_q_heads} query heads do not form equal groups over {num_kv_heads} KV heads")
    q_heads, kv_heads = _deal_heads(rank, world_size, num_q_heads // num_kv_heads, num_kv_heads)
    units = split_evenly(-(-intermediate_size // ffn_unit), world_size)[rank]
    return Partition(
        rank=rank,
        q_heads=q_heads,
        kv_heads=kv_heads,
        ffn=range(min(units.start * ffn_unit, intermediate_size), min(units.stop * ffn_unit, intermediate_size)),
        vocab=split_evenly(vocab_size, world_size)[rank],
        experts=split_evenly(num_experts, world_size)[rank],
    )


def _deal_heads(rank: int, world_size: int, group_size: int, num_groups: int) -> tuple[range, range]:
    """Query and KV heads of a rank. A group is one KV head with its `group_size` query heads."""
    if world_size <= num_groups:
        groups = split_evenly(num_groups, world_size)[rank]
        return range(groups.start * group_size, groups.stop * group_size), groups
    # More ranks than groups: each group gets a run of ranks, the longer runs last. (The first ranks have the
    # longer vocabulary and FFN shares, and rank 0 also hosts the frontend.)
    runs = [range(world_size - r.stop, world_size - r.start) for r in reversed(split_evenly(world_size, num_groups))]
    group = next(g for g, run in enumerate(runs) if rank in run)
    own = split_evenly(group_size, len(runs[group]))[rank - runs[group].start]
    first = group * group_size
    return range(first + own.start, first + own.stop), range(group, group + (1 if own else 0))
