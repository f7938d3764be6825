"""The sampler over vocabulary shards: the same tokens as over the whole, and drawn from the right distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.thread_ranks import on_ranks
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.partition import split_evenly
from spmd_serve.engine.sampler import Sampler
from spmd_serve.kernels.filters import Filters, lowest_kept, lowest_kept_torch
from spmd_serve.kernels.gumbel import gumbel_noise, row_key, uniforms
from spmd_serve.types import SamplingParams

NEG_INF = float("-inf")
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def draw_on(
    comm: Communicator, shard: range, logits: Tensor, params: list[SamplingParams], positions: Tensor
) -> Tensor:
    """What the runner does with the logits of one step: filter, then draw. `logits`: of the whole vocabulary."""
    sampler = Sampler(comm, shard, logits.shape[1])
    own = logits[:, shard.start : shard.stop].clone()
    filters, slots = tables(params), torch.arange(len(params))
    sampler.filter_(own, filters, slots)
    seeds = torch.tensor([p.seed for p in params])
    return sampler.sample(own, filters.temperature, seeds, positions, slots)


def tables(params: list[SamplingParams]) -> Filters:
    return Filters(
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
    )


def draw(
    world_size: int,
    logits: Tensor,
    params: list[SamplingParams],
    positions: Tensor | None = None,
    shards: list[range] | None = None,
) -> list[int]:
    """The drawn tokens, which must be the same on all ranks. Shards are even unless given."""
    shards = shards or split_evenly(logits.shape[1], world_size)
    where = positions if positions is not None else torch.arange(len(params)) + 100
    results = on_ranks(world_size, lambda comm: draw_on(comm, shards[comm.rank], logits, params, where))
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0].tolist()  # type: ignore[no-any-return]


def expected(logits: Tensor, params: SamplingParams, position: int) -> tuple[int, list[int]]:
    """The token and the tokens that could be drawn, by the definition and in float64, over the whole row."""
    if params.temperature == 0:
        best = int(logits.double().argmax())
        return best, [best]
    scaled = logits.double() / params.temperature
    order = scaled.argsort(descending=True, stable=True)[: params.top_k or None]
    probabilities = scaled[order].softmax(0)
    better = probabilities.cumsum(0) - probabilities
    keep = (better < params.top_p) & (probabilities >= params.min_p * probabilities[0])
    keep[0] = True
    kept = order[keep]
    noise = torch.from_numpy(gumbel_noise(uniforms(row_key(params.seed, position), 0, len(scaled))))
    return int(kept[(scaled + noise)[kept].argmax()]), kept.tolist()


PARAMS = {
    "greedy": SamplingParams(8, temperature=0.0),
    "temperature": SamplingParams(8, temperature=0.7),
    "hot": SamplingParams(8, temperature=5.0),
    "top_k": SamplingParams(8, top_k=5),
    "top_k_1": SamplingParams(8, temperature=2.0, top_k=1),
    "top_k_of_all": SamplingParams(8, temperature=1.5, top_k=10**6, top_p=0.9),
    "top_p": SamplingParams(8, top_p=0.8),
    "top_p_tiny": SamplingParams(8, temperature=3.0, top_p=1e-6),
    "min_p": SamplingParams(8, temperature=1.5, min_p=0.2),
    "min_p_1": SamplingParams(8, temperature=2.0, min_p=1.0),
    "all": SamplingParams(8, temperature=1.2, top_k=40, top_p=0.7, min_p=0.01),
}


@WORLDS
def test_a_mixed_batch_on_any_number_of_ranks(world_size: int) -> None:
    """Rows with different params share a step, as in the server; each is drawn as by itself, as the definition says."""
    generator = torch.Generator().manual_seed(11)
    rounds = 5
    params = [replace(p, seed=1000 * i + n) for n in range(rounds) for i, p in enumerate(PARAMS.values())]
    logits = torch.randn(len(params), 3001, generator=generator) * 3
    drawn = draw(world_size, logits, params)
    wanted = [expected(logits[i], p, 100 + i)[0] for i, p in enumerate(params)]
    assert drawn == wanted


@WORLDS
def test_gathered_logits_have_the_thresholds_of_the_whole(world_size: int) -> None:
    """A GPU's way, by the kernel's reference."""
    logits = torch.randn(len(PARAMS), 3001, generator=torch.Generator().manual_seed(15)) * 3
    shards, filters, slots = split_evenly(3001, world_size), tables(list(PARAMS.values())), torch.arange(len(PARAMS))

    def on_rank(comm: Communicator) -> Tensor:
        shard = shards[comm.rank]
        return lowest_kept(Sampler(comm, shard, 3001)._gather(logits[:, shard.start : shard.stop]), filters, slots)

    wanted = lowest_kept_torch(logits[None], filters, slots)
    assert (wanted > NEG_INF).tolist() == [params.is_filtered for params in PARAMS.values()]
    assert all(torch.equal(lowest, wanted) for lowest in on_ranks(world_size, on_rank))


@WORLDS
@pytest.mark.parametrize("top_p", [0.5, 0.999])
def test_a_flat_distribution_needs_more_than_the_best_candidates(world_size: int, top_p: float) -> None:
    """The nucleus of nearly flat logits holds thousands of tokens, all on their ranks; a peaked row shares the step."""
    generator = torch.Generator().manual_seed(12)
    logits = torch.rand(8, 9000, generator=generator) * 0.01
    logits[3, 77] = 50.0
    params = [SamplingParams(8, top_p=top_p, seed=seed) for seed in range(8)]
    drawn = draw(world_size, logits, params)
    assert drawn == [expected(logits[i], p, 100 + i)[0] for i, p in enumerate(params)]
    sampler = Sampler(Communicator(), range(9000), 9000)
    sampler.filter_(logits, tables(params), torch.arange(8))
    kept = (logits > NEG_INF).sum(dim=1)
    assert kept[3] == 1
    assert (kept[[0, 1, 2, 4]] - top_p * 9000).abs().max() < 60


def kept_of(comm: Communicator, logits: Tensor, params: SamplingParams) -> int:
    """How many tokens of one row, [vocabulary], may be drawn."""
    shard = split_evenly(len(logits), comm.world_size)[comm.rank]
    own = logits[None, shard.start : shard.stop].clone()
    Sampler(comm, shard, len(logits)).filter_(own, tables([params]), torch.arange(1))
    return int(comm.all_reduce((own > NEG_INF).sum()))


@WORLDS
def test_top_k_alone_keeps_what_is_hardly_likely(world_size: int) -> None:
    """All that comes after the best is less than rounding beside it, and top-p is off."""
    logits = torch.linspace(10, 0, 200)
    logits[150] = 50.0
    assert on_ranks(world_size, lambda comm: kept_of(comm, logits, SamplingParams(8, top_k=20))) == [20] * world_size


@WORLDS
def test_a_nucleus_is_exact_at_low_temperatures(world_size: int) -> None:
    """logits / temperature are around 15,000, where float32 has steps of a thousandth; here they are exact."""
    logits, temperature = torch.full((200,), -50.0), 2.0**-9
    logits[[20, 170]] = torch.tensor([30.0, 30.0 - 434 * 2.0**-18])
    share = float((logits.double() / temperature).softmax(0)[20])
    for top_p, kept in ((share - 1e-5, 1), (share + 1e-5, 2)):
        params = SamplingParams(8, temperature=temperature, top_p=top_p)
        assert on_ranks(world_size, lambda comm, params=params: kept_of(comm, logits, params)) == [kept] * world_size


@pytest.mark.parametrize("skewed", [[range(3000), range(3000, 3001)], [range(0), range(3001), range(3001, 3001)]])
def test_lopsided_and_empty_shards(skewed: list[range]) -> None:
    """All that is likely lies on one rank, or a rank has no vocabulary at all."""
    logits = torch.linspace(8, 0, 3001).repeat(len(PARAMS), 1)
    params = [replace(p, seed=i) for i, p in enumerate(PARAMS.values())]
    assert draw(len(skewed), logits, params, shards=skewed) == draw(1, logits, params)


@WORLDS
def test_ties_go_to_the_lowest_index(world_size: int) -> None:
    greedy = SamplingParams(1, temperature=0.0)
    logits = torch.zeros(4, 100)
    logits[1, [99, 30, 60]] = 1.0  # one on each of three ranks
    logits[2, [77, 76]] = 1.0
    logits[3] = NEG_INF
    logits[3, [98, 97]] = -50.0
    assert draw(world_size, logits, [greedy] * 4) == [0, 30, 76, 97]


@WORLDS
def test_ties_with_the_last_one_kept_are_kept(world_size: int) -> None:
    """Wherever they lie; else what can be drawn would depend on the split."""
    logits = torch.full((1, 100), -1.0)
    logits[0, [3, 40, 70, 95]] = 2.0
    for params in (SamplingParams(1, top_k=2), SamplingParams(1, top_p=0.3), SamplingParams(1, min_p=1.0)):
        seen = {draw(world_size, logits, [replace(params, seed=seed)])[0] for seed in range(30)}
        assert seen == {3, 40, 70, 95}


def test_a_row_is_drawn_alike_in_any_company() -> None:
    """The row's place, its neighbours and their params do not matter; its seed and position do."""
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(30, 500, generator=generator)
    logits[0] = 0.0
    own = SamplingParams(8, temperature=1.0, seed=99)
    alone = draw(2, logits[:1], [own], torch.tensor([7]))
    others = [replace(list(PARAMS.values())[i % len(PARAMS)], seed=i) for i in range(29)]
    for place in (0, 13, 29):
        rows = [*range(1, place + 1), 0, *range(place + 1, 30)]
        params = [*others[:place], own, *others[place:]]
        assert draw(2, logits[rows], params, torch.full((30,), 7))[place] == alone[0]
    assert len({draw(2, logits[:1], [own], torch.tensor([p]))[0] for p in range(20)}) > 15
    assert len({draw(2, logits[:1], [replace(own, seed=s)], torch.tensor([7]))[0] for s in range(20)}) > 15


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "all"])
def test_draws_follow_the_distribution(name: str) -> None:
    """Chi-square over 4,000 draws of 40 tokens on 2 ranks; seeds are fixed, so it passes always or never."""
    draws, vocab = 4_000, 40
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(14)) * 1.5
    params = PARAMS[name]
    _, kept = expected(row, params, 0)
    assert len(kept) > 2 and (name in ("temperature", "all") or len(kept) < vocab)
    probabilities = (row[kept].double() / params.temperature).softmax(0)
    batch = [replace(params, seed=seed) for seed in range(draws // 4)]
    counts = torch.zeros(vocab)
    for position in range(4):
        tokens = draw(2, row.repeat(len(batch), 1), batch, torch.full((len(batch),), position))
        counts += torch.bincount(torch.tensor(tokens), minlength=vocab)
    assert counts.sum() == counts[kept].sum() == draws
    wanted = probabilities * draws
    common = wanted >= 5  # the usual rule; the rest counts as one cell
    observed = torch.cat([counts[kept][common], counts[kept][~common].sum()[None]]).double()
    wanted = torch.cat([wanted[common], wanted[~common].sum()[None]])
    cells = wanted > 0
    statistic = float(((observed - wanted)[cells] ** 2 / wanted[cells]).sum())
    freedom = int(cells.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # mean plus 4 standard deviations
