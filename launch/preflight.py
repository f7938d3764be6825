"""Checks before torchrun starts on several nodes, so that what is wrong is one clear line and not a timeout.

Run by multinode.sh on every node (standard library only: it also works before anything is installed). Each node checks
its names, address, interface and port; then the nodes say hello to the head on torchrun's own port, which shows that the
port is reachable and that all were started alike. Prints the head's address; exits 1 with one line of error else.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import socket
import sys
import time
from collections.abc import Callable

NAME_SECONDS = 20.0  # a name may appear late (a pod's DNS entry), but its absence is told within half a minute
ONE_HOST_SECONDS = 10.0  # a head on loopback is on this very host, or the name is wrong: no reason to wait longer
PROGRESS_SECONDS = 10.0


class PreflightError(Exception):
    """What is wrong, and the remedy."""


def say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)


class Progress:
    """A line every ten seconds while something is waited for, and an error at the deadline."""

    def __init__(self, what: Callable[[], str], seconds: float, remedy: str) -> None:
        self.what, self.seconds, self.remedy = what, seconds, remedy
        self.start = time.monotonic()
        self.told = self.start

    def check(self) -> None:
        now = time.monotonic()
        if now - self.start > self.seconds:
            raise PreflightError(f"gave up after {self.seconds:.0f} s waiting for {self.what()}: {self.remedy}")
        if now - self.told > PROGRESS_SECONDS:
            self.told = now
            say(f"waiting for {self.what()} ({now - self.start:.0f} of {self.seconds:.0f} s)")


def resolve(head: str, seconds: float) -> str:
    """Address of the head as this node sees it, of IPv4 if there is one."""
    progress = Progress(
        lambda: f"the name '{head}' to resolve",
        min(NAME_SECONDS, seconds),
        "add it to DNS or /etc/hosts on this node, or give the head's address to --head",
    )
    while True:
        try:
            found = socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)
            return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
        except socket.gaierror:
            progress.check()
            time.sleep(0.5)


def check_interface(name: str) -> None:
    """An interface that is asked for exists here. (Which one to use otherwise is decided by the ranks themselves.)"""
    known = [own for _, own in socket.if_nameindex()]
    if name not in known:
        raise PreflightError(
            f"interface '{name}' is not on this node, which has {', '.join(known)}: correct --interface or "
            "GLOO_SOCKET_IFNAME, or leave it away"
        )


def listen(head: str, address: str, port: int) -> socket.socket:
    """The head's end of the hello, on all interfaces; checks that the address is this host's and that the port is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            raise PreflightError(
                f"node rank 0 must run on the head, but {head} is {address}, which is no address of this host: "
                "start --node-rank 0 there, or correct --head"
            ) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
    except OSError as error:
        listener.close()
        raise PreflightError(
            f"port {port} of {head} cannot be used ({error.strerror}): choose another one with --port on all nodes"
        ) from None
    listener.listen(128)
    return listener


def read_line(sock: socket.socket) -> dict[str, object] | None:
    """One JSON line, or None when the other side says something else. Raises OSError when it left."""
    data = b""
    while not data.endswith(b"\n") and len(data) < 4096:
        chunk = sock.recv(4096)
        if not chunk and not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        if not chunk:
            break
        data += chunk
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get("spmd_serve") == "hello" else None


def send_line(sock: socket.socket, **message: object) -> None:
    sock.sendall(json.dumps({"spmd_serve": "hello", **message}).encode() + b"\n")


def gather_nodes(listener: socket.socket, nnodes: int, wait: float) -> None:
    """On the head: wait for a hello of every other node, then let all go; a node that was started differently ends all."""
    nodes: dict[int, tuple[str, socket.socket]] = {}

    def missing() -> str:
        ranks = [str(rank) for rank in range(1, nnodes) if rank not in nodes]
        return f"node rank {', '.join(ranks)} of {nnodes}"

    progress = Progress(missing, wait, "start launch/multinode.sh there, with the same --head, --port and --nnodes")
    listener.settimeout(0.5)
    try:
        while len(nodes) < nnodes - 1:
            progress.check()
            try:
                sock, peer = listener.accept()
                sock.settimeout(5.0)
                hello = read_line(sock)
            except TimeoutError:
                continue
            except OSError:  # a peer that left at once
                continue
            if hello is None:  # a port scanner, a health probe
                sock.close()
                continue
            rank, theirs, host = int(str(hello["rank"])), hello["nnodes"], f"{hello['host']} ({peer[0]})"
            other = nodes.get(rank)
            nodes[rank] = (host, sock)
            if theirs != nnodes:
                raise PreflightError(
                    f"{host} was started with --nnodes {theirs}, the head with --nnodes {nnodes}: "
                    "give all nodes the same number"
                )
            if other is not None and other[0] != host:
                raise PreflightError(f"{other[0]} and {host} both say --node-rank {rank}: give each node its own")
    except PreflightError as error:
        for _, sock in nodes.values():
            answer(sock, str(error))
        raise
    for _, sock in nodes.values():
        answer(sock, None)


def answer(sock: socket.socket, error: str | None) -> None:
    """Send the verdict and let the other side close first, so that torchrun finds the port free of old connections."""
    try:
        send_line(sock, error=error)
        sock.recv(1)
    except OSError:  # gone: torchrun will miss it too, and say so
        pass
    finally:
        sock.close()


def greet_head(head: str, address: str, port: int, nnodes: int, node_rank: int, wait: float) -> None:
    """On every other node: say hello and wait for the head's verdict."""
    why = ["not asked yet"]
    loopback = ipaddress.ip_address(address).is_loopback
    progress = Progress(
        lambda: f"the head {head} ({address}:{port}; {why[0]})",
        min(wait, ONE_HOST_SECONDS) if loopback else wait,
        f"'{head}' is this node's own loopback: correct DNS or /etc/hosts, or give the head's address to --head"
        if loopback
        else "is node rank 0 started there with the same --port, and does a firewall let this node through?",
    )
    while True:
        progress.check()
        try:
            with socket.create_connection((address, port), timeout=2.0) as sock:
                send_line(sock, rank=node_rank, nnodes=nnodes, host=socket.gethostname())
                why[0] = "it answers, other nodes are missing"
                verdict = wait_for_verdict(sock, progress)
        except OSError as error:
            why[0] = error.strerror or type(error).__name__
            time.sleep(0.5)
            continue
        if verdict is None:
            raise PreflightError(
                f"port {port} of {head} is used by something else: choose another one with --port on all nodes, "
                "and end an earlier job that still runs there"
            )
        if verdict["error"] is not None:
            raise PreflightError(f"the head says: {verdict['error']}")
        return


def wait_for_verdict(sock: socket.socket, progress: Progress) -> dict[str, object] | None:
    sock.settimeout(1.0)
    while True:
        try:
            return read_line(sock)
        except TimeoutError:
            progress.check()


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/preflight.py", description=__doc__)
    parser.add_argument("--head", required=True, help="name or address of the first node")
    parser.add_argument("--port", type=int, required=True, help="port on the head for torchrun's store")
    parser.add_argument("--nnodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--node-rank", type=int, required=True, help="0 on the head")
    parser.add_argument("--interface", default="", help="network interface that must exist here")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds to wait for the other nodes")
    args = parser.parse_args()
    me = f"node rank {args.node_rank} ({socket.gethostname()})"
    try:
        if not 0 <= args.node_rank < args.nnodes:
            raise PreflightError(f"--node-rank must be 0 to {args.nnodes - 1} with --nnodes {args.nnodes}")
        if not 0 < args.port < 65536:
            raise PreflightError(f"--port {args.port} is not a port; choose one from 1024 to 65535")
        address = resolve(args.head, args.wait)
        if args.interface:
            check_interface(args.interface)
        if args.node_rank == 0:
            with listen(args.head, address, args.port) as listener:
                gather_nodes(listener, args.nnodes, args.wait)
        else:
            greet_head(args.head, address, args.port, args.nnodes, args.node_rank, args.wait)
    except PreflightError as error:
        say(f"error: {me}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    say(f"{me} of {args.nnodes} is ready to start; the head {args.head} is {address}:{args.port}")
    print(address)
    return 0


if __name__ == "__main__":
    sys.exit(main())
