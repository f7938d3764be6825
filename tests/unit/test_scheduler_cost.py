"""The scheduler's cost in Python, by its own benchmark. The bounds are three times the goal: the machine may be busy."""

from __future__ import annotations

import json

import pytest

from spmd_serve.bench.scheduler import main, measure


def test_256_sequences_and_flat_cost() -> None:
    """Goal: 300 us for schedule + commit of 256 sequences, the same for each of 16 to 1,024 (a fixed part aside)."""
    few, many, most = (measure(n, 0, steps=60, digest="every-step", seed=0) for n in (64, 256, 1024))
    assert many.total < 900
    assert most.per_sequence < 3 * few.per_sequence


def test_cost_does_not_grow_with_the_cache() -> None:
    """Every page is evicted from the cache here, and each newcomer finds its prompt in it."""
    small, large = (measure(32, pages, steps=40, digest="off", seed=0) for pages in (500, 20_000))
    assert large.cached_pages > 20 * small.cached_pages
    assert large.total < 3 * small.total
    assert large.newcomer < 3 * small.newcomer


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sequences", "4", "--cached-pages", "200", "--steps", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["sequences"] for row in rows] == [4, 64]
    assert main(["--sequences", "4", "--cached-pages", "--steps", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].split()[0] == "4"
