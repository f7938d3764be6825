"""Figures of a load test."""

from __future__ import annotations

import math

import msgspec


class Timings(msgspec.Struct):
    """What client processes saw; times in seconds.

    Attributes:
        wall: from the first request to the last answer, over all processes.
        first: from sending a request to its first event.
        between: between the reads that brought events (several tokens may come in one).
        ended: from sending a request to its end, of those that did not fail.
        failure: the end of what a failed request got.
    """

    wall: float = 0.0
    first: list[float] = []
    between: list[float] = []
    ended: list[float] = []
    events: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    failures: int = 0
    failure: str = ""

    def add(self, other: Timings) -> None:
        """Join another process's figures to these."""
        self.first += other.first
        self.between += other.between
        self.ended += other.ended
        self.events += other.events
        self.output_tokens += other.output_tokens
        self.prompt_tokens += other.prompt_tokens
        self.failures += other.failures
        self.failure = self.failure or other.failure


def quantile(values: list[float], share: float) -> float:
    """The nearest-rank quantile of at least one value."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def percentiles_ms(name: str, seconds: list[float]) -> dict[str, float | None]:
    """NAME_p50_ms and NAME_p99_ms of a report, in milliseconds; None where nothing was measured."""
    shares = {f"{name}_p50_ms": 0.5, f"{name}_p99_ms": 0.99}
    return {key: round(1000 * quantile(seconds, share), 2) if seconds else None for key, share in shares.items()}
