"""One process of the HTTP load generator: `python -m spmd_serve.bench.client` reads a job from standard input.

It speaks HTTP/1.1 over plain asyncio streams and looks only for the events' borders, so that the client is not what is
measured. A line with a number on standard output tells that it is ready for the job, and then progress; the result is one
line of JSON.
"""

from __future__ import annotations

import asyncio
import sys
import time
from urllib.parse import urlsplit

import msgspec
import orjson

from spmd_serve.bench.stats import Timings

PROGRESS_INTERVAL = 0.5  # seconds


class Job(msgspec.Struct):
    """What one client process sends.

    Attributes:
        bodies: one request each, all of them streams with include_usage.
        concurrency: how many are open at once.
        api_key: sent as a Bearer token, if not empty.
        done_line: a stream is complete with the line "data: [DONE]" only; other servers may not send it.
    """

    url: str
    path: str
    bodies: list[msgspec.Raw]
    concurrency: int
    api_key: str = ""
    done_line: bool = True


class _Client:
    def __init__(self, job: Job) -> None:
        self._job = job
        parts = urlsplit(job.url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.removesuffix("/v1") + job.path
        self._named = parts.netloc.rpartition("@")[2]
        self.timings = Timings()

    async def run(self) -> None:
        """All requests of the job."""
        bodies = iter(self._job.bodies)

        async def worker() -> None:
            for body in bodies:
                try:
                    await self._request(bytes(body))
                except OSError as error:  # the server has gone, or takes no more connections
                    self._failed(str(error))

        async def report() -> None:
            while True:
                await asyncio.sleep(PROGRESS_INTERVAL)
                print(self.timings.events, flush=True)

        reporter = asyncio.create_task(report())
        await asyncio.gather(*(worker() for _ in range(self._job.concurrency)))
        reporter.cancel()

    def _failed(self, answer: str) -> None:
        self.timings.failures += 1
        self.timings.failure = answer

    async def _request(self, body: bytes) -> None:
        timings = self.timings
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**22)
        began = last = time.perf_counter()
        key = f"authorization: Bearer {self._job.api_key}\r\n" if self._job.api_key else ""
        writer.write(
            f"POST {self._path} HTTP/1.1\r\nhost: {self._named}\r\n{key}content-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        tail = b""
        first = True
        while data := await reader.read(2**18):
            now = time.perf_counter()
            events = data.count(b"data: ")
            tail = (tail + data)[-4096:]
            if not events:
                continue
            timings.events += events
            if first:
                timings.first.append(now - began)
                first = False
            else:
                timings.between.append(now - last)
            last = now
        writer.close()
        await writer.wait_closed()
        usage = tail.rfind(b'"usage":{')
        if usage < 0 or (self._job.done_line and b"data: [DONE]" not in tail):
            self._failed(tail[-500:].decode(errors="replace"))
            return
        timings.ended.append(last - began)
        counts = orjson.loads(tail[usage + 8 : tail.index(b"}\n", usage)])
        timings.output_tokens += counts["completion_tokens"]
        timings.prompt_tokens += counts["prompt_tokens"]


def run() -> int:
    print(0, flush=True)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    client = _Client(job)
    asyncio.run(client.run())
    print(msgspec.json.encode(client.timings).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run())
