"""Reading a request's body, within bounds of size, time and the memory of all bodies together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from spmd_serve.errors import OverloadedError, RequestError

READ_TIMEOUT = 60.0  # seconds for the whole body
BODIES_AT_ONCE = 32  # bodies of the largest size that may be held together
# What a header may say of a body that is read as it comes.
_PLAIN = {"Content-Encoding": "identity", "Transfer-Encoding": "chunked"}


class BodyReader:
    """Reads bodies of at most `limit` bytes; owned by the event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._budget = limit * BODIES_AT_ONCE
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body; it counts as held until the block is left.

        Raises:
            RequestError: encoded (415), too large (413), too slow (408), cut off (499).
            OverloadedError: all bodies together are too large now, or the server stops before this one has come.
        """
        held = 0
        try:
            for header, plain in _PLAIN.items():
                encoding = ", ".join(request.headers.getlist(header))
                if encoding.strip().lower() not in ("", plain):
                    raise RequestError(
                        f"{header} '{encoding[:100]}' is not supported; send the body as it is",
                        status=415,
                        code="unsupported_content_encoding",
                    )
            announced = request.headers.get("content-length", "")
            if announced.isdigit() and int(announced) > self._limit:
                raise self._too_large()
            parts: list[bytes] = []
            try:
                async with asyncio.timeout(READ_TIMEOUT):
                    async for part in request.stream():
                        held += len(part)
                        self._held += len(part)
                        if held > self._limit:
                            raise self._too_large()
                        if self._held > self._budget:
                            raise OverloadedError("too many large requests at once; try later")
                        parts.append(part)
            except TimeoutError:
                raise RequestError(f"the body did not come within {READ_TIMEOUT:g} s", status=408) from None
            except asyncio.CancelledError:  # uvicorn's, when the time for open requests is up
                raise OverloadedError("the server is shutting down", retry_after=5) from None
            except ClientDisconnect:
                # Nobody gets it, but it is counted: by the status that nginx has for this, for nothing wrong was asked.
                raise RequestError("the client left before the body was complete", status=499) from None
            yield b"".join(parts)
        finally:
            self._held -= held

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body is larger than {self._limit} bytes (--max-body-size)", status=413, code="body_too_large"
        )
