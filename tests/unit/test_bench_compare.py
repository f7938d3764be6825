"""`bench compare` without models: this project's frontend over a dummy engine, and a stub in the peer's place."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
from support.fake_service import model_folder, start_fake
from tokenizers import Tokenizer

from spmd_serve.bench import compare
from spmd_serve.bench.stats import Timings

INTERVAL = 0.015  # between two tokens; shorter ones may be read as one where the machine is busy
OWN = {"ignore_eos": True, "stream_options": {"include_usage": True}}
# Streams like transformers serve: a chunk a token, usage in the last one, no "data: [DONE]".
PEER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = json.loads(body["generation_config"])["max_new_tokens"] - SHORT
        self.send_response(200)
        self.end_headers()
        for _ in range(tokens):
            self.wfile.write(b'data: {"choices":[{"text":"a"}]}\\n\\n')
            time.sleep(INTERVAL)
        usage = {"completion_tokens": tokens, "prompt_tokens": 8, "total_tokens": tokens + 8}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode() + b"\\n\\n")

    def log_message(self, *args):
        pass

assert sys.argv[1] == "serve" and "--continuous-batching" in sys.argv
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_folder() / "tokenizer.json"))


def parse(options: str) -> argparse.Namespace:
    return compare.make_parser().parse_args(options.split())


def peer_command(folder: Path, short: int = 0) -> str:
    command = folder / "transformers"
    command.write_text(f"#!{sys.executable}\nSHORT = {short}\nINTERVAL = {INTERVAL}\n{PEER}")
    command.chmod(0o755)
    return str(command)


def test_prompts_have_the_tokens_that_are_asked_for_and_share_no_prefix(tokenizer: Tokenizer) -> None:
    prompts = [*compare.make_prompts(tokenizer, 5, 40, seed=0), *compare.make_prompts(tokenizer, 5, 40, seed=1)]
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    assert {len(row) for row in ids} == {40}
    assert len({tuple(row[:4]) for row in ids}) == 10


def test_own_engine_is_measured(tokenizer: Tokenizer) -> None:
    service = start_fake(step_interval=INTERVAL)
    try:
        engine = compare.Engine("own", service.url, (), OWN, done_line=True)
        args = parse("--peer x --streams 3 --prompt-tokens 20 --output-tokens 20")
        figures = compare.measure_round(engine, tokenizer, args, seed=0)
        assert (
            0 < figures.concurrent < 3 * 20 / (15 * INTERVAL)
        )  # from the requests on; an engine may be a step or two early
        assert figures.single > 0
    finally:
        service.close()


def test_tokens_that_all_come_at_once_are_no_measurement(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = Timings(first=[0.1], between=[0.0] * 11, ended=[0.1], output_tokens=12)
    monkeypatch.setattr(compare, "run_clients", lambda *args, **options: timings)
    args = parse("--peer x --streams 1 --output-tokens 12")
    with pytest.raises(RuntimeError, match="own came at once"):
        compare.measure_round(compare.Engine("own", "", (), OWN, done_line=True), tokenizer, args, seed=0)


def test_peer_is_started_measured_paused_and_ended(tokenizer: Tokenizer, tmp_path: Path) -> None:
    command = peer_command(tmp_path)
    args = parse(f"--peer {command} --streams 3 --output-tokens 20 --threads 1")
    with compare.peer_engine(args, tmp_path, "float32") as engine:
        figures = compare.measure_round(engine, tokenizer, args, seed=0)
        assert 0 < figures.concurrent < 3 * 20 / (15 * INTERVAL)
        assert figures.single > 0
        engine.pause()
        (pid,) = engine.pids
        assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT) is not None  # waits until it stands still
        engine.resume()
        assert compare.measure_round(engine, tokenizer, args, seed=2).single > 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_too_few_tokens_are_no_measurement(tokenizer: Tokenizer, tmp_path: Path) -> None:
    command = peer_command(tmp_path, short=1)
    args = parse(f"--peer {command} --threads 1")
    with (
        compare.peer_engine(args, tmp_path, "float32") as engine,
        pytest.raises(RuntimeError, match="gave 63 tokens for 1 x 64"),
    ):
        compare.measure(engine, compare.make_prompts(tokenizer, 1, 8, 0), 64)


def test_a_peer_that_does_not_start_is_named(tmp_path: Path) -> None:
    args = parse("--peer /bin/false --threads 1")
    with pytest.raises(RuntimeError, match="/bin/false serve"), compare.peer_engine(args, tmp_path, "float32"):
        pass


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service = start_fake()
    try:
        assert compare._answers(f"{service.url}/health")
    finally:
        service.close()
