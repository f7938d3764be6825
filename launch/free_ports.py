"""Print two free TCP ports of this host, near ones that a number (a job id) determines.

The same number gives the same ports as long as they are free, so that a job that starts again keeps its address. Below
the range from which the kernel takes ports for outgoing connections.
"""

from __future__ import annotations

import argparse
import socket
import sys

FIRST, LAST = 10_000, 30_000


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/free_ports.py", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="number that determines where the search begins")
    seed = parser.parse_args().seed
    for offset in range(0, LAST - FIRST, 2):
        port = FIRST + (2 * seed + offset) % (LAST - FIRST)
        if is_free(port) and is_free(port + 1):
            print(port, port + 1)
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
