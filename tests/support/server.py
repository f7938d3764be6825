"""A real server: torchrun, real ranks, real HTTP. Started on a free port, watched with deadlines, never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import openai

READY_S = 90.0  # a loaded machine of two cores starts four ranks well within this
STOP_S = 25.0  # what a drain may take at most

_TICKS = os.sysconf("SC_CLK_TCK")


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> float:
    """Poll until `condition()`; returns the seconds that it took. Fails after `timeout_s`, naming `what`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(interval_s)
    return time.monotonic() - began


class Server:
    """One `torchrun -m spmd_serve`, or `python -m spmd_serve`. Use `stop` for a clean end and `kill` for any other.

    Args:
        folder: for the log and the address file.
        options: the server's own options; host, port and dtype have defaults here.
        ranks: 1 or more.
        agent: under torchrun; without it the one rank starts in half of the time.
        environment: added to this process's.

    Attributes:
        url: such as http://127.0.0.1:41234, known once it is ready.
        http: a plain client for it.
        log_file: stdout and stderr of torchrun and all ranks.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        ranks: int = 2,
        agent: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        assert agent or ranks == 1
        self.ranks = ranks
        self._agent = agent
        self.url = ""
        self._close = contextlib.ExitStack()
        self._stopping = False
        self._exit_code = 0
        self.log_file = folder / "server.log"
        self._address_file = folder / "address"
        self._address_file.unlink(missing_ok=True)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(torchrun if agent else [])]
        command += ["-m", "spmd_serve", "--port", "0", "--address-file", str(self._address_file), *options]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
            )

    # ---- start -------------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float = READY_S) -> Server:
        """Until it serves; fails with its log if it does not."""
        try:
            wait_until("the server is ready", self._ready_or_gone, timeout_s)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.log_tail()}") from None
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode} while starting\n{self.log_tail()}")
        self.url = self._address_file.read_text().strip()
        # One client for all plain requests: making one reads the system's certificates, which takes longer than a request.
        self.http = self._close.enter_context(httpx.Client(base_url=self.url, verify=False, timeout=60.0))
        return self

    def _ready_or_gone(self) -> bool:
        return self._address_file.exists() or self.process.poll() is not None

    # ---- what it says ------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        """All output so far."""
        return self.log_file.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """The end of the output, for messages."""
        return "\n".join(self.log.splitlines()[-lines:])

    def client(self, **options: object) -> openai.OpenAI:
        """The official client, without retries: a failure must show. Closed with the server."""
        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120.0}
        return self._close.enter_context(openai.OpenAI(**{**defaults, **options}))  # type: ignore[arg-type]

    def async_client(self) -> openai.AsyncOpenAI:
        """The official client for many requests at once."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0)

    def metrics(self) -> dict[str, float]:
        """Sample name with its labels, as /metrics writes them, without the spmd_serve_ prefix -> value."""
        text = self.http.get("/metrics").raise_for_status().text
        samples = re.findall(r"^spmd_serve_(\S+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def wait_idle(self, timeout_s: float = 10.0) -> float:
        """Until nothing runs or waits and no page is in use, by /metrics; returns the seconds that it took."""
        gauges = ("requests_running", "requests_waiting", 'kv_pages{state="used"}')

        def idle() -> bool:
            values = self.metrics()
            return all(values[name] == 0 for name in gauges)

        return wait_until("nothing runs, waits or holds pages", idle, timeout_s)

    # ---- its processes -----------------------------------------------------------------------------------------------

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks, rank 0 first (torchrun starts them in order)."""
        if not self._agent:
            return [self.process.pid]
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sorted(int(pid) for pid in children)

    def cpu_seconds(self) -> list[float]:
        """User and system time of each rank so far, its threads included."""
        return [_cpu_seconds(pid) for pid in self.rank_pids()]

    # ---- end ---------------------------------------------------------------------------------------------------------

    def wait_exit(self, timeout_s: float = STOP_S) -> int:
        """torchrun's exit code; kills it and fails if it does not end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end within {timeout_s:g} s\n{self.log_tail()}") from None

    def begin_stop(self, rank: int | None = 0) -> None:
        """SIGTERM to one rank, or with None to torchrun; `stop` awaits the end."""
        self._stopping = True
        self._exit_code = 0 if rank is not None else 1  # torchrun returns 1 whenever it is signalled itself
        os.kill(self.process.pid if rank is None else self.rank_pids()[rank], signal.SIGTERM)

    def stop(self) -> None:
        """Drain. Every rank must return 0 in time, after one line that says so."""
        if not self._stopping:
            assert self.process.poll() is None, f"it has ended with {self.process.returncode}\n{self.log_tail(200)}"
            self.begin_stop()
        code = self.wait_exit()
        assert code == self._exit_code, f"exit code {code}\n{self.log_tail(200)}"
        assert "exitcode" not in self.log, self.log_tail(200)  # torchrun lists ranks that did not return 0
        assert self.log.count(f"all {self.ranks} ranks have left the step loop") == 1, self.log_tail(200)
        assert "ERROR" not in self.log, self.log_tail(200)

    def close(self) -> None:
        """End what is left of it, and the clients."""
        self._close.close()
        self.kill()

    def kill(self) -> None:
        """End it at once; the ranks die with torchrun."""
        if self.process.poll() is not None:
            return
        pids = []
        with contextlib.suppress(OSError):
            pids = self.rank_pids()
        for pid in (self.process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(
    folder: Path,
    *options: str,
    ranks: int = 2,
    agent: bool = True,
    environment: Mapping[str, str] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[Server]:
    """A ready server for the length of a with block, which checks that it ends cleanly.

    Args:
        meanwhile: called while the server starts.
    """
    server = Server(folder, *options, ranks=ranks, agent=agent, environment=environment)
    try:
        meanwhile()
        yield server.wait_ready()
        server.stop()
    finally:
        server.close()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS  # utime, stime
