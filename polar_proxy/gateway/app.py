"""The gateway as an ASGI application: the model routes, /v1/models, /healthz, /metrics."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from polar_proxy import __version__
from polar_proxy.dialects import OpenAIChat, OpenAIText
from polar_proxy.dialects.openai_common import error_object
from polar_proxy.engines.base import Engine
from polar_proxy.gateway.metrics import Metrics
from polar_proxy.gateway.turn import TurnPipeline

_MODEL_ROUTES = (("/chat/completions", OpenAIChat()), ("/completions", OpenAIText()))
_PREFIXES = ("/v1", "", "/s/{session}/v1", "/s/{session}")
"""With and without /v1: some clients' base URL includes it, some add it themselves."""


def create_app(engine: Engine, pipeline: TurnPipeline, metrics: Metrics) -> FastAPI:
    """The application; the lifetimes of engine and store belong to the caller."""
    app = FastAPI(title="Polar", version=__version__, docs_url="/docs", redoc_url=None)
    for path, dialect in _MODEL_ROUTES:
        for prefix in _PREFIXES:
            app.router.routes.append(Route(prefix + path, pipeline.route(dialect), methods=["POST"]))
    started = int(time.time())

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "polar",
            "max_model_len": engine.info.context_length,
        }

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_card(engine.info.model)]})

    async def model(request: Request) -> Response:
        # Any name is answered by the one engine, so any name exists.
        return JSONResponse(model_card(request.path_params["model"]))

    for prefix in _PREFIXES:
        app.router.routes.append(Route(prefix + "/models", models, methods=["GET"]))
        app.router.routes.append(Route(prefix + "/models/{model:path}", model, methods=["GET"]))

    @app.get("/healthz")
    async def healthz() -> Response:
        """200 when calls can be answered, else 503 with the reason."""
        reason = await engine.health()
        info = engine.info
        body = {
            "status": "ok" if reason is None else "unhealthy",
            "reason": reason,
            "version": __version__,
            "engine": {"kind": info.engine, "version": info.version, "model": info.model},
            "weight_version": await engine.weight_version(),
        }
        return JSONResponse(body, status_code=200 if reason is None else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {_shown(request.url.path)}: {error.detail}"
        return Response(
            orjson.dumps(error_object(message, error.status_code)),
            error.status_code,
            media_type="application/json",
        )

    return app


def _shown(path: str) -> str:
    """A path without the key that `/s/{key}` may hold."""
    return "/s/.../" + path.split("/", 3)[-1] if path.startswith("/s/") else path
