"""Processes of this host, as the kernel tells of them (Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def is_dead(pid: int) -> bool:
    """Whether the process is gone or a zombie; False where the kernel does not tell."""
    stat = _stat(pid)
    return stat[0] in "ZX" if stat is not None else os.path.isdir("/proc/self")


def parent_of(pid: int) -> int | None:
    """The parent's pid, or None when there is no such process."""
    stat = _stat(pid)
    return None if stat is None else int(stat[1])


def _stat(pid: int) -> list[str] | None:
    """State, parent..., or None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
