"""What keeps a job from starting: one clear line, a non-zero exit, nobody left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, write_tokenizer
from support.ports import free_port
from torchrun_job import Job

from spmd_serve.__main__ import _Over, _rank0_options, _rank0_say_ready, default_name
from spmd_serve.config import Config, ServerOptions
from spmd_serve.errors import ConfigError

StartJob = Callable[..., Job]
TWO = [{}, {}]


def error_lines(job: Job) -> list[str]:
    return [line for line in job.log.splitlines() if line.startswith("spmd_serve: error:") or " ERROR rank " in line]


def test_a_wrong_option_is_one_line_of_a_torchrun_job(start_job: StartJob) -> None:
    job = start_job("--max-num-seqs", "0")
    assert job.await_end(60) != 0
    assert error_lines(job) == ["spmd_serve: error: --max-num-seqs is 0; it must be between 1 and 65536"]
    assert job.log.count("Traceback (most") == 1  # torchrun's own
    assert job.log.count("exitcode  : 2") >= 1
    last = [line for line in job.log.splitlines() if not line.startswith("===")][-1]
    assert "--max-num-seqs is 0" in last, "torchrun's long traceback ends with the reason"


def test_an_address_file_in_no_folder_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = _rank0_options(["--port", "0", "--address-file", str(tmp_path / "none" / "address")])
    assert isinstance(over, _Over) and over.exit_code == 2
    assert capsys.readouterr().err == f"spmd_serve: error: --address-file: there is no folder {tmp_path / 'none'}\n"
    over = _rank0_options(["--port", "0", "--address-file", str(tmp_path)])
    assert isinstance(over, _Over) and over.exit_code == 2
    assert f"{tmp_path} cannot be written" in capsys.readouterr().err


def test_an_address_file_that_cannot_be_written_when_it_is_time(tmp_path: Path) -> None:
    """A disk that has filled up during the start, say."""
    (tmp_path / "address.part").mkdir()
    config = Config(server=ServerOptions(address_file=str(tmp_path / "address")))
    with pytest.raises(ConfigError, match=f"--address-file: {tmp_path}/address cannot be written"):
        _rank0_say_ready("http://x", "model", config, 1.0)


@pytest.mark.parametrize(
    ("key", "says"), [("", "is empty"), (" secret", "begins or ends"), ("secret\n", "begins or ends")]
)
def test_a_key_that_guards_nothing_or_fits_nobody(key: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one, as of a variable that is not set, would let in all who send none."""
    over = _rank0_options(["--port", "0", "--host", "0.0.0.0", "--api-key", key])
    assert isinstance(over, _Over) and over.exit_code == 2
    assert re.search(f"--api-key.* {says}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("model", "name"), [(".", "folder"), ("../folder/", "folder"), ("Qwen/Qwen3-8B", "Qwen3-8B"), ("x.gguf", "x.gguf")]
)
def test_the_name_of_a_model(model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    assert default_name(model) == name


def test_help_is_printed_once(start_job: StartJob) -> None:
    job = start_job("--help", bare=TWO)
    assert job.await_end(60) == 0
    assert job.log.count("usage:") == 1
    assert job.processes[1].returncode == 0


def test_a_port_in_use(start_job: StartJob) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        job = start_job(bare=TWO, port=taken.getsockname()[1])
        assert job.await_end(60) == 2
    (line,) = error_lines(job)
    assert f"port {job.port}" in line and "--port" in line
    assert "Traceback" not in job.log


def test_a_model_that_one_host_lacks(start_job: StartJob, tmp_path: Path) -> None:
    from spmd_serve.config import ModelOptions
    from spmd_serve.distributed.ranks import RankInfo
    from spmd_serve.models.resolve import resolve_model

    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    shutil.copytree(
        resolve_model(ModelOptions(), RankInfo()), here / "model", copy_function=lambda a, b: Path(b).symlink_to(a)
    )
    job = start_job("--model", "model", bare=[{"CWD": str(here)}, {"CWD": str(there)}])
    assert job.await_end(60) == 2
    (line,) = error_lines(job)
    assert f"rank 1 ({socket.gethostname()})" in line and "--model" in line
    assert "Traceback" not in job.log


def test_hosts_with_other_weights_of_one_model(start_job: StartJob, tmp_path: Path) -> None:
    """Two fine-tunes have the same configuration, names and shapes: together they would answer nonsense."""
    here, there = tmp_path / "here" / "model", tmp_path / "there" / "model"
    make_checkpoint(here, "llama")
    write_tokenizer(here)
    shutil.copytree(here, there)
    (weights,) = there.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    job = start_job("--model", "model", bare=[{"CWD": str(here.parent)}, {"CWD": str(there.parent)}])
    assert job.await_end(60) == 2
    (line,) = error_lines(job)
    assert f"rank 1 ({socket.gethostname()}) does not run the same as rank 0: {weights.name} is" in line
    assert "Traceback" not in job.log


def test_a_rank_that_cannot_load_is_the_last_word_of_those_that_still_do(start_job: StartJob) -> None:
    """torchrun then ends them by SIGTERM, which is no stop that somebody asked for."""
    job = start_job(env={"FAULT": "badload"})
    assert job.await_end(60) != 0
    (line,) = error_lines(job)
    assert line.endswith(f"rank 1 ({socket.gethostname()}): injected into the loading")
    assert "stopped while starting" not in job.log
    assert job.log.count("exitcode  : 2") == 2


def test_ranks_with_other_software(start_job: StartJob) -> None:
    job = start_job(bare=TWO, env={"FAULT": "software"})
    assert job.await_end(60) == 2
    (line,) = error_lines(job)
    assert f"rank 1 ({socket.gethostname()}) does not run the same as rank 0: torch version is 1.0 there" in line
    assert "Traceback" not in job.log


def test_world_sizes_that_differ(start_job: StartJob) -> None:
    job = start_job(bare=[{}, {"WORLD_SIZE": "3"}])
    assert job.await_end(60) == 1
    (line,) = error_lines(job)
    assert "was started with a world size of 3" in line
    assert "Traceback" not in job.log


def test_a_head_node_that_cannot_be_reached(start_job: StartJob) -> None:
    job = start_job(bare=[{}, {"MASTER_ADDR": "no-such-host.invalid"}], env={"CONNECT_S": "4"})
    assert job.await_end(60) == 1
    (one, other) = sorted(error_lines(job))
    assert "rank 1 of 2 did not come within 4 s" in one
    assert "rank 1 on host" in other and "cannot reach the job's store at no-such-host.invalid" in other
    assert "Traceback" not in job.log


def test_two_servers_on_one_host_whose_name_does_not_resolve(start_job: StartJob) -> None:
    prefix = ["unshare", "-u", "sh", "-c", 'hostname no-such-host; exec "$@"', "sh"] if os.geteuid() == 0 else []
    jobs = [start_job(), start_job(prefix=prefix)]
    for job in jobs:
        job.await_ready()
    assert [job.complete().status_code for job in jobs] == [200, 200]


def test_what_another_host_is_given_and_has_no_effect_is_one_warning(start_job: StartJob) -> None:
    head, port = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"), free_port()
    shared = {"port": port, "env": {"GLOO_SOCKET_IFNAME": "lo"}}
    first = start_job("--max-num-seqs", "8", ranks=2, torchrun=(*head, "--node-rank=0"), **shared)
    other = start_job("--max-num-seqs", "9", "--nope", ranks=2, torchrun=(*head, "--node-rank=1"), **shared)
    first.await_ready()
    first.signal_rank(0, signal.SIGTERM)
    for job in (first, other):
        job.await_end(30)
    (line,) = [line for job in (first, other) for line in job.log.splitlines() if " WARNING " in line]
    host = socket.gethostname()
    assert (
        f"WARNING rank 2 __main__: rank 0's options count, those of host {host} are ignored: --max-num-seqs, --nope"
        in line
    )
    assert line in other.log


def test_the_command_of_the_ready_line_is_what_a_shell_takes(capsys: pytest.CaptureFixture[str]) -> None:
    _rank0_say_ready("http://127.0.0.1:1", "it's", Config(), 1.0)
    words = shlex.split(capsys.readouterr().out.partition("try: ")[2])
    assert json.loads(words[-1])["model"] == "it's"
