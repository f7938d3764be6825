"""Where this package keeps files from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

from spmd_serve.errors import ModelError


def cache_root() -> Path:
    """This package's folder in the user's cache; there may be none yet, and it may be on a read-only file system.

    Raises:
        ModelError: there is no home folder to have it in.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd_serve"
    except RuntimeError:  # a container's user may have no home
        raise ModelError("this user has no home folder for the cache; set HOME or XDG_CACHE_HOME") from None
