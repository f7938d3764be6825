"""slurm/serve.sbatch on a real SLURM cluster, with the bundled model."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from slurm_cluster import Cluster, Job, parent, processes
from support.ask import ask, create
from support.reference import Case, Reference
from support.server import wait_until

CASE = Case("The capital of France is")
SERVER = ("--dtype", "float32", "--num-pages", "256", "--threads", "1")  # each node takes the machine for its own
GONE_S = 10  # an orphan may live this long


@pytest.fixture(scope="module")
def text() -> str:
    """What the model says by itself."""
    return Reference().answers([CASE])[0].text


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> Iterator[Job]:
    """A job of two nodes with two ranks each, asked for in another number of tasks. Each test leaves it serving, but the last."""
    job = cluster.submit("--nodes=2", "--ntasks=8", "--gpus-per-node=2", server=SERVER)
    yield job
    job.cancel()
    job.wait_state("CANCELLED", "FAILED", seconds=30)


def client(box: dict[str, str]) -> openai.OpenAI:
    """By what the box says alone."""
    key = subprocess.run(box["API key"], shell=True, check=True, capture_output=True, text=True).stdout.strip()
    return openai.OpenAI(base_url=box["URL"], api_key=key, max_retries=0, timeout=60)


def answer(box: dict[str, str]) -> str:
    """The text for CASE."""
    with client(box) as own:
        return ask(own, CASE).text


def wait_text(box: dict[str, str], text: str, seconds: float) -> float:
    """Until the service answers (again); the answer must be right. Returns the seconds that it took."""

    def answers() -> bool:
        try:
            return answer(box) == text
        except (openai.APIConnectionError, openai.InternalServerError):  # not there, or 503: not ready
            return False

    return wait_until("the service answers", answers, seconds, 0.2)


@dataclass
class Stream:
    """One streamed answer, read by a thread of its own."""

    box: dict[str, str]
    tokens: int
    chunks: int = 0
    finish_reason: str | None = None
    error: Exception | None = None

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._read)
        thread.start()
        return thread

    def _read(self) -> None:
        try:
            case = Case("Once upon a time", self.tokens)
            with client(self.box) as own:
                for chunk in create(own, case, stream=True, extra_body={"ignore_eos": True}):
                    self.chunks += 1
                    self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        except openai.OpenAIError as error:
            self.error = error


def test_two_nodes_with_two_ranks_serve_what_the_box_says(job: Job, text: str) -> None:
    box = job.wait_ready()
    assert answer(box) == text
    curl = subprocess.run(box["try"], shell=True, capture_output=True, text=True, timeout=30)
    assert "Paris" in curl.stdout, curl.stderr

    assert len(job.processes()) == 4
    assert len(job.processes("torch.distributed.run")) == 2, "one torchrun a node, whatever --ntasks says"
    ready = [line for line in job.log.splitlines() if "spmd_serve: ready at" in line]
    assert ready[0].startswith("0: "), "rank 0 is on the first node"
    assert box["URL"].startswith("http://n1:")
    assert f"-L 8000:{box['URL'][len('http://') : -len('/v1')]} " in box["tunnel"]
    key_file = Path(box["API key"].split()[1])
    assert key_file.stat().st_mode & 0o077 == 0, "the key is for its owner alone"
    assert key_file.read_text().strip() not in job.log
    wrong = openai.OpenAI(base_url=box["URL"], api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        ask(wrong, CASE)


def test_a_killed_rank_is_replaced(job: Job, text: str, record_property: pytest.RecordProperty) -> None:
    box = job.wait_ready()
    before = job.processes()
    os.kill(next(iter(job.processes(RANK="3"))), signal.SIGKILL)
    wait_until("all ranks are new ones", lambda: not before.keys() & job.processes().keys(), 30)
    record_property("seconds_to_recover", wait_text(box, text, 60))
    assert job.field("Restarts") == "0", "torchrun did it, not SLURM"


def test_a_lost_node_requeues_the_job(cluster: Cluster, job: Job, text: str) -> None:
    box = job.wait_ready()
    lost = processes(SPMD_SERVE_TEST=str(cluster.folder), SLURM_JOB_ID=job.number, SLURM_NODEID="1")
    # As if the power went: the node's daemon first, then SLURM's keeper of the job there, then the job's processes.
    os.kill(cluster.pid_of("slurmd.n2"), signal.SIGKILL)
    keepers = {parent(pid) for pid in lost} - lost.keys()
    for pid in [*keepers, *lost]:
        os.kill(pid, signal.SIGKILL)
    job.wait_state("PENDING", seconds=60)
    cluster.start_node("n2")
    cluster.wait_idle()
    job.update(StartTime="now+5")  # SLURM would wait for two minutes; the node needs a moment to count as there
    again = job.wait_ready(times=2)
    assert again["URL"] == box["URL"]
    assert again["API key"] == box["API key"]
    assert answer(again) == text
    assert job.field("Restarts") == "1"


def test_a_killed_agent_leaves_no_orphan(job: Job) -> None:
    agent, _ = job.processes("torch.distributed.run")
    os.kill(agent, signal.SIGKILL)
    wait_until("no rank is left", lambda: not job.processes(), GONE_S)
    job.wait_state("FAILED", seconds=30)


def test_the_time_limit_drains_and_scancel_too(cluster: Cluster, text: str) -> None:
    job = cluster.submit("--nodes=2", server=SERVER, RESUBMIT="1")
    box = job.wait_ready()
    # With the two minutes that are left at most, SLURM's next look at its clock (every 30 s) finds less than 90 s + 30 s.
    job.update(TimeLimit="2")
    deadline = time.monotonic() + 60
    streams: list[Stream] = []
    while time.monotonic() < deadline and (not streams or streams[-1].error is None):
        streams.append(Stream(box, 8))
        streams[-1].start().join()
        time.sleep(1)  # the rest of the tests has use for the cores
    refused = streams.pop()
    assert isinstance(refused.error, (openai.InternalServerError, openai.APIConnectionError)), "503, or gone already"
    assert [s.finish_reason for s in streams] == ["length"] * len(streams), "what ran could finish"

    job.wait_state("PENDING", seconds=40)
    assert "before the time limit: requeueing" in job.log
    assert not job.processes()
    job.update(TimeLimit="60")
    job.update(StartTime="now+5")  # in the same second SLURM would still hold the old credential for revoked
    assert job.wait_ready(times=2)["URL"] == box["URL"], "the log is kept, and the address too"

    stream = Stream(box, 64)
    thread = stream.start()
    wait_until("the stream flows", lambda: stream.chunks > 3, 20)
    assert stream.finish_reason is None
    job.cancel()
    thread.join(30)
    assert (stream.finish_reason, stream.error) == ("length", None)
    job.wait_state("CANCELLED", seconds=30)
    wait_until("no rank is left", lambda: not job.processes(), GONE_S)
    assert job.log.count("all 1 ranks ended cleanly") >= 2
