"""The endpoints."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

import spmd_serve
from spmd_serve.errors import RequestError
from spmd_serve.frontend.body import BodyReader
from spmd_serve.frontend.dispatcher import Dispatcher
from spmd_serve.frontend.metrics import Metrics
from spmd_serve.frontend.plan import Planner, RequestPlan
from spmd_serve.frontend.responses import CONNECTION, GenerationResponse, JsonResponse
from spmd_serve.frontend.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import ModelInfo, ServiceState

logger = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = spmd_serve.__version__


@dataclass(frozen=True)
class Services:
    """What the endpoints work with; made once for a frontend."""

    info: ModelInfo
    tokenizer: TextTokenizer
    planner: Planner
    dispatcher: Dispatcher
    metrics: Metrics
    bodies: BodyReader
    threads: ThreadPoolExecutor
    fingerprint: str


def _schema_of(body: type[Body]) -> dict[str, Any]:
    """OpenAPI's requestBody. (The endpoints read bodies themselves: FastAPI's own way has no limits and no orjson.)"""
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def make_router(services: Services) -> APIRouter:
    """All routes over `services`."""
    router = APIRouter()
    info, planner, dispatcher = services.info, services.planner, services.dispatcher

    async def planned(request: Request, make: Callable[[bytes], T]) -> T:
        """`make(body)` on a tokenizer thread."""
        async with services.bodies.read(request) as data:
            return await asyncio.get_running_loop().run_in_executor(services.threads, make, data)

    async def generate(request: Request, make: Callable[[bytes], RequestPlan], prefix: str, kind: str) -> Response:
        dispatcher.check_ready()
        plan = await planned(request, make)
        identifier = f"{prefix}-{uuid.uuid4().hex}"
        generation = dispatcher.submit(plan, request.scope["extensions"][CONNECTION])
        logger.debug("%s: %d sequences for user '%s'", identifier, len(generation.choices), plan.user)
        identity = {
            "id": identifier,
            "object": kind + (".chunk" if plan.chat and plan.stream else ""),
            "created": generation.created,
            "model": plan.model,
            "system_fingerprint": services.fingerprint,
        }
        return GenerationResponse(generation, dispatcher, services.tokenizer, services.threads, identity)

    @router.post("/v1/completions", openapi_extra=_schema_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await generate(request, planner.completion, "cmpl", "text_completion")

    @router.post("/v1/chat/completions", openapi_extra=_schema_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await generate(request, planner.chat, "chatcmpl", "chat.completion")

    @router.post("/tokenize", openapi_extra=_schema_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Text or a chat to token ids."""
        return JsonResponse(await planned(request, planner.tokenize))

    @router.post("/detokenize", openapi_extra=_schema_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Token ids to text."""
        return JsonResponse(await planned(request, planner.detokenize))

    model_card = {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "spmd_serve",
        "root": info.name,
        "max_model_len": info.lengths.max_model_len,
    }

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return JsonResponse({"object": "list", "data": [model_card]})

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """One model by its name."""
        planner.check_model(model_id)
        return JsonResponse(model_card)

    @router.get("/health")
    @router.get("/ready")
    async def health() -> Response:
        """200 while requests are served; 503 with the reason otherwise."""
        ready = dispatcher.state == ServiceState.READY
        content = {"status": dispatcher.state.name.lower(), "reason": dispatcher.reason}
        return JsonResponse(content, status_code=200 if ready else 503)

    @router.get("/version")
    async def version() -> Response:
        """The server's version."""
        return JsonResponse({"version": VERSION})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' exposition text."""
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def unknown_path(path: str) -> RequestError:
    """404 for a path that is none of ours."""
    return RequestError(f"there is no {path[:200]} here; see /docs", status=404, code="not_found")
