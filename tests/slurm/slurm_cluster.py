"""A real SLURM cluster on this machine: one slurmctld and several slurmd, each a node of its own, without systemd or munge."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
T = TypeVar("T")

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
SchedulerParameters=sched_min_interval=0
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=25
MinJobAge=300
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


def wait_for(what: str, ask: Callable[[], T | None], seconds: float, log: Callable[[], str] = str) -> T:
    """Poll until `ask` returns something true."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{log()}"
        time.sleep(0.1)


def run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def processes(needle: str) -> dict[int, list[str]]:
    """pid -> command line of the living processes whose environment holds `needle`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if needle.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
        except OSError:  # gone, or a zombie
            continue
    return found


class Cluster:
    """Nodes n1, n2, ... on 127.0.0.1, each with `gpus` fake GPUs (character devices)."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 8, gpus: int = 2) -> None:
        self.folder, self.names = folder, [f"n{i + 1}" for i in range(nodes)]
        (folder / "state").mkdir(parents=True)
        (folder / "dev").mkdir()
        for i in range(gpus):
            run("mknod", str(folder / f"dev/gpu{i}"), "c", "1", "3")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        host = socket.gethostname().partition(".")[0]
        lines = [CONF.format(host=host, port=port, folder=folder)]
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
        self._hosts_added = ""
        self._jobs: list[str] = []

    def start(self) -> None:
        hosts = Path("/etc/hosts")
        for name in self.names:
            if subprocess.run(["getent", "hosts", name], capture_output=True).returncode != 0:
                self._hosts_added += f"127.0.0.1 {name}\n"
        with hosts.open("a") as file:
            file.write(self._hosts_added)
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

        wait_for("all nodes idle", idle, 30, lambda: run("scontrol", "show", "nodes", env=self.env))

    def stop(self) -> None:
        subprocess.run(["scancel", "--signal=KILL", "-u", "root"], env=self.env, timeout=30)
        for daemon in ["slurmctld", *(f"slurmd.{name}" for name in self.names)]:
            try:
                os.kill(self.pid_of(daemon), signal.SIGTERM)
            except (OSError, ValueError):  # stopped by a test
                pass
        for job in self._jobs:
            for pid in processes(f"SLURM_JOB_ID={job}"):
                os.kill(pid, signal.SIGKILL)
        hosts = Path("/etc/hosts")
        hosts.write_text(hosts.read_text().replace(self._hosts_added, "")) if self._hosts_added else None

    def submit(self, *sbatch_options: str, server: tuple[str, ...] = (), **environ: str) -> Job:
        script = str(ROOT / "slurm" / "serve.sbatch")
        # A value that tells this cluster's processes from another's with the same job number.
        env = {**self.env, **environ, "SPMD_SERVE_TEST": self.folder.name}
        out = run("sbatch", "--parsable", *sbatch_options, script, *server, env=env, cwd=self.folder)
        self._jobs.append(out.strip())
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
        text = run("scontrol", "show", "job", self.number, env=self.cluster.env)
        match = re.search(rf"\b{name}=(\S*)", text)
        assert match, text
        return match[1]

    def wait_state(self, *states: str, seconds: float = 60) -> str:
        def state() -> str | None:
            now = self.field("JobState")
            return now if now in states else None

        return wait_for(f"job {self.number} {'/'.join(states)}", state, seconds, lambda: self.log)

    def processes(self, *, module: str = "spmd_serve") -> dict[int, list[str]]:
        """pid -> command line of this job's processes that run `python -m MODULE`, ranks by default."""
        found = processes(f"SLURM_JOB_ID={self.number}")
        own = processes(f"SPMD_SERVE_TEST={self.cluster.folder.name}")
        return {
            pid: words
            for pid, words in found.items()
            if pid in own and "-m" in words and words[words.index("-m") + 1] == module
        }
