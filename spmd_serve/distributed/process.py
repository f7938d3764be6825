"""Processes of this host, as the kernel tells of them (Linux), and the end of this one."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import NoReturn

from spmd_serve.errors import REFUSED, ConfigError


def fill_standard_files() -> None:
    """Put /dev/null where standard input, output or errors are closed, as some supervisors start a program.

    Else the next pipe or socket gets the number, and what a library writes for the user goes to whoever is at its other end.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def allow_files(wanted: int) -> None:
    """Have the kernel let this process open so many files: where there are none left, libraries abort without a word.

    Raises:
        ConfigError: it may not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"only {hard} files may be open here, and a rank needs about {wanted}: raise the limit (ulimit -Hn, LimitNOFILE=)"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def leave_process(code: int) -> NoReturn:
    """End this process, past library threads and the interpreter's own way out, which may hang or abort on them."""
    for stream in (sys.stdout, sys.stderr):
        # None if closed at the start; its reader is gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(_tell_launcher(code))


def _tell_launcher(code: int) -> int:
    """Leave word of this rank's end for whoever started torchrun (launch/ranks.sh); returns the code that torchrun is to see.

    torchrun's own code says too little: it is 1 whenever torchrun was signalled, and whatever ranks return but 0 is for it a
    failure, which it cures by --max-restarts. So a refusal is 0 to torchrun where somebody reads the word.
    """
    folder = os.environ.get("SPMD_SERVE_OUTCOME_DIR")
    if not folder or code not in (0, REFUSED):
        return code
    attempt, local_rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("LOCAL_RANK", "0")
    try:
        Path(folder, f"{attempt}.{local_rank}{'.refused' if code else ''}").touch()
    except OSError:  # the folder is gone: nobody asks any more
        return code
    return 0


def say_error(program: str, exc: object) -> str:
    """One line on stderr, of what the user can mend, and the same for torchrun. Returns it without the program's name."""
    told = " ".join(str(exc).split())
    with contextlib.suppress(OSError):  # nobody reads it; torchrun and the exit code say so as well
        print(f"{program}: error: {told}", file=sys.stderr, flush=True)
    tell_torchrun(f"{program}: error: {told}")
    return told


def tell_torchrun(message: str, details: str = "") -> None:
    """Leave word of why this rank fails where torchrun looks for it: its log ends with that of the rank that failed first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": f"{message}\n{details}".rstrip(), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # torchrun then says that it knows no reason
            Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def usable_cores(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: those that it may run on, or fewer, where its control group has a quota of time.

    That is how containers limit a CPU (docker --cpus, Kubernetes' limits, systemd's CPUQuota). More threads than that would
    stand still together for the rest of each period, and wait for each other.

    Args:
        groups: where control groups are mounted (version 2; of version 1 the folder of `cpu`).
        own: this process's control groups.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cpu_groups(groups, own) if (quota := _quota(folder)) is not None]
    return max(1, int(min([cores, *quotas])))


def _cpu_groups(groups: Path, own: Path) -> list[Path]:
    """The folders of this process's control group and those above it, as far as they are mounted here."""
    try:
        entries = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in entries:
        if controllers == "" or "cpu" in controllers.split(","):
            top = groups / "cpu" if controllers else groups
            group = top / path.lstrip("/")
            found += [top, *(folder for folder in (group, *group.parents) if folder.is_relative_to(top))]
    return found


def _quota(group: Path) -> float | None:
    """How many cores' time the group may use; None is no limit, or no such group here."""
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None


def is_dead(pid: int) -> bool:
    """Whether the process is gone or a zombie; False where the kernel does not tell."""
    try:
        stat = _stat(pid)
    except OSError:  # no more files may be open here, say, which is no news of the other process
        return False
    return stat[0] in "ZX" if stat is not None else os.path.isdir("/proc/self")


def is_suspended(pid: int) -> bool:
    """Whether the process stands still until it gets SIGCONT; False where the kernel does not tell."""
    try:
        stat = _stat(pid)
    except OSError:
        return False
    return stat is not None and stat[0] == "T"


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that live, those of its first thread first; none where there is no such process."""
    found: list[int] = []
    for thread in sorted(Path(f"/proc/{pid}/task").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += map(int, (thread / "children").read_text().split())
    return found


def parent_of(pid: int) -> int | None:
    """The parent's pid, or None when there is no such process, or the kernel does not tell."""
    try:
        stat = _stat(pid)
    except OSError:
        return None
    return None if stat is None else int(stat[1])


def _stat(pid: int) -> list[str] | None:
    """State, parent..., or None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
