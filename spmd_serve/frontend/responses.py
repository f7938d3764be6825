"""ASGI responses that wait for a generation, and notice when their client leaves."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spmd_serve.errors import RequestError
from spmd_serve.frontend.answers import error_body, whole_answer
from spmd_serve.frontend.dispatcher import Dispatcher
from spmd_serve.frontend.generation import Generation
from spmd_serve.frontend.logprobs import make_prompt_json
from spmd_serve.frontend.streaming import EventStream
from spmd_serve.frontend.tokenizer import TextTokenizer

CONNECTION = "spmd_serve.connection"  # in scope["extensions"]: the HTTP server's generation.Connection
_EVENT_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class JsonResponse(Response):
    """JSON by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_response(error: RequestError) -> JsonResponse:
    """OpenAI's error body with the error's status."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonResponse(error_body(error), status_code=error.status, headers=headers)


class GenerationResponse(Response):
    """The answer of one generation, whole or as a stream. However it ends, what still runs is aborted."""

    def __init__(
        self,
        generation: Generation,
        dispatcher: Dispatcher,
        tokenizer: TextTokenizer,
        threads: ThreadPoolExecutor,
        identity: dict[str, Any],
    ) -> None:
        self._generation = generation
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._threads = threads
        self._identity = identity
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._generation.plan.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        finally:
            watcher.cancel()
            self._dispatcher.release(self._generation)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.client_left = True
        self._dispatcher.release(self._generation)
        self._generation.wake()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        while not generation.over:
            await generation.wait()
        if generation.error is not None:
            await error_response(generation.error)(scope, receive, send)
        elif not generation.client_left:
            # On a thread, because log-probabilities of a long prompt are a hundred thousand objects.
            response = await asyncio.get_running_loop().run_in_executor(self._threads, self._answer)
            await response(scope, receive, send)

    def _answer(self) -> Response:
        body = whole_answer(self._generation, self._identity, self._tokenizer)
        return Response(body, media_type=JsonResponse.media_type)

    async def _stream(self, send: Send) -> None:
        """Send events as they come, the head with the first one, so that what fails before it gets its own status.

        While this task waits, the dispatcher hands pieces straight to the connection: waking a task for every token,
        through a dozen coroutines of the framework, would cost more than all the rest. The task takes over whenever
        the connection is full, and at the end.
        """
        generation, connection = self._generation, self._generation.connection
        stream = EventStream(generation, self._identity, self._tokenizer)
        loop = asyncio.get_running_loop()

        def push() -> bool:
            if connection.writable and stream.unprepared() is None and (data := stream.take()):
                connection.write_chunk(data)
            return not generation.ready

        started = False
        while not generation.client_left:
            while (choice := stream.unprepared()) is not None:
                await loop.run_in_executor(self._threads, make_prompt_json, choice, self._tokenizer)
            data = stream.take()
            over = generation.over and not generation.ready
            if over:
                if generation.error is not None and not started and not data:
                    raise generation.error
                data += stream.end()
            if data:
                generation.sending_since = time.monotonic()
                if not started:
                    # A list of its own, because CORS adds to it.
                    head = {"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM_HEADERS)}
                    await send(head)
                    started = True
                await send({"type": "http.response.body", "body": data, "more_body": not over})
                generation.sending_since = None
            if over:
                return
            if generation.ready:
                await asyncio.sleep(0)  # a client that reads makes no `send` wait: let the others have their turn
            generation.push = push if started else None
            await generation.wait()
            generation.push = None
