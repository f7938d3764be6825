"""A real SLURM cluster on this machine: one slurmctld and several slurmd, each a node of its own, without systemd or munge."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.ports import free_port
from support.server import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol")

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,bf_interval=1
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=6
MessageTimeout=5
KillWait=25
MinJobAge=300
FirstJobId={first_job}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why no cluster can run here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root: slurmd runs jobs as other users, and the nodes' names go into /etc/hosts"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install --no-install-recommends slurmctld slurmd slurm-client"
    return ""


def run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def processes(**environ: str) -> dict[int, list[str]]:
    """pid -> command line of the living processes that have these variables in their environment."""
    needles = {f"{name}={value}".encode() for name, value in environ.items()}
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # gone, or a zombie
            if needles <= set((entry / "environ").read_bytes().split(b"\0")):
                found[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
    return found


def parent(pid: int) -> int:
    """Process id of the parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Cluster:
    """Nodes n1, n2, ... on 127.0.0.1, each with `gpus` fake GPUs (character devices)."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 8, gpus: int = 2) -> None:
        self.folder, self.names = folder, [f"n{i + 1}" for i in range(nodes)]
        (folder / "state").mkdir(parents=True)
        (folder / "dev").mkdir()
        for i in range(gpus):
            run("mknod", str(folder / f"dev/gpu{i}"), "c", "1", "3")
        port = free_port(1 + nodes)
        host = socket.gethostname().partition(".")[0]
        # Jobs of one number choose the same ports, and other processes of this test run may have clusters too.
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        lines = [CONF.format(host=host, port=port, folder=folder, first_job=1 + 1000 * worker)]
        for i, name in enumerate(self.names):
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1 + i} CPUs={cpus} "
                f"RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN\n"
            )
        (folder / "slurm.conf").write_text("".join(lines))
        (folder / "gres.conf").write_text(
            f"NodeName=n[1-{nodes}] Name=gpu File={folder}/dev/gpu[0-{gpus - 1}]\n" if gpus else ""
        )
        # No cgroups here: this version knows no way to say so but a mount point that does not exist.
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/no-cgroup\n")
        self.env = dict(os.environ, SLURM_CONF=str(folder / "slurm.conf"), PYTHON=sys.executable, HF_HUB_OFFLINE="1")
        self.env["GLOO_SOCKET_IFNAME"] = "lo"  # all nodes are this host

    def start(self) -> None:
        self._name_nodes(True)
        run("slurmctld", "-f", self.env["SLURM_CONF"], env=self.env)
        for name in self.names:
            self.start_node(name)
        self.wait_idle()

    def start_node(self, name: str) -> None:
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        run("slurmd", "-f", self.env["SLURM_CONF"], "-N", name, env=self.env)

    def pid_of(self, daemon: str) -> int:
        return int((self.folder / f"{daemon}.pid").read_text())

    def wait_idle(self) -> None:
        def idle() -> bool:
            states = run("scontrol", "show", "nodes", "-o", env=self.env)
            return len(re.findall(r" State=IDLE ", states)) == len(self.names)

        wait_until("all nodes are idle", idle, 30)

    def stop(self) -> None:
        """End the daemons and whatever is left of the jobs."""
        for daemon in ["slurmctld", *(f"slurmd.{name}" for name in self.names)]:
            with contextlib.suppress(OSError, ValueError):  # ended by a test
                os.kill(self.pid_of(daemon), signal.SIGTERM)
        for pid in processes(SPMD_SERVE_TEST=str(self.folder)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._name_nodes(False)

    def _name_nodes(self, there: bool) -> None:
        """Add this cluster's lines to /etc/hosts, or remove them. Other clusters may be at it, with the same names."""
        own = f"  # the tests' cluster in {self.folder}"
        with Path("/etc/hosts").open("r+") as hosts:
            fcntl.flock(hosts, fcntl.LOCK_EX)
            lines = [f"{line}\n" for line in hosts.read().splitlines() if not line.endswith(own)]
            if there:
                lines += [f"127.0.0.1 {name}{own}\n" for name in self.names]
            hosts.seek(0)
            hosts.writelines(lines)
            hosts.truncate()

    def submit(self, *sbatch_options: str, server: tuple[str, ...] = (), **environ: str) -> Job:
        """Submit slurm/serve.sbatch from this cluster's folder, with options for sbatch and for the server."""
        script = str(ROOT / "slurm" / "serve.sbatch")
        env = {**self.env, **environ, "SPMD_SERVE_TEST": str(self.folder)}
        out = run("sbatch", "--parsable", *sbatch_options, script, *server, env=env, cwd=self.folder)
        return Job(self, out.strip())


class Job:
    """One submitted job."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number
        self.log_file = cluster.folder / f"spmd_serve-{number}.log"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else "(no log yet)"

    def field(self, name: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        text = run("scontrol", "show", "job", self.number, env=self.cluster.env)
        match = re.search(rf"\b{name}=(\S*)", text)
        assert match, text
        return match[1]

    def update(self, **fields: str) -> None:
        settings = [f"{name}={value}" for name, value in fields.items()]
        run("scontrol", "update", f"JobId={self.number}", *settings, env=self.cluster.env)

    def cancel(self) -> None:
        run("scancel", self.number, env=self.cluster.env)

    def wait_state(self, *states: str, seconds: float) -> None:
        self._wait(f"job is {' or '.join(states)}", lambda: self.field("JobState") in states, seconds)

    def wait_ready(self, times: int = 1, seconds: float = 90) -> dict[str, str]:
        """Until the box has been printed `times` times; returns the last one's lines by their first word."""
        self._wait("the box is printed", lambda: self.log.count("| log ") >= times, seconds)
        box = self.log.rpartition("spmd_serve is ready")[2]
        return dict(re.findall(r"^\| (\w+(?: key)?) +(.*)$", box, re.MULTILINE))

    def _wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        def holds_or_failed() -> bool:
            return condition() or self.field("JobState") in ("FAILED", "CANCELLED", "COMPLETED")

        try:
            wait_until(what, holds_or_failed, seconds, 0.1)
            assert condition(), f"the job ended before {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def processes(self, module: str = "spmd_serve", **environ: str) -> dict[int, list[str]]:
        """pid -> command line of this job's processes that run `python -m MODULE`; by default its ranks."""
        own = processes(SPMD_SERVE_TEST=str(self.cluster.folder), SLURM_JOB_ID=self.number, **environ)
        return {pid: words for pid, words in own.items() if "-m" in words and words[words.index("-m") + 1] == module}
