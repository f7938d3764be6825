"""What slurm/serve.sbatch makes of a job's shape, with a stand-in for torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slurm_cluster import Cluster, Job, processes, run
from support.server import wait_until

STAND_IN = str(Path(__file__).with_name("stand_in.py"))


def started(job: Job) -> list[tuple[str, str, str]]:
    """(node number, ranks, GPUs) of each torchrun."""
    return sorted(re.findall(r"^(\d): started .* --nproc-per-node=(\d+) .* on GPUs (\S+)$", job.log, re.MULTILINE))


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        (("--nodes=2", "--gpus-per-node=2"), {}, [("0", "2", "0,1"), ("1", "2", "0,1")]),
        (("--nodes=2", "--gpus-per-task=1", "--ntasks-per-node=2"), {}, [("0", "2", "0,1"), ("1", "2", "0,1")]),
        (("--nodes=1", "--gres=gpu:1", "--ntasks=3"), {}, [("0", "1", "0")]),
        (("--nodes=2", "--cpus-per-task=2"), {"NPROC": "3"}, [("0", "3", "none"), ("1", "3", "none")]),
    ],
    ids=["gpus-per-node", "gpus-per-task", "gres", "cpus"],
)
def test_one_torchrun_a_node_with_all_of_its_gpus(
    cluster: Cluster, options: tuple[str, ...], environ: dict[str, str], expected: list[tuple[str, str, str]]
) -> None:
    job = cluster.submit(*options, PYTHON=STAND_IN, **environ)
    box = job.wait_ready()
    assert started(job) == expected
    job.cancel()
    job.wait_state("CANCELLED", seconds=30)
    assert f"scancel {job.number}" in box["stop"]


def test_options_reach_the_server_and_the_box(cluster: Cluster) -> None:
    job = cluster.submit(
        "--nodes=1", server=("--model", "/a b", "--port", "23456"), PYTHON=STAND_IN, SPMD_SERVE_API_KEY="k"
    )
    box = job.wait_ready()
    job.cancel()
    job.wait_state("CANCELLED", seconds=30)
    assert "--model /a b" in job.log
    assert box["URL"] == "http://n1:23456/v1"
    assert "$SPMD_SERVE_API_KEY" in box["try"]
    assert " k " not in job.log


@pytest.mark.parametrize(
    ("server", "key"),
    [(("--api-key", "k"), "--api-key when the job was submitted"), (("--no-api-key",), "none is needed")],
)
def test_a_key_among_the_servers_options_counts(cluster: Cluster, server: tuple[str, ...], key: str) -> None:
    job = cluster.submit("--nodes=1", server=server, PYTHON=STAND_IN, START_TIMEOUT="10")
    box = job.wait_ready()
    job.cancel()
    job.wait_state("CANCELLED", seconds=30)
    assert "is ready: stand-in on" in job.log
    assert box["API key"].endswith(key)


def test_what_sbatch_exports_is_for_the_script_alone(cluster: Cluster) -> None:
    given = f"--export=PYTHON={STAND_IN},NPROC=2,SPMD_SERVE_TEST={cluster.folder}"
    job = cluster.submit("--nodes=2", given, server=("--model", "m"))
    job.wait_ready()
    job.cancel()
    job.wait_state("CANCELLED", seconds=30)
    assert started(job) == [("0", "2", "none"), ("1", "2", "none")]


def test_a_signal_for_the_script_alone_reaches_the_ranks(cluster: Cluster) -> None:
    """As --signal=B:TERM@90 and scancel --batch send it."""
    job = cluster.submit("--nodes=1", PYTHON=STAND_IN)
    job.wait_ready()
    run("scancel", "--batch", "--signal=TERM", job.number, env=cluster.env)
    job.wait_state("COMPLETED", seconds=20)
    assert "signalled; the ranks drain" in job.log


def test_a_task_of_an_array_does_not_speak_for_the_others(cluster: Cluster) -> None:
    """The last one to start has the array's own number."""
    whole = cluster.submit("--nodes=1", "--array=0-1", PYTHON=STAND_IN)
    box = whole.wait_ready()
    whole.cancel()
    whole.wait_state("CANCELLED", seconds=30)
    assert box["stop"] == f"scancel {whole.number}_1"
    assert box["log"].startswith(f"{whole.log_file} (")


def test_a_server_that_does_not_get_ready_fails_the_job(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", PYTHON=STAND_IN, STAND_IN="deaf", START_TIMEOUT="1")
    job.wait_state("FAILED", seconds=30)
    assert "was not ready within 1 s; last: <urlopen error [Errno 111] Connection refused>" in job.log


def test_a_job_that_ends_before_it_is_ready_leaves_nothing_behind(cluster: Cluster) -> None:
    """Where SLURM tracks processes by their parents alone, whoever still polls would go on for START_TIMEOUT."""
    job = cluster.submit("--nodes=1", server=("--model", "/no/such/model"))
    job.wait_state("FAILED", seconds=60)
    assert job.field("ExitCode") == "2:0"
    assert job.log.count("spmd_serve: error: --model /no/such/model") == 1, "a refusal is not started again"
    assert "was not ready" not in job.log
    own = {"SPMD_SERVE_TEST": str(cluster.folder), "SLURM_JOB_ID": job.number}
    wait_until("no process is left", lambda: not processes(**own), 10)
