"""A server under torchrun, watched and talked to with the standard library alone: for machines that have little else."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self


def wait_until(what: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def live_processes(variable: str, value: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(process id, environment) of this host's processes that have `variable` with this value in their environment."""
    for folder in Path("/proc").iterdir():
        try:
            text = (folder / "environ").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            continue
        if f"{variable}={value}\0" in text and state not in "ZX":
            pairs = (entry.partition("=") for entry in text.split("\0"))
            yield int(folder.name), {name: value for name, _, value in pairs}


def torchrun(ranks: int, *command: str) -> list[str]:
    """The command that starts `command` on `ranks` ranks of this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]


class PlainJob:
    """torchrun and all processes under it, which a tag in their environment tells from others.

    Args:
        folder: for the log and the address file.
        options: of the server.
    """

    def __init__(self, folder: Path, *options: str, ranks: int = 2) -> None:
        self.tag = uuid.uuid4().hex
        self._log_file = folder / f"job-{self.tag[:8]}.log"
        self._address = folder / f"address-{self.tag[:8]}"
        command = torchrun(ranks, "-m", "spmd_serve", "--port", "0", "--address-file", str(self._address), *options)
        environment = os.environ | {"PLAIN_JOB": self.tag, "HF_HUB_OFFLINE": "1"}
        with self._log_file.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    @property
    def log_end(self) -> str:
        return "\n".join(self.log.splitlines()[-60:])

    def await_ready(self, timeout_s: float) -> PlainJob:
        wait_until(lambda: self._address.exists() or self.process.poll() is not None, timeout_s)
        assert self._address.exists(), self.log_end
        return self

    def post(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A completion request; the caller reads the response and closes the connection."""
        host = self._address.read_text().strip().removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def stream(self, body: dict[str, Any]) -> PlainStream:
        return PlainStream(self, body)

    # ---- its processes -----------------------------------------------------------------------------------------------

    def survivors(self) -> list[int]:
        return [pid for pid, _ in live_processes("PLAIN_JOB", self.tag)]

    def signal_rank(self, rank: int, number: int) -> None:
        for pid, environment in live_processes("PLAIN_JOB", self.tag):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if environment.get("RANK") == str(rank) and b"--address-file" in command:  # a frontend's process has none
                os.kill(pid, number)
                return
        raise AssertionError(f"there is no rank {rank}\n{self.log_end}")

    def await_end(self, timeout_s: float) -> int:
        """torchrun's exit code once all of the job is gone; fails when it is not in time."""
        gone = wait_until(lambda: self.process.poll() is not None and not self.survivors(), timeout_s)
        assert gone, f"still there after {timeout_s:g} s: {self.survivors()}\n{self.log_end}"
        return int(self.process.returncode)

    def close(self) -> None:
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


class StreamReader:
    """A streamed completion, read by a thread. `ended`: "" while it runs, then the finish reason, "error" or "broken".

    run: sends the request and gives each line of the answer to `take`.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.chunks = 0
        self.ended = ""
        self.detail = ""
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def take(self, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.ended, self.detail = "error", event["error"]["message"]
        elif event["choices"]:
            self.chunks += 1
            self.ended = event["choices"][0]["finish_reason"] or self.ended

    def await_chunks(self, count: int = 3, timeout_s: float = 60) -> Self:
        wait_until(lambda: self.chunks >= count or bool(self.ended), timeout_s)
        assert self.chunks >= count and not self.ended, (self.chunks, self.ended, self.detail)
        return self

    def await_end(self, timeout_s: float) -> str:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the client was left open"
        return self.ended


class PlainStream(StreamReader):
    """One by http.client."""

    def __init__(self, job: PlainJob, body: dict[str, Any]) -> None:
        super().__init__(lambda: self._run(job, body | {"stream": True}))

    def _run(self, job: PlainJob, body: dict[str, Any]) -> None:
        try:
            connection, response = job.post(body)
            with contextlib.closing(connection):
                for line in response:
                    self.take(line.decode().strip())
            self.ended = self.ended or f"broken, status {response.status}"
        except (OSError, http.client.HTTPException) as exc:
            self.ended, self.detail = self.ended or "broken", repr(exc)
