"""Log lines: one an event, whatever clients' words are, and nobody waits for a reader that does not come."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from spmd_serve.logs import _StderrHandler

SAY = """
import logging
from spmd_serve.logs import set_up_logs
set_up_logs("info", 0, lambda: 7, "frontend 1")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("x").warning("user '%s'", "a\\n12:00:00 ERROR rank 0 forged: \\x1b[31m\\u2028 \\ud800")
logging.getLogger("x").error("rank 1 failed", extra={"details": "Traceback:\\n  here"})
"""


def test_a_line_an_event() -> None:
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, timeout=60, check=True)
    forged, failed, *details = done.stderr.splitlines()
    where = r"\d\d:\d\d:\d\d %s rank 0 frontend 1 step 7 <string>: "
    assert re.sub(where % "WARNING", "", forged) == (r"user 'a\n12:00:00 ERROR rank 0 forged: \x1b[31m\u2028 \ud800'")
    assert re.sub(where % "ERROR", "", failed) == "rank 1 failed"
    assert details == ["Traceback:", "  here"]


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_log_that_nobody_reads_holds_nobody_up(kind: str) -> None:
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = (end.detach() for end in socket.socketpair())
    handler = _StderrHandler(writer)

    def say(text: str) -> None:
        handler.emit(logging.LogRecord("x", logging.INFO, "x.py", 1, text, None, None))

    count = 50_000
    began = time.monotonic()
    for number in range(count):
        say(f"{number} {'x' * 90}")
    assert time.monotonic() - began < 30  # some 0.5 s; it was for ever
    os.set_blocking(reader, False)
    said = b""
    for text in ("there is room again", "and now all is well"):
        while True:
            try:
                said += os.read(reader, 1 << 20)
            except BlockingIOError:
                break
        say(text)
    said += os.read(reader, 1 << 20)
    assert os.get_blocking(writer)  # others have it too
    handler.close()
    os.close(writer)
    os.close(reader)
    *lines, lost, again, well = said.decode().splitlines()
    whole = [line for line in lines if len(line) > 90 and line.endswith("x" * 90)]
    assert [line.split()[0] for line in whole] == [str(number) for number in range(len(whole))]
    assert lost == f"({count - len(whole)} lines of the log are lost: nobody has read them)"
    assert (again, well) == ("there is room again", "and now all is well")
