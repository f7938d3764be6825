"""Two hosts on one machine: network namespaces joined by a bridge. Each resolves its own name to 127.0.1.1, as Debian does."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
from pathlib import Path

HOSTS = ("hA", "hB")


def why_not() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if os.geteuid() == 0 and shutil.which("ip") is not None:
        return ""
    return "network namespaces need root and iproute2"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class TwoHosts:
    """Hosts hA (SUBNET.1) and hB (SUBNET.2) with one interface each; this process reaches them over the bridge."""

    def __init__(self) -> None:
        # New names each time: the kernel may still be taking the last ones' namespaces down.
        self._tag = secrets.token_hex(3)
        self.subnet = f"10.{random.randrange(64, 128)}.{random.randrange(256)}"
        self.bridge = f"br{self._tag}"
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.subnet}.254/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for number, host in enumerate(HOSTS, 1):
            space, outer = self._space(host), self._outer(host)
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", self.bridge, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.subnet}.{number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            names = [f"{self.subnet}.{i} {name}" for i, name in enumerate(HOSTS, 1) if name != host]
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host}", *names, ""]))

    def address(self, host: str) -> str:
        """By which the other host, and this process, reach a host."""
        return f"{self.subnet}.{HOSTS.index(host) + 1}"

    def on(self, host: str) -> list[str]:
        """The command prefix that runs something on a host, under its name."""
        name = f'hostname {host}; exec "$@"'
        return ["ip", "netns", "exec", self._space(host), "unshare", "-u", "sh", "-c", name, "sh"]

    def cut(self, host: str) -> None:
        """Pull a host's cable."""
        _ip("link", "set", self._outer(host), "down")

    def close(self) -> None:
        for host in HOSTS:
            subprocess.run(["ip", "link", "del", self._outer(host)], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self._space(host)], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / self._space(host), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def _space(self, host: str) -> str:
        return f"spmd{self._tag}-{host}"

    def _outer(self, host: str) -> str:
        return f"v{self._tag}{host}"
