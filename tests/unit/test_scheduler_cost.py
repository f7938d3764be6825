"""The scheduler's cost in Python, by its own benchmark. The bounds are three times the goal: the machine may be busy."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from spmd_serve.bench.scheduler import main, measure


def in_one_of_five(holds: Callable[[], bool]) -> bool:
    """A cost that grows is there every time; a machine that has something else to do is not."""
    return any(holds() for _ in range(5))


def test_256_sequences_and_flat_cost() -> None:
    """Goal: 300 us for schedule + commit of 256 sequences, the same for each of 16 to 1,024 (a fixed part aside)."""

    def holds() -> bool:
        few, many, most = (measure(n, 0, steps=60, digest="every-step", seed=0) for n in (64, 256, 1024))
        print(few, many, most, sep="\n")
        return many.total < 900 and most.per_sequence < 3 * few.per_sequence

    assert in_one_of_five(holds)


def test_cost_does_not_grow_with_the_cache() -> None:
    """Every page is evicted from the cache here, and each newcomer finds its prompt in it."""

    def holds() -> bool:
        small, large = (measure(32, pages, steps=40, digest="off", seed=0) for pages in (500, 20_000))
        print(small, large, sep="\n")
        assert large.cached_pages > 20 * small.cached_pages
        assert small.newcomer is not None and large.newcomer is not None
        return large.total < 3 * small.total and large.newcomer < 3 * small.newcomer

    assert in_one_of_five(holds)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    """What was not measured is no number: NaN is none in JSON."""
    assert main(["--sequences", "4", "--cached-pages", "200", "--steps", "2", "--json"]) == 0
    out = capsys.readouterr().out
    assert "NaN" not in out
    without, with_cache = json.loads(out)
    assert (without["sequences"], with_cache["sequences"]) == (4, 64)
    assert without["newcomer"] is None
    assert isinstance(with_cache["newcomer"], float)
    assert main(["--sequences", "4", "--cached-pages", "--steps", "8"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert (row[0], row[1], row[-1]) == ("4", "0", "-")
