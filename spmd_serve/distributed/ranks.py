"""Who this process is among the ranks, and the process group that they share."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import re
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_serve.distributed.process import usable_cores
from spmd_serve.errors import ConfigError, DistributedError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LEAVE_S = 2.0
CONNECT_TIMEOUT_S = 28.0  # to reach the store, to hear from every rank, and to connect the ranks: each


@dataclass(frozen=True)
class RankInfo:
    """This process's place in the job, as torchrun put it into the environment.

    Attributes:
        store_host, store_port: the key-value store of the job ("" when there is one rank).
        agent_store: torchrun's agent hosts the store; otherwise rank 0 does.
        under_agent: torchrun started this process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    hostname: str = ""
    store_host: str = ""
    store_port: int = 0
    agent_store: bool = False
    under_agent: bool = False

    @property
    def node(self) -> int:
        """The first rank of this rank's host; names the host among the ranks."""
        return self.rank - self.local_rank

    @property
    def one_host(self) -> bool:
        return self.world_size == self.local_world_size


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Read torchrun's variables; without RANK and WORLD_SIZE this is the only rank.

    Raises:
        ConfigError: variables that are missing, no numbers, or contradictory.
    """
    hostname = socket.gethostname()
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankInfo(hostname=hostname)

    def number(name: str, default: str | None = None) -> int:
        text = environ.get(name, default)
        if text is None:
            raise ConfigError(f"the environment variable {name} is not set; start the ranks with torchrun")
        if not re.fullmatch("[0-9]{1,9}", text):  # isdigit() knows digits that are none of int()'s
            raise ConfigError(
                f"the environment variable {name} is {text!r}, not a number; start the ranks with torchrun"
            )
        return int(text)

    world_size = number("WORLD_SIZE")
    info = RankInfo(
        rank=number("RANK"),
        world_size=world_size,
        local_rank=number("LOCAL_RANK", environ.get("RANK")),
        local_world_size=number("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE")),
        hostname=hostname,
        store_host=environ.get("MASTER_ADDR", "") if world_size > 1 else "",
        store_port=number("MASTER_PORT") if world_size > 1 else 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        under_agent="TORCHELASTIC_RUN_ID" in environ,
    )
    if not (info.rank < info.world_size and info.local_rank < info.local_world_size <= info.world_size):
        raise ConfigError(
            f"RANK {info.rank} of WORLD_SIZE {info.world_size} with LOCAL_RANK {info.local_rank} of LOCAL_WORLD_SIZE "
            f"{info.local_world_size} is no place among ranks; start them with torchrun"
        )
    if world_size > 1 and not info.store_host:
        raise ConfigError("MASTER_ADDR is not set; start the ranks with torchrun")
    if info.store_port > 65535:
        raise ConfigError(f"MASTER_PORT is {info.store_port}, which is no port; start the ranks with torchrun")
    return info


def die_with_parent() -> None:
    """Have the kernel kill this process when torchrun's agent dies, or it stays behind as an orphan (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def threads_per_rank(ranks: RankInfo) -> int:
    """CPU threads for each rank of this host, when its ranks share the cores that they may use."""
    return max(1, usable_cores() // ranks.local_world_size)


# ---- the network interface of gloo and NCCL ---------------------------------------------------------------------------


def interfaces() -> dict[str, list[str]]:
    """Name -> addresses of the interfaces that have any, IPv4 first; without those that count on one link alone (Linux)."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            siocgifaddr = 0x8915
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
                found[name] = [socket.inet_ntoa(answer[20:24])]
    with contextlib.suppress(OSError):  # this kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if scope != "20":
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found


def _listed(own: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in own.items())


def choose_interface(ranks: RankInfo, own: Mapping[str, Sequence[str]], towards_head: str | None) -> str | None:
    """The interface by which the other ranks can reach this one, or None to leave the choice to gloo.

    gloo takes the address that the host's own name resolves to, which is 127.0.1.1 on many machines.

    Args:
        own: name -> addresses of this host's interfaces.
        towards_head: this host's address on the way to the head node, None when it is not known.

    Raises:
        ConfigError: there are several hosts and several interfaces, and none is the right one for sure.
    """
    outside = {
        name: addresses
        for name, addresses in own.items()
        if not any(ipaddress.ip_address(address).is_loopback for address in addresses)
    }
    if ranks.one_host:
        loopback = [name for name in own if name not in outside]
        return loopback[0] if loopback else None
    for name, addresses in outside.items():
        if towards_head in addresses:
            return name
    # One that has IPv6 alone is of no account where others have IPv4.
    likely = [name for name, addresses in outside.items() if "." in addresses[0]] or list(outside)
    if len(likely) == 1:
        return likely[0]
    raise ConfigError(
        f"the name of host {ranks.hostname} or of the head node {ranks.store_host} resolves to a loopback address, so the "
        "other hosts cannot reach this one; set GLOO_SOCKET_IFNAME to the interface that they share (this host has "
        + (_listed(outside) or "none but loopback")
        + ")"
    )


def address_towards(host: str, port: int) -> str | None:
    """This host's own address on the route to `host`; sends nothing. None when the name or the route is unknown."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    return None


# ---- process group ------------------------------------------------------------------------------------------------


def join_group(ranks: RankInfo, store: Store | None, timeout_s: float) -> None:
    """Make the default process group (gloo, for control) of all ranks; nothing with one rank. Collective.

    Args:
        store: of this attempt only: addresses of an earlier attempt would make the connection fail. None takes torchrun's own,
            for jobs that are not restarted.
        timeout_s: how long one exchange may wait.

    Raises:
        DistributedError: the ranks cannot connect to each other, or this process has a default group already.
    """
    if ranks.world_size == 1:
        return
    import torch.distributed as dist  # here, because it takes seconds, and --help or a typing error does not need it

    if dist.is_initialized():
        raise DistributedError(
            "torch.distributed has a process group already, of an LLM that is not closed or of this program: close the LLM, or "
            "make it before the program's own group (its group, of all ranks, can be used until it is closed)"
        )
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = choose_interface(ranks, interfaces(), address_towards(ranks.store_host, ranks.store_port))
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    if not ranks.one_host and "GLOO_SOCKET_IFNAME" in os.environ:
        # NCCL first meets over sockets, whatever carries its data; "=" is an exact name, not a prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=" + os.environ["GLOO_SOCKET_IFNAME"])
    try:
        dist.init_process_group(
            "gloo", store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as exc:
        raise DistributedError(
            f"the ranks cannot connect to each other ({str(exc).splitlines()[0]}); on host {ranks.hostname} gloo used the "
            f"interface {os.environ.get('GLOO_SOCKET_IFNAME', '(by host name)')}: set GLOO_SOCKET_IFNAME to the one that the "
            f"hosts share (this host has {_listed(interfaces())}) and check the firewall between them"
        ) from exc


def leave_group() -> None:
    """Close the connections to the other ranks; may be called on every way out.

    What cannot be closed, because a collective of the GPU hangs in it, is left to the end of the process.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
        try:
            closing.start()
        except RuntimeError:  # at the end of the interpreter Python 3.12 starts no thread
            dist.destroy_process_group()
        else:
            closing.join(_LEAVE_S)
