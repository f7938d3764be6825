"""The benchmark of the control channel runs, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys

COMMAND = [sys.executable, "-m", "spmd_serve.bench", "control_plane", "--ranks", "2", "--rounds", "20", "--no-decode"]


def test_the_exchange_is_measured_beside_a_bare_broadcast() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=90, check=True)
    header, row = done.stdout.splitlines()[-2:]
    assert header.split() == ["ranks", "bare", "broadcast", "0", "requests", "1", "requests", "16", "requests"]
    numbers = [int(number) for number in re.findall(r"\d+", row)]
    assert numbers[0] == 2
    assert len(numbers) == 9  # p50 and p99 of each
    assert all(0 < p50 <= p99 for p50, p99 in zip(numbers[1::2], numbers[2::2], strict=True))
