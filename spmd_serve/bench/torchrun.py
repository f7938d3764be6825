"""The jobs that benchmarks start by themselves."""

from __future__ import annotations

import os
import shutil
import sys


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """The command for so many ranks of this host. Should this process be killed, they end too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", *command] if setpriv else command


def environment() -> dict[str, str]:
    """The variables for it: torchrun would warn that it sets this one."""
    return {"OMP_NUM_THREADS": "1"} | os.environ
