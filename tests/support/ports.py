"""Ports for servers that must be told one."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_port(count: int = 1) -> int:
    """The first of `count` ports in a row that nobody listens on.

    They lie below those that the kernel gives to outgoing connections and to port 0: one of these could go to anybody
    before it is used.
    """
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(10_000, lowest_given - count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("", port))
            return first
