"""How a process of ours ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LEAVE = "from spmd_serve.distributed.process import leave_process; print('last words'); leave_process(3)"
BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}  # so that it is the end that writes


def test_what_was_written_goes_out_before_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, env=BUFFERED, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "last words\n", "")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full", "2>&-"])
def test_an_output_that_cannot_be_written_does_not_change_the_exit_code(redirection: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, LEAVE]
    done = subprocess.run(command, capture_output=True, text=True, env=BUFFERED, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


def test_nor_does_a_reader_that_has_gone() -> None:
    out, into = os.pipe()
    os.close(out)
    try:
        done = subprocess.run(
            [sys.executable, "-c", LEAVE], stdout=into, stderr=subprocess.PIPE, env=BUFFERED, timeout=60
        )
    finally:
        os.close(into)
    assert (done.returncode, done.stderr) == (3, b"")
