"""slurm/serve.sbatch on a real SLURM cluster, with the bundled model."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from box import CASE, GONE_S, SERVER, answer
from slurm_cluster import Cluster, Job, parent, processes
from support.ask import ask
from support.reference import Answers
from support.server import wait_until


@pytest.fixture(scope="module")
def text(answers: Answers) -> str:
    """What the model says by itself."""
    return answers[CASE].text


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> Iterator[Job]:
    """A job of two nodes with two ranks each, asked for in another number of tasks. Each test leaves it serving, but the last."""
    job = cluster.submit("--nodes=2", "--ntasks=8", "--gpus-per-node=2", server=SERVER)
    yield job
    job.cancel()
    job.wait_state("CANCELLED", "FAILED", seconds=30)


def wait_text(box: dict[str, str], text: str, seconds: float) -> float:
    """Until the service answers (again); the answer must be right. Returns the seconds that it took."""

    def answers() -> bool:
        try:
            return answer(box) == text
        except (openai.APIConnectionError, openai.InternalServerError):  # not there, or 503: not ready
            return False

    return wait_until("the service answers", answers, seconds, 0.2)


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
