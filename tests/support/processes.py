"""Processes that a test has started, and those that they have started in turn."""

from __future__ import annotations

from pathlib import Path

from spmd_serve.distributed.process import children_of


def arguments_of(pid: int) -> str:
    """Its command line; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def offspring(pid: int) -> dict[int, str]:
    """Processes below it -> their arguments, those that have any."""
    children = children_of(pid)
    found = {child: arguments_of(child) for child in children}
    for child in children:
        found |= offspring(child)
    return {child: args for child, args in found.items() if args}
