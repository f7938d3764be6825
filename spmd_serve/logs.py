"""Log lines: one per event, with the rank and, where there is one, the step. Nobody who reads them, or does not, holds us up."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import stat
import time
from collections.abc import Callable

PATIENCE_S = 0.2  # how long a line may wait for a reader of stderr that is behind
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029]")


class _LineFormatter(logging.Formatter):
    """`12:34:56 INFO rank 1 step 57 step_loop: message`. A traceback follows on its own lines.

    Clients' words (a user, a path) can neither end a line, and so forge another, nor speak to a terminal.
    """

    def __init__(self, who: str, step: Callable[[], int | None]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(where)s %(module)s: %(message)s", "%H:%M:%S")
        self._who = who
        self._step = step

    def formatMessage(self, record: logging.LogRecord) -> str:
        step = self._step()
        record.where = self._who + ("" if step is None else f" step {step}")
        record.message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.message)
        details = getattr(record, "details", "")  # another process's traceback
        return super().formatMessage(record) + (f"\n{details}" if details else "")


class _StderrHandler(logging.Handler):
    """Writes to a descriptor without ever waiting long: a pipe that nobody empties would stop the server with its next line.

    What finds no room within PATIENCE_S is lost, and what follows it too until there is room; then the log says how many
    lines that were.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        with contextlib.ExitStack() as opened:
            self._descriptor, self._write = _without_waiting(descriptor, opened)
            self._opened = opened.pop_all()
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it as lost."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
            if self._lost:  # what came last may have been cut
                line = b"\n(%d lines of the log are lost: nobody has read them)\n%b" % (self._lost, line)
            self._lost = 0 if self._put(line) else self._lost + 1
        except OSError:  # the reader has gone
            pass
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """The descriptor that was given stays open."""
        self._opened.close()
        super().close()

    def _put(self, data: bytes) -> bool:
        """False if not all of it could be written."""
        deadline = time.monotonic() + (0.0 if self._lost else PATIENCE_S)
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        while data:
            try:
                data = data[self._write(data) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    return False
                room.poll(1000 * left)
        return True


def _without_waiting(descriptor: int, opened: contextlib.ExitStack) -> tuple[int, Callable[[bytes], int]]:
    """A descriptor of the same file, and a `write` to it that raises BlockingIOError where it would wait.

    O_NONBLOCK on the descriptor itself would be everybody's who has inherited it: torchrun's, the shell's.
    """
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(kind):  # systemd's journal
        connection = opened.enter_context(socket.socket(fileno=os.dup(descriptor)))
        return connection.fileno(), lambda data: connection.send(data, socket.MSG_DONTWAIT)
    if stat.S_ISFIFO(kind) or os.isatty(descriptor):
        with contextlib.suppress(OSError):  # no /proc, or it belongs to another user: then writes wait as they ever did
            descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            opened.callback(os.close, descriptor)
    return descriptor, lambda data: os.write(descriptor, data)


def set_up_logs(level: str, rank: int, step: Callable[[], int | None], part: str = "") -> None:
    """Send this process's log to stderr. Ranks other than 0 speak from WARNING on, unless `level` is debug.

    Args:
        level: debug, info, warning or error.
        step: called for each line; the step that the rank is in, or None.
        part: which process of the rank this is, if it has several.
    """
    threshold = logging.getLevelName(level.upper())
    if rank > 0 and level != "debug":
        threshold = max(threshold, logging.WARNING)
    handler = _StderrHandler(2)
    handler.setFormatter(_LineFormatter(f"rank {rank}{part and ' '}{part}", step))
    root = logging.getLogger()
    for before in root.handlers:
        before.close()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    if level != "debug":
        for chatty in ("httpx", "httpcore", "urllib3", "filelock", "asyncio"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        # What is wrong with a client's request is told to the client; a line for each would be a flood that anybody can send.
        logging.getLogger("uvicorn.error").setLevel(max(threshold, logging.ERROR))
