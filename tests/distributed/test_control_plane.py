"""The benchmark of the control channel runs, and says what it should."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest
from support.processes import arguments_of, offspring
from support.server import wait_until

COMMAND = [sys.executable, "-m", "spmd_serve.bench", "control_plane", "--ranks", "2", "--rounds", "20", "--no-decode"]


def test_the_exchange_is_measured_beside_a_bare_broadcast() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=90, check=True)
    header, row = done.stdout.splitlines()[-2:]
    assert header.split() == ["ranks", "bare", "broadcast", "0", "requests", "1", "requests", "16", "requests"]
    numbers = [int(number) for number in re.findall(r"\d+", row)]
    assert numbers[0] == 2
    assert len(numbers) == 9  # p50 and p99 of each
    assert all(0 < p50 <= p99 for p50, p99 in zip(numbers[1::2], numbers[2::2], strict=True))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_a_signal_leaves_no_ranks_behind(number: int, code: int) -> None:
    command = [*COMMAND, "--rounds", "1000000"]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until("ranks", lambda: sum("--worker" in args for args in offspring(bench.pid).values()) == 3, 30, 0.1)
        time.sleep(3.0)  # the ranks have met
        all_of_it = offspring(bench.pid)
        bench.send_signal(number)
        assert bench.wait(20) == code
    finally:
        bench.kill()
    wait_until("all have ended", lambda: not any(arguments_of(pid) == args for pid, args in all_of_it.items()), 20, 0.1)
