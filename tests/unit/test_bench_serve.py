"""The HTTP load generator, against the frontend over its dummy engine."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import pytest
from support.fake_service import start_fake
from support.processes import arguments_of, offspring
from support.server import wait_until

from spmd_serve.bench import serve
from spmd_serve.bench.stats import Timings, percentiles_ms, quantile
from spmd_serve.errors import ConfigError


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
    out = capsys.readouterr().out
    assert "503" in out and "request_p50_ms         None" in out  # a refusal's 1 ms is no request's


def test_a_server_that_goes_away_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(serve, "_check_reachable", lambda url: None)  # it was there then
    assert serve.main(f"--url {url} --streams 2 --requests 4 --warmup 0 --json".split()) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["failed"], report["request_p50_ms"]) == (0, 4, None)
    assert "refused" in report["failure"] or "onnect" in report["failure"]


def test_the_url_of_a_client_library(capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with /v1; behind a proxy there may be another path before."""
    service = start_fake()
    try:
        assert serve.main(f"--url {service.url}/v1/ --streams 2 --output-tokens 3 --json".split()) == 0
        assert json.loads(capsys.readouterr().out)["output_tokens"] == 6
        assert serve.main(f"--url {service.url}/proxied/v1 --streams 2 --warmup 0".split()) == 1
        assert "there is no /proxied/v1/completions here" in capsys.readouterr().out
    finally:
        service.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_server_behind(number: int) -> None:
    command = [sys.executable, "-m", "spmd_serve.bench", "serve", "--streams", "1", "--output-tokens", "4000"]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True)
    try:
        assert bench.stderr is not None
        while "ready at" not in (line := bench.stderr.readline()):
            assert line, "it did not come up"
        wait_until(
            "clients have come", lambda: any("bench.client" in args for args in offspring(bench.pid).values()), 60
        )
        all_of_it = offspring(bench.pid)
        assert len(all_of_it) >= 3  # torchrun, a rank, a client
        bench.send_signal(number)
        _, errors = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert bench.returncode == 128 + number
    assert "Traceback" not in errors
    left = [args for pid, args in all_of_it.items() if arguments_of(pid) == args]
    assert left == []


def test_options_with_spaces() -> None:
    assert serve.split_options("--server-args", "--model '/a b' --x") == ["--model", "/a b", "--x"]
    with pytest.raises(ConfigError, match="--server-args --model '/a cannot be read"):
        serve.split_options("--server-args", "--model '/a")


def test_figures() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([1.0, 9.0], 0.5) == 1.0
    hundred = [float(value) for value in range(1, 101)]
    assert [quantile(hundred, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
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
