"""The HTTP load generator, against the frontend over its dummy engine."""

from __future__ import annotations

import json

import pytest
from support.fake_service import start_fake

from spmd_serve.bench import serve
from spmd_serve.bench.stats import Timings, quantile


def test_dummy_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Exact counts, and a CPU cost that would show a return of per-token tasks (about 45 us on a slow core)."""
    options = "--dummy-engine --streams 32 --requests 64 --output-tokens 50,100 --prompt-tokens 8 --clients 2 --json"
    assert serve.main(options.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["failed"]) == (64, 0)
    assert report["prompt_tokens"] == 64 * 8
    assert 64 * 50 <= report["output_tokens"] <= 64 * 100
    assert 0 < report["cpu_us_per_token"] < 150
    assert report["ttft_p50_ms"] <= report["ttft_p99_ms"]


def test_failures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    service = start_fake(ready=False)
    try:
        options = f"--url {service.url} --streams 2 --warmup 0"
        assert serve.main(options.split()) == 1
    finally:
        service.close()
    assert "503" in capsys.readouterr().out


def test_figures() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0
    total = Timings(first=[1.0], failures=1, failure="a")
    total.add(Timings(first=[2.0], failure="b", output_tokens=3))
    assert (total.first, total.failures, total.failure, total.output_tokens) == ([1.0, 2.0], 1, "a", 3)
