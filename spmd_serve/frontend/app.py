"""The ASGI application: routes, error bodies, access, CORS."""

from __future__ import annotations

import hashlib
import hmac
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmd_serve.config import Config
from spmd_serve.errors import RequestError
from spmd_serve.frontend.body import BodyReader
from spmd_serve.frontend.chat import ChatTemplate, find_template
from spmd_serve.frontend.dispatcher import Dispatcher
from spmd_serve.frontend.grammar import GrammarCompiler
from spmd_serve.frontend.link import FrontLink
from spmd_serve.frontend.metrics import Metrics
from spmd_serve.frontend.plan import Planner
from spmd_serve.frontend.responses import error_response
from spmd_serve.frontend.routes import VERSION, Services, make_router, unknown_path
from spmd_serve.frontend.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import ModelInfo

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ready")  # need no API key: probes have none


def make_services(config: Config, info: ModelInfo, link: FrontLink, metrics: Metrics) -> Services:
    """Load the tokenizer and join the parts of one frontend.

    Raises:
        ModelError: tokenizer or chat template cannot be used.
    """
    folder = Path(info.folder)
    tokenizer = TextTokenizer(folder, info.vocab_size)
    template = ChatTemplate(find_template(folder, config.model.chat_template), tokenizer)
    grammars = GrammarCompiler(tokenizer, info)
    identity = f"{VERSION} {info.name} {config.model.dtype} {config.model.quantization} {config.cache.kv_dtype}"
    return Services(
        info=info,
        tokenizer=tokenizer,
        planner=Planner(config, info, tokenizer, template, grammars),
        dispatcher=Dispatcher(config, link, tokenizer, metrics),
        metrics=metrics,
        bodies=BodyReader(config.server.max_body_size),
        threads=ThreadPoolExecutor(config.server.tokenizer_threads, thread_name_prefix="tokenizer"),
        fingerprint="fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12],
    )


def make_app(config: Config, services: Services) -> ASGIApp:
    """The application of one frontend."""
    api = FastAPI(title="spmd_serve", version=VERSION, redirect_slashes=False)  # see _SlashAtTheEnd
    api.include_router(make_router(services))
    api.openapi = lambda: _openapi(api)  # type: ignore[method-assign]

    @api.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @api.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return error_response(unknown_path(request.url.path))
        response = error_response(RequestError(str(error.detail), status=error.status_code))
        response.headers.update(error.headers or {})
        if response.headers.get("allow") == "GET":
            response.headers["allow"] = "GET, HEAD"  # see _HeadAsGet
        return response

    @api.exception_handler(Exception)
    async def on_exception(request: Request, error: Exception) -> Response:
        response = error_response(RequestError("internal error; the server's log has it", status=500, code="internal"))
        response.headers["connection"] = (
            "close"  # uvicorn ends the connection after it, and the client must not use it again
        )
        return response

    app: ASGIApp = _HeadAsGet(api)
    if config.server.api_key is not None:
        app = _KeyGuard(app, config.server.api_key)
    if config.server.cors_origin:
        app = CORSMiddleware(
            app, allow_origins=list(config.server.cors_origin), allow_methods=["*"], allow_headers=["*"]
        )
    return _ResponseCounter(_SlashAtTheEnd(app), services.metrics)


class _SlashAtTheEnd:
    """A slash at the end of a path means nothing.

    Starlette's redirect would be followed by few clients that post (curl prints nothing then), and behind a TLS proxy it
    would name the wrong scheme.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = dict(scope, path=scope["path"].rstrip("/") or "/")
        await self._app(scope, receive, send)


class _HeadAsGet:
    """HEAD wherever GET is: it is answered as GET, and the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = dict(scope, method="GET")
        await self._app(scope, receive, send)


class _KeyGuard:
    """401 without the key, compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, token = given.partition(b" ")  # the scheme's case does not matter (RFC 9110, 11.1)
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.lstrip(b" "), self._expected):
                error = RequestError("wrong or missing API key (Bearer token)", status=401, code="invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _ResponseCounter:
    """Counts responses by status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(message["status"])
            await send(message)

        await self._app(scope, receive, counted)


def _openapi(api: FastAPI) -> dict[str, Any]:
    """FastAPI's description with the schemas of the bodies, which the endpoints read themselves."""
    if api.openapi_schema is None:
        description = get_openapi(title=api.title, version=api.version, routes=api.routes)
        bodies = [(b, "validation") for b in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)]
        _, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        description.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        api.openapi_schema = description
    return api.openapi_schema
