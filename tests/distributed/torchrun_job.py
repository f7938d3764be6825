"""Starts real torchrun jobs for the tests, and sees what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import httpx
from support.plain_job import StreamReader, live_processes, wait_until
from support.ports import free_port

HERE = Path(__file__).parent
READY_S = 90.0  # a loaded machine may take long to import torch
SLACK_S = 10.0  # and to leave Python; less than the 30 s for which torchrun waits for a rank that does not end


class Job:
    """One torchrun (or, with `bare`, ranks without torchrun) and the processes under it.

    Args:
        options: of the server.
        entry: what runs on each rank.
        env: additions to the environment.
        bare: start the ranks without torchrun, each with these additions to its environment; CWD is its folder.
        prefix: command in front of torchrun.
        host: where the server will listen.
    """

    def __init__(
        self,
        tmp_path: Path,
        *options: str,
        ranks: int = 2,
        entry: tuple[str, ...] = (str(HERE / "faulty.py"),),
        torchrun: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        bare: list[dict[str, str]] | None = None,
        port: int | None = None,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.tag = uuid.uuid4().hex
        self.ranks = ranks
        self.port = port or free_port()
        self.url = f"http://{host}:{self.port}"
        self.log_file = tmp_path / f"job-{self.tag[:8]}.log"
        environment = (
            os.environ | {"SPMD_TEST_JOB": self.tag, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (env or {})
        )
        arguments = [*entry, "--port", str(self.port), "--num-pages", "512", *options]
        self._log = self.log_file.open("w")
        self.processes: list[subprocess.Popen[bytes]] = []
        if bare is None:
            command = [*prefix, sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            command += [f"--master-port={free_port()}", *torchrun, *arguments]  # a later option wins
            self._spawn(command, environment, tmp_path)
            return
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank, additions in enumerate(bare):
            own = environment | place | {"RANK": str(rank)} | additions
            self._spawn([sys.executable, *arguments], own, Path(additions.get("CWD", tmp_path)))

    def _spawn(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.processes.append(
            subprocess.Popen(command, env=environment, cwd=folder, stdout=self._log, stderr=subprocess.STDOUT)
        )

    # ---- looking at it -------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def pids(self) -> dict[int, int]:
        """Rank -> process id, of the ranks that live."""
        found = {}
        for pid, environment in live_processes("SPMD_TEST_JOB", self.tag):
            if "RANK" in environment and b"--num-pages" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[int(environment["RANK"])] = pid
        return found

    def frontends(self) -> list[int]:
        """Process ids of the frontend's own processes."""
        processes = [pid for pid, _ in live_processes("SPMD_TEST_JOB", self.tag)]
        return [pid for pid in processes if b"frontend.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def survivors(self) -> list[int]:
        return [pid for pid, _ in live_processes("SPMD_TEST_JOB", self.tag)]

    def health(self) -> int:
        """Status of /health; 0 when there is no connection."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5, verify=False).status_code
        except httpx.TransportError:
            return 0

    # ---- doing something -----------------------------------------------------------------------------------------

    def await_ready(self, timeout_s: float = READY_S) -> Job:
        ready = wait_until(lambda: self.health() == 200 or self.processes[0].poll() is not None, timeout_s, 0.1)
        assert ready and self.health() == 200, self.log
        return self

    def complete(self, **fields: object) -> httpx.Response:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        return httpx.post(f"{self.url}/v1/completions", json=body | fields, timeout=60, verify=False)

    def stream(self, **fields: object) -> Stream:
        return Stream(self.url, fields)

    def signal_rank(self, rank: int, number: int) -> None:
        os.kill(self.pids()[rank], number)

    def signal(self, number: int) -> None:
        self.processes[0].send_signal(number)

    def await_end(self, timeout_s: float) -> int:
        """Exit code of torchrun (of rank 0 without it) once all of the job is gone; fails when it is not in time.

        timeout_s: what a machine with nothing else to do would need at most.
        """
        timeout_s += SLACK_S
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {timeout_s} s\n{self.log}") from None
        assert wait_until(lambda: not self.survivors(), max(0.1, deadline - time.monotonic())), (
            f"left behind: {self.survivors()}\n{self.log}"
        )
        return self.processes[0].returncode

    def note(self, what: str, value: float) -> None:
        """Print a measurement (seconds unless `what` says otherwise), and append it to the file named by FAULT_TIMES."""
        print(f"{what}: {value:.2f}")
        if os.environ.get("FAULT_TIMES"):
            with open(os.environ["FAULT_TIMES"], "a") as table:
                table.write(f"{what}\t{value:.2f}\n")

    def close(self) -> None:
        for pid in self.survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait(10)
        self._log.close()


class Stream(StreamReader):
    """One by httpx; `ended` may be "refused" too."""

    def __init__(self, url: str, fields: dict[str, object]) -> None:
        self.status = 0
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": [1, 2, 3],
            "max_tokens": 4000,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        super().__init__(lambda: self._run(url, body | {"stream": True} | fields))

    def _run(self, url: str, body: dict[str, object]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120, verify=False) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self.take(line)
            self.ended = self.ended or ("refused" if self.status >= 400 else "broken")
        except httpx.TransportError as exc:
            self.ended = self.ended or "broken"
            self.detail = repr(exc)
