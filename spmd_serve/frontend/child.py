"""A frontend in a process of its own: `python -m spmd_serve.frontend.child`, started by server.ProcessFrontend.

It lives exactly as long as its parent: standard input ends when the parent stops it or is gone, and on Linux the kernel
kills it should the parent die while this process cannot look.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys

import msgspec
import zmq

from spmd_serve.frontend.http_server import HttpThread
from spmd_serve.frontend.link import FrontLink
from spmd_serve.frontend.server import ChildSettings
from spmd_serve.logs import set_up_logs

STOP_TIMEOUT = 2.0  # seconds for open responses to end; the parent stops us when they should have
_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked


def main() -> int:
    # Ctrl-C, a closed terminal and torchrun's SIGTERM also come here; the parent decides when the drain is over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSettings)
    _die_with_parent(settings.parent)
    set_up_logs(settings.config.server.log_level, 0, lambda: None, f"frontend {settings.index}")

    def beat() -> None:
        with contextlib.suppress(OSError):  # the parent does not look, or is gone
            os.write(settings.beats, b"\0")

    os.set_blocking(settings.beats, False)
    link = FrontLink(settings.address, settings.index, zmq.Context())
    http = HttpThread(
        settings.config,
        settings.info,
        link,
        socket.socket(fileno=settings.listener),
        lambda reason: os._exit(1),
        on_beat=beat,
        shared_metrics=True,
    )
    http.start()
    gc.freeze()  # tokenizer and schemas stay for ever: collections need not walk through them
    sys.stdin.buffer.read()  # until the parent closes it
    http.stop(STOP_TIMEOUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
