"""The gateway as an ASGI application: the model routes, /v1/models, /healthz, /metrics, and what else is included."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from polar_proxy import __version__
from polar_proxy.dialects import Dialect
from polar_proxy.dialects.anthropic import HELLO_RESPONSE
from polar_proxy.dialects.google import google_model_card, google_model_list
from polar_proxy.engines.base import Engine
from polar_proxy.errors import RequestError
from polar_proxy.gateway import asgi
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.pipeline import TurnPipeline
from polar_proxy.gateway.routes import error_shape, find_route

_AGENTS = re.compile(r"(/v1|/v1alpha|/v1beta)?/models(/.*)?|/healthz|/api/hello")


class GatewayApp:
    """The model routes straight to the pipeline, everything else to FastAPI.

    A call passes no middleware: FastAPI's own costs a measurable share of a call and limits bodies to less than
    agents send. Every route is served below `/s/{key}` too, for programs that hide their key.

    A connection from inside a sandbox (`wire.INSIDE` in the scope's state) gets what an agent needs and nothing else.
    """

    def __init__(self, pipeline: TurnPipeline, rest: FastAPI) -> None:
        self._pipeline = pipeline
        self._rest = rest

    def include(self, router: APIRouter) -> None:
        """Serve these routes too, from now on."""
        self._rest.include_router(router)
        self._rest.openapi_schema = None  # it is made anew when it is asked for next

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "http":
            path_key, route = split_path(scope["path"])
            found = find_route(route, scope["query_string"])
            if found is not None:
                if scope["method"] != "POST":
                    error = RequestError(f"{route} takes POST, not {scope['method']}.", status=405)
                    await asgi.respond(send, 405, found.error_body(error), [(b"allow", b"POST")])
                elif isinstance(found, Dialect):
                    await self._pipeline.serve(found, route, path_key, scope, receive, send)
                else:
                    await self._pipeline.count(found, path_key, scope, receive, send)
                return
            if asgi.INSIDE_SANDBOX in scope.get("state", {}) and not _AGENTS.fullmatch(route):
                error = RequestError(f"{route} is not served inside a sandbox.", status=404)
                await asgi.respond(send, 404, error_shape(route).error_body(error))
                return
            scope = {**scope, "path": route}
        elif scope["type"] == "websocket":
            await asgi.refuse_websocket(receive, send)
            return
        await self._rest(scope, receive, send)


def split_path(path: str) -> tuple[str | None, str]:
    """`/s/{key}/rest` as (key, /rest); any other path as (None, path)."""
    if not path.startswith("/s/"):
        return None, path
    key, separator, rest = path[3:].partition("/")
    return key, separator + rest


def _is_googles(request: Request) -> bool:
    """Google's clients share the path `/v1/models` with OpenAI's and read another form."""
    return "x-goog-api-key" in request.headers or "x-goog-api-client" in request.headers


def create_app(engine: Engine, pipeline: TurnPipeline, metrics: GatewayMetrics) -> GatewayApp:
    """The application; the lifetimes of engine and store belong to the caller."""
    app = FastAPI(title="Polar", version=__version__, docs_url="/docs", redoc_url=None)
    started = int(time.time())
    opened = datetime.fromtimestamp(started, UTC).isoformat()

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "polar",
            "max_model_len": engine.info.context_length,
            # Anthropic's clients read the same list by these names.
            "type": "model",
            "display_name": name,
            "created_at": opened,
        }

    @app.get("/models")
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if _is_googles(request):
            return await google_models()
        card = model_card(engine.info.model)
        ends = {"has_more": False, "first_id": card["id"], "last_id": card["id"]}
        return JSONResponse({"object": "list", "data": [card], **ends})

    @app.get("/models/{model:path}")
    @app.get("/v1/models/{model:path}")
    async def one_model(model: str, request: Request) -> Response:
        if _is_googles(request):
            return await one_google_model(model)
        # Any name is answered by the one engine, so any name exists.
        return JSONResponse(model_card(model))

    @app.get("/v1alpha/models")
    @app.get("/v1beta/models")
    async def google_models() -> Response:
        return JSONResponse(google_model_list([google_model_card(engine.info.model, engine.info.context_length)]))

    @app.get("/v1alpha/models/{model:path}")
    @app.get("/v1beta/models/{model:path}")
    async def one_google_model(model: str) -> Response:
        return JSONResponse(google_model_card(model, engine.info.context_length))

    @app.api_route("/api/hello", methods=["GET", "HEAD"], include_in_schema=False)
    async def hello() -> Response:
        return Response(HELLO_RESPONSE, media_type="application/json")

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
        path = request.url.path
        told = RequestError(f"{request.method} {path}: {error.detail}", status=error.status_code)
        return Response(error_shape(path).error_body(told), error.status_code, media_type="application/json")

    return GatewayApp(pipeline, app)
