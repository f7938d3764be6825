"""Two hosts, as network namespaces joined by a bridge. Each resolves its own name to 127.0.1.1, as Debian does."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_job import Job, free_port

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
)

CONTROL_TIMEOUT_S = 4
HOSTS = ("hA", "hB")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Namespaces `spmd-hA`, `spmd-hB` with one interface each, and a bridge that this process can reach them by."""

    def __init__(self) -> None:
        self.subnet = f"10.78.{os.getpid() % 250}"
        self.bridge = f"br{os.getpid()}"
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.subnet}.254/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for number, host in enumerate(HOSTS, 1):
            space, outer = self.space(host), self.outer(host)
            ip("netns", "add", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outer, "master", self.bridge, "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"{self.subnet}.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            names = [f"{self.subnet}.{i} {name}" for i, name in enumerate(HOSTS, 1) if name != host]
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host}", *names, ""]))

    def space(self, host: str) -> str:
        return f"spmd{os.getpid()}-{host}"

    def outer(self, host: str) -> str:
        return f"v{os.getpid()}{host}"

    def on(self, host: str) -> list[str]:
        """The command prefix that runs something on a host."""
        return [
            "ip",
            "netns",
            "exec",
            self.space(host),
            "unshare",
            "-u",
            "sh",
            "-c",
            f'hostname {host}; exec "$@"',
            "sh",
        ]

    def cut(self, host: str) -> None:
        ip("link", "set", self.outer(host), "down")

    def close(self) -> None:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", self.space(host)], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / self.space(host), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    try:
        yield network
    finally:
        network.close()


def test_a_cut_link_ends_both_sides(network: Network, tmp_path: Path) -> None:
    address = f"{network.subnet}.1"
    options = ("--host", address, "--no-api-key", "--step-timeout", "30")
    timeouts = ("--control-timeout", f"{CONTROL_TIMEOUT_S}", "--heartbeat-interval", "0.5")
    head = ("--nnodes=2", "--rdzv-backend=static", "--master-addr=hA", f"--master-port={free_port()}")
    jobs = [
        Job(
            tmp_path,
            *options,
            *timeouts,
            ranks=1,
            torchrun=(*head, f"--node-rank={rank}"),
            prefix=network.on(host),
            host=address,
            port=8000,
        )
        for rank, host in enumerate(HOSTS)
    ]
    try:
        jobs[0].await_ready()
        assert jobs[0].complete().status_code == 200
        stream = jobs[0].stream().await_chunks()
        began = time.monotonic()
        network.cut("hB")
        assert stream.await_end(CONTROL_TIMEOUT_S + 5) == "error", stream.detail
        for job in jobs:
            assert job.await_end(CONTROL_TIMEOUT_S + 12) != 0
        jobs[0].note("cut link between two hosts, --control-timeout 4", time.monotonic() - began)
        assert "rank 1 (hB) is lost" in jobs[0].log
        assert "rank 0 (hA) is lost" in jobs[1].log
    finally:
        for job in jobs:
            print(job.log)
            job.close()
