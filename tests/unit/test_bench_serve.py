"""The HTTP load generator, against the frontend over its dummy engine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from support.fake_service import start_fake

from spmd_serve.bench import serve
from spmd_serve.bench.stats import Timings, percentiles_ms, quantile


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
    assert percentiles_ms("gap", []) == {"gap_p50_ms": None, "gap_p99_ms": None}  # one token has no gaps
    total = Timings(first=[1.0], failures=1, failure="a")
    total.add(Timings(first=[2.0], failure="b", output_tokens=3))
    assert (total.first, total.failures, total.failure, total.output_tokens) == ([1.0, 2.0], 1, "a", 3)


@pytest.mark.parametrize(
    ("ranks", "options", "says"),
    [
        (2, "--max-num-seqs 0", "--max-num-seqs is 0; it must be between 1 and 65536"),
        (1, "--model /no/such", "--model /no/such: there is no such folder"),
        (1, "--port {port}", "cannot listen on 127.0.0.1 port {port} (Address already in use)"),
    ],
)
def test_a_server_that_refuses_to_start_is_one_line(ranks: int, options: str, says: str) -> None:
    """A real one, under torchrun; nothing of torchrun's own is added."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "spmd_serve.bench", "serve", "--ranks", str(ranks)]
        command += ["--server-args", options.format(port=port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert says.format(port=port) in line


def test_a_server_that_ends_without_a_refusal(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, serve.started_server(None, 1, "--help"):
        pass
    assert ended.value.code == "spmd_serve.bench: error: the server ended with code 0; see its messages above"
    assert "usage:" in capfd.readouterr().err
