"""The Gumbel-max sampler: exact integers, right distribution, independent of rows and shards."""

import itertools
import math

import numpy as np
import pytest
import torch

from spmd_serve.kernels.gumbel import _splitmix64, gumbel_argmax, gumbel_noise, row_key, uniforms
from spmd_serve.types import NOT_A_TOKEN

M32 = (1 << 32) - 1


def uniform_by_definition(key: int, v: int) -> float:
    x = (v * 0x9E3779B1 + key) & M32
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & M32
    x = ((x ^ (x >> 15) ^ (key >> 32)) * 0xD35A2D97) & M32
    x ^= x >> 15
    return ((x >> 1) + 0.5) / 2**31


def int64s(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_splitmix64_is_the_published_one() -> None:
    # the first outputs of the reference generator with state 1234567
    assert _splitmix64(1234567) == 6457827717110365317
    assert _splitmix64((1234567 + 0x9E3779B97F4A7C15) % 2**64) == 3203168211198807973


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 7, 131071])
def test_the_uniforms_are_the_documented_function(seed: int, position: int) -> None:
    key = row_key(seed, position)
    for start in (0, 1000, 151_900):
        expected = [uniform_by_definition(key, v) for v in range(start, start + 20)]
        assert uniforms(key, start, 20) == pytest.approx(expected, rel=2e-7)


def test_noise_is_standard_gumbel() -> None:
    rows = np.stack([gumbel_noise(uniforms(row_key(s, p), 0, 100_000)) for s in range(4) for p in (0, 1)])
    noise = torch.from_numpy(rows).double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.006  # Euler's constant
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    assert abs(torch.corrcoef(noise).fill_diagonal_(0)).max() < 0.016  # 5 standard errors, as the next
    neighbours = torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()])
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 0.006


def test_the_shortcut_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    for spread in (0.01, 1.0, 30.0):
        logits = torch.randn(64, 40_000, generator=generator) * spread
        seeds = torch.arange(64)
        values, index = gumbel_argmax(logits, torch.ones(64), seeds, seeds)
        for row in range(64):
            score = logits[row].numpy() + gumbel_noise(uniforms(row_key(row, row), 0, 40_000))
            assert index[row] == int(score.argmax())
            assert values[row] == float(score.max())


@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_draws_follow_the_softmax(vary: str) -> None:
    draws, temperature = 20_000, 0.7
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 1.5, 0.3])
    expected = torch.softmax(logits.double() / temperature, -1) * draws
    counter = torch.arange(draws)
    fixed = torch.full((draws,), 12345)
    seeds, positions = (counter, fixed) if vary == "seeds" else (fixed, counter)
    _, index = gumbel_argmax(logits.expand(draws, -1), torch.full((draws,), temperature), seeds, positions)
    counts = torch.bincount(index, minlength=7).double()
    assert counts[4] == 0
    alive = expected > 0
    chi2 = ((counts - expected)[alive] ** 2 / expected[alive]).sum().item()
    assert chi2 < 25.0  # 5 degrees of freedom: p = 1.4e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_first_maximum_and_no_noise(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, [40, 700]] = 9.0
    temperature = torch.tensor([0.0, 0.0, 1.0, 0.0])
    values, index = gumbel_argmax(logits, temperature, torch.arange(4), torch.arange(4))
    for row in (0, 1, 3):
        assert values[row] == logits[row].max().float()
    assert index[1] == 40
    assert values[2] != logits[2, index[2]].float()


def test_a_row_does_not_depend_on_the_batch_and_shards_agree() -> None:
    vocab = 150_001  # several blocks
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)).bfloat16()
    temperature = torch.tensor([0.8, 0.0, 1.3, 0.2, 1.0])
    seeds, positions = int64s(3, 4, 5, 2**62, 7), int64s(9, 8, 700, 6, 5)
    values, index = gumbel_argmax(logits, temperature, seeds, positions)
    for row in range(5):
        pick = slice(row, row + 1)
        alone = gumbel_argmax(logits[pick], temperature[pick], seeds[pick], positions[pick])
        assert (alone[0].item(), alone[1].item()) == (values[row].item(), index[row].item())
    bounds = [0, 50_000, 50_000, 99_999, vocab]  # one shard is empty
    shards = [gumbel_argmax(logits[:, a:b], temperature, seeds, positions, a) for a, b in itertools.pairwise(bounds)]
    all_values, all_index = torch.stack([s[0] for s in shards]), torch.stack([s[1] for s in shards])
    winner = all_values.argmax(0)
    assert torch.equal(all_values.gather(0, winner[None])[0], values)
    assert torch.equal(all_index.gather(0, winner[None])[0], index)


def test_logits_that_are_no_numbers() -> None:
    """NaN or +inf anywhere, with and without noise: no token, on whichever shard; the rows beside it have theirs."""
    vocab = 70_000
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    temperature, seeds = torch.tensor([0.0, 1.0] * 3), torch.arange(6)
    whole = gumbel_argmax(logits, temperature, seeds, seeds)
    logits[2, 69_000] = logits[3, 100] = torch.nan
    logits[4, 5] = logits[5, 40_000] = torch.inf
    logits[:2, 3] = -torch.inf
    bounds = [0, 30_000, 30_000, vocab]
    shards = [gumbel_argmax(logits[:, a:b], temperature, seeds, seeds, a) for a, b in itertools.pairwise(bounds)]
    values, index = (torch.stack(part) for part in zip(*shards, strict=True))
    drawn = index.gather(0, values.argmax(0)[None])[0]
    assert drawn.tolist() == [*whole[1][:2].tolist(), *[NOT_A_TOKEN] * 4]
