"""The HTTP side of an ingress: OpenAI's paths, `/health`, `/metrics`, and errors in OpenAI's shape."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftsmith.scripts.services.coordinate.ingress import Ingress
from draftsmith.scripts.services.coordinate.relay import error_response
from draftsmith.scripts.services.coordinate.request import CHAT, TEXT, ApiError

HEALTH_SECONDS, METRICS_SECONDS = 0.5, 5.0  # wait for the dispatcher; callers of /health have short timeouts too


def door(ingress: Ingress, well: Callable[[], Awaitable[bool]], metrics: Callable[[], Awaitable[bytes]]) -> Starlette:
    """Return an ingress's application; `well` and `metrics` ask the dispatcher, which knows all ingresses."""

    async def chat(request: Request) -> Response:
        return await ingress.complete(request, CHAT)

    async def text(request: Request) -> Response:
        return await ingress.complete(request, TEXT)

    async def models(request: Request) -> Response:
        ingress.require_key(request.headers)
        return JSONResponse(ingress.models())

    async def model(request: Request) -> Response:
        ingress.require_key(request.headers)
        return JSONResponse(ingress.model(request.path_params["name"]))

    async def health(request: Request) -> Response:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return Response(status_code=200 if await well() else 503)
        except Exception:  # the dispatcher is away
            return Response(status_code=503)

    async def counted(request: Request) -> Response:
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                return Response(await metrics(), media_type="text/plain; version=0.0.4")
        except Exception:
            return error_response(ApiError(503, "metrics: expected the dispatcher, found none", "server_error"))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, f"{request.url.path}: {error.detail}"))

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "the coordinator failed", "server_error"))  # details are in its log

    return Starlette(
        routes=[
            Route(CHAT, chat, methods=["POST"]),
            Route(TEXT, text, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", counted),
        ],
        exception_handlers={ApiError: refused, HTTPException: unknown, Exception: failed},
    )
