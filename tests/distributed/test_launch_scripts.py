"""launch/serve.sh and launch/multinode.sh with the real server: what they return, and that two hosts find each other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ports import free_port
from support.server import STOP_S, wait_until
from support.two_hosts import HOSTS, TwoHosts, why_not
from torchrun_job import READY_S, Stream

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SERVER = ("--num-pages", "256", "--threads", "1")  # each host takes the machine for its own


@contextlib.contextmanager
def script(log_file: Path, *command: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launch script in a session of its own; nothing of it is left afterwards."""
    env = {**os.environ, "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environ}
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()  # torchrun gets SIGTERM then, from the kernel
        process.wait()
        print(log_file.read_text())


def await_ready(log_file: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until("ready", lambda: "ready at" in log_file.read_text() or process.poll() is not None, READY_S, 0.1)
    assert process.poll() is None, log_file.read_text()


def test_serve_sh_returns_0_when_torchrun_itself_was_signalled(tmp_path: Path) -> None:
    log_file, port = tmp_path / "log", free_port()
    with script(log_file, str(LAUNCH / "serve.sh"), "--port", str(port), *SERVER, NPROC="2") as process:
        await_ready(log_file, process)
        stream = Stream(f"http://127.0.0.1:{port}", {"max_tokens": 60}).await_chunks()
        began = time.monotonic()
        (torchrun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(torchrun), signal.SIGTERM)
        assert stream.await_end(STOP_S) == "length"
        assert process.wait(STOP_S) == 0
        print(f"SIGTERM to torchrun, bundled model, streams running: {time.monotonic() - began:.2f}")
    assert "all 2 ranks ended cleanly" in log_file.read_text()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_serve_sh_where_the_name_of_the_host_is_unknown(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    unknown = ("unshare", "-u", "sh", "-c", 'hostname no.such.host.example; exec "$@"', "sh")
    command = (*unknown, str(LAUNCH / "serve.sh"), "--port", str(free_port()), *SERVER)
    with script(log_file, *command, NPROC="2") as process:
        await_ready(log_file, process)
        process.terminate()
        assert process.wait(STOP_S) == 0


def refusals(log_file: Path) -> list[str]:
    """What the server says of a refusal; a traceback of torchrun's would be another line."""
    text = log_file.read_text()
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("spmd_serve: error:") or " ERROR rank " in line]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-num-seqs", "0"), "--max-num-seqs is 0; it must be between 1 and 65536"),
        (("--model", "/no/such"), "--model /no/such: there is no such folder"),
    ],
)
def test_a_refusal_is_not_started_again(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    log_file = tmp_path / "log"
    server = ("--port", str(free_port()), *SERVER, *options)
    with script(log_file, str(LAUNCH / "serve.sh"), *server, NPROC="2", MAX_RESTARTS="3") as process:
        assert process.wait(READY_S) == 2
    (line,) = refusals(log_file)
    assert says in line


def test_a_refusal_is_not_started_again_on_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    port, logs = free_port(), [tmp_path / host for host in HOSTS]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, (host, log) in enumerate(zip(HOSTS, logs, strict=True)):
            place = ("--head", HOSTS[0], "--port", str(port), "--nnodes", "2", "--node-rank", str(rank), "--nproc", "1")
            command = (*hosts.on(host), str(LAUNCH / "multinode.sh"), *place, "--max-restarts", "3")
            processes.append(stack.enter_context(script(log, *command, "--", "--model", "/no/such", *SERVER)))
        assert [process.wait(READY_S) for process in processes] == [2, 2]
    (line,) = refusals(logs[0])
    assert "--model /no/such: there is no such folder" in line


def test_multinode_sh_on_two_hosts_whose_own_names_are_loopback(hosts: TwoHosts, tmp_path: Path) -> None:
    head, port, http = HOSTS[0], free_port(), free_port()
    server = ("--host", hosts.address(head), "--port", str(http), "--no-api-key", *SERVER)
    logs = [tmp_path / host for host in HOSTS]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, (host, log) in enumerate(zip(HOSTS, logs, strict=True)):
            place = ("--head", head, "--port", str(port), "--nnodes", "2", "--node-rank", str(rank), "--nproc", "1")
            command = (*hosts.on(host), str(LAUNCH / "multinode.sh"), *place, "--", *server)
            processes.append(stack.enter_context(script(log, *command)))
        await_ready(logs[0], processes[0])
        few = {"max_tokens": 24}  # gloo between hosts is slow
        stream = Stream(f"http://{hosts.address(head)}:{http}", few).await_chunks()
        processes[1].terminate()
        assert stream.await_end(STOP_S) == "length"
        assert [process.wait(STOP_S) for process in processes] == [0, 0], "a signal on one host drains both"
