"""The gateway's ASGI application: model routes, /v1/models, health checks, /metrics, and routers included later.

Each model route is served with and without its version (such as `/v1`), because only some clients add the version to
the base URL. Every route is also served below `/s/{key}`, for programs that cannot send an API key. Intercepted
requests, which were addressed to a provider's host, are first mapped to these routes (`intercepted.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from polar_proxy import __version__
from polar_proxy.api_models import API_PREFIX
from polar_proxy.config import is_loopback
from polar_proxy.dialects import get_dialect
from polar_proxy.dialects.anthropic.cloud import cloud_route
from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.google.dialect import GoogleGenerateContent, google_model_card, google_route
from polar_proxy.dialects.openai_responses.compaction import ResponsesCompaction
from polar_proxy.errors import RequestError
from polar_proxy.gateway.handler import RequestHandler
from polar_proxy.gateway.hosted.intercepted import InterceptedRequest
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.docs_page import serve_docs
from polar_proxy.gateway.http.routes import add_router
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.responses.conversations import ConversationRoute, ConversationRoutes
from polar_proxy.gateway.responses.stored_responses import StoredResponseRoute, StoredResponseRoutes
from polar_proxy.gateway.responses.websocket import ResponsesWebSocket
from polar_proxy.gateway.routing import EngineRouter
from polar_proxy.terminal import LogContext
from polar_proxy.types import EngineInfo, new_id

_MODEL_ROUTES: dict[str, Dialect] = {
    "/messages": get_dialect("anthropic_messages"),
    "/chat/completions": get_dialect("openai_chat"),
    "/completions": get_dialect("openai_completions"),
    "/responses": get_dialect("openai_responses"),
    "/responses/compact": ResponsesCompaction(),
}
_TOKEN_COUNTS: dict[str, Dialect] = {
    "/messages/count_tokens": _MODEL_ROUTES["/messages"],
    "/responses/input_tokens": _MODEL_ROUTES["/responses"],
}
_ROUTES_OF_AGENTS = re.compile(r"(/v1|/v1alpha|/v1beta)?/models(/.*)?|/healthz|/api/hello")
"""Routes that are served inside a sandbox besides the model routes."""


_FOREIGN_HOST = (
    "This gateway takes requests from its own machine only, and this request has the header '{}'. "
    "If you trust this name, add it to the setting gateway.allowed_hosts."
)


class GatewayApp:
    """Sends model requests straight to the handler and everything else to FastAPI.

    A model call passes no middleware, because FastAPI's middleware takes a measurable share of a call's time. A
    connection from inside a sandbox gets only the routes that agents need.
    """

    def __init__(
        self, handler: RequestHandler, rest: FastAPI, hosts: frozenset[str] | None, sandbox_hosts: frozenset[str]
    ) -> None:
        """`hosts`: the host names that the headers `Host` and `Origin` of a request may have; None: any.

        `sandbox_hosts`: the model hosts to which a sandbox's intercepted requests may go.
        """
        self._handler = handler
        self._sandbox_hosts = sandbox_hosts
        self._stored_responses = StoredResponseRoutes(
            handler.stored_calls, handler.background, handler.session_finder, handler.forwarder
        )
        self._conversations = ConversationRoutes(
            handler.conversations, handler.session_finder, handler.read_items, handler.forwarder
        )
        self._rest = rest
        self._hosts = hosts

    def include(self, router: APIRouter, **state: object) -> None:
        add_router(self._rest, router, **state)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        request_id = new_id("req")
        with LogContext(request_id=request_id):
            await self._serve(scope, receive, asgi.with_request_id(send, request_id))

    async def _serve(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        path = scope["raw_path"].decode("latin-1")
        inside_sandbox = asgi.INSIDE_SANDBOX in scope.get("state", {})
        refuse = asgi.refuse_upgrade(send) if scope["type"] == "websocket" else send
        if self._hosts is not None and not inside_sandbox:
            foreign = foreign_host(scope["headers"], self._hosts)
            if foreign is not None:
                error = RequestError(_FOREIGN_HOST.format(foreign), status=403)
                await asgi.send_error(refuse, error, error_format(path))
                return
        path_key, path = split_path(path)
        if (intercepted := InterceptedRequest.of_scope(scope, self._sandbox_hosts)) is not None:
            if intercepted.route is None:
                await intercepted.answer(asgi.read_headers(scope), refuse, error_format(intercepted.path))
                return
            path_key, path = intercepted.key or path_key, intercepted.route
            provider_path = (intercepted.host, intercepted.target)
            scope = {**scope, "state": {**scope.get("state", {}), asgi.PROVIDER_PATH: provider_path}}
        if scope["type"] == "websocket":
            await self._serve_websocket(path, path_key, scope, receive, send)
            return
        route = find_route(path, scope["query_string"])
        if route is not None:
            dialect, counts_tokens = route
            if scope["method"] != "POST":
                await asgi.send_wrong_method(send, dialect, scope["method"], ("POST",), route=path)
            elif counts_tokens:
                await self._handler.count_tokens(dialect, path_key, scope, receive, send)
            else:
                await self._handler.handle(dialect, path, path_key, scope, receive, send)
        elif (stored := StoredResponseRoute.of_path(path)) is not None:
            await self._stored_responses.handle(stored, path_key, scope, receive, send)
        elif (conversation := ConversationRoute.of_path(path)) is not None:
            await self._conversations.handle(conversation, path_key, scope, receive, send)
        elif inside_sandbox and not _ROUTES_OF_AGENTS.fullmatch(path):
            error = RequestError(f"{path} is not served inside a sandbox.", status=404)
            await asgi.send_error(send, error, error_format(path))
        else:
            await self._rest({**scope, "path": path}, receive, send)

    async def _serve_websocket(
        self, path: str, path_key: str | None, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
    ) -> None:
        if path.removeprefix("/v1") == "/responses":
            await ResponsesWebSocket(self._handler, path, path_key, scope, send).serve(receive)
        else:
            error = RequestError(f"Only /v1/responses is served over a WebSocket, not {path}.", status=426)
            await asgi.send_error(asgi.refuse_upgrade(send), error, error_format(path))


def foreign_host(headers: asgi.Headers, hosts: frozenset[str]) -> str | None:
    """Return the first header `Host` or `Origin` whose host is neither this machine nor in `hosts`; else None.

    `Host` is the name in the URL. Checking it stops web pages whose own host name resolves to this machine (DNS
    rebinding). `Origin` names the page that sends a request.
    """
    for name, value in headers:
        if name in _HEADERS_WITH_HOST:
            host = _host_of(name, value)
            if host not in hosts and not (host and is_loopback(host)):
                return f"{name.decode().title()}: {value.decode('latin-1')}"
    return None


_HEADERS_WITH_HOST = (b"host", b"origin")


@lru_cache(maxsize=256)
def _host_of(header: bytes, value: bytes) -> str | None:
    """Return the host name in the header `Host` or `Origin`; None if there is none."""
    text = value.decode("latin-1")
    try:
        return urlsplit(text if header == b"origin" else f"//{text}").hostname
    except ValueError:  # for example an unclosed bracket
        return None


def split_path(path: str) -> tuple[str | None, str]:
    """Split the percent-encoded path `/s/{key}/rest` into (key, /rest). Any other path gives (None, path).

    The path is split before it is decoded, so the key may contain an encoded slash.
    """
    if not path.startswith("/s/"):
        return None, unquote(path)
    key, separator, rest = path[3:].partition("/")
    return unquote(key), separator + unquote(rest)


def find_route(path: str, query: bytes) -> tuple[Dialect, bool] | None:
    """Return the dialect that serves POST requests to `path`, and whether this route only counts tokens.

    Returns None if `path` is not a model route. `path` is given without the prefix `/s/{key}`. `query` is the URL's
    query string as in ASGI; Google's clients use it to choose the format of the stream.
    """
    route = path.removeprefix("/v1")
    if route in _MODEL_ROUTES:
        return _MODEL_ROUTES[route], False
    if route in _TOKEN_COUNTS:
        return _TOKEN_COUNTS[route], True
    if (cloud := cloud_route(path)) is not None:
        return cloud, False
    return google_route(path, query.decode("latin-1"))


class _ApiErrors:
    """The format of errors of the routes below `/api/v1`."""

    def error_body(self, error: RequestError, request_id: str) -> bytes:
        code = "not_found" if error.status == 404 else "bad_request"
        return orjson.dumps({"error": {"code": code, "message": str(error)}})


_API_ERRORS = _ApiErrors()


def error_format(path: str) -> asgi.ErrorFormat:
    """Return the format in which a client of this path expects errors. The path may begin with `/s/{key}`."""
    path = split_path(path)[1]
    if path.startswith(API_PREFIX):
        return _API_ERRORS
    if (route := find_route(path, b"")) is not None:
        return route[0]
    if path.removeprefix("/v1").startswith(("/messages", "/api/")):
        return _MODEL_ROUTES["/messages"]
    if path.startswith(("/v1beta", "/v1alpha", "/v1/cachedContents")) or ("/models/" in path and ":" in path):
        return GoogleGenerateContent("")
    return _MODEL_ROUTES["/chat/completions"]


@dataclass(frozen=True)
class ServerParts:
    """The parts of a server that the routes in this file use."""

    router: EngineRouter
    metrics: GatewayMetrics
    record_problem: Callable[[], Awaitable[str | None]]
    """Returns the reason why calls cannot be recorded now; None if calls can be recorded. Takes at most two seconds."""
    started_at: int

    @property
    def infos(self) -> dict[str, EngineInfo]:
        """The engines by model name; the engine of the settings section [engine] comes first."""
        found: dict[str, EngineInfo] = {}
        for served in self.router.all:
            found.setdefault(served.engine.info.model, served.engine.info)
        return found

    def info(self, model: str) -> EngineInfo:
        """Return the engine of a model; for an unknown name, the engine of the settings section [engine]."""
        return self.infos.get(model, self.router.default.served.engine.info)


def create_app(
    handler: RequestHandler, parts: ServerParts, hosts: frozenset[str] | None, sandbox_hosts: frozenset[str]
) -> GatewayApp:
    """Build the application. The caller owns the lifetime of the engines and the store. `hosts` and `sandbox_hosts`:
    see `GatewayApp`."""
    app = FastAPI(title="Polar", version=__version__, docs_url=None, redoc_url=None)
    serve_docs(app)
    add_router(app, _OTHER_ROUTES, parts=parts)
    app.add_exception_handler(HTTPException, _http_error)
    return GatewayApp(handler, app, hosts, sandbox_hosts)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    described = RequestError(f"{request.method} {path}: {error.detail}", status=error.status_code)
    headers, body = asgi.error_response(described, error_format(path))
    return Response(body, error.status_code, {name.decode(): value.decode() for name, value in headers})


_OTHER_ROUTES = APIRouter()
"""The routes of the model list, health checks and metrics. They are built once per process, for all servers."""


@_OTHER_ROUTES.get("/models")
@_OTHER_ROUTES.get("/v1/models")
@_OTHER_ROUTES.get("/v1alpha/models")
@_OTHER_ROUTES.get("/v1beta/models")
async def models(request: Request) -> Response:
    parts = _parts(request)
    if _is_google_client(request):
        return JSONResponse({"models": [google_model_card(name, info) for name, info in parts.infos.items()]})
    cards = [_model_card(parts, name) for name in parts.infos]
    page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return JSONResponse({"object": "list", "data": cards, **page})


@_OTHER_ROUTES.get("/models/{model:path}")
@_OTHER_ROUTES.get("/v1/models/{model:path}")
@_OTHER_ROUTES.get("/v1alpha/models/{model:path}")
@_OTHER_ROUTES.get("/v1beta/models/{model:path}")
async def one_model(model: str, request: Request) -> Response:
    parts = _parts(request)
    if _is_google_client(request):
        return JSONResponse(google_model_card(model, parts.info(model)))
    # An engine answers under any model name, so every name exists.
    return JSONResponse(_model_card(parts, model))


@_OTHER_ROUTES.api_route("/api/hello", methods=["GET", "HEAD"], include_in_schema=False)
async def hello() -> Response:
    """Answer the request (HEAD) with which Claude Code checks that the server is up."""
    return JSONResponse({"message": "hello"})


@_OTHER_ROUTES.get("/healthz")
async def healthz() -> Response:
    """Return 200: the process is alive."""
    return JSONResponse({"status": "ok", "version": __version__})


@_OTHER_ROUTES.get("/readyz")
async def readyz(request: Request) -> Response:
    """Return 200 if calls can be recorded and sampled, else 503. If either is impossible, the body says why."""
    parts = _parts(request)
    record, sample = await asyncio.gather(parts.record_problem(), parts.router.problem())
    info = parts.router.default.served.engine.info
    body = {
        "status": "ok" if record is None and sample is None else "unavailable",
        "version": __version__,
        "record": {"ok": record is None, "reason": record},
        "sample": {"ok": sample is None, "reason": sample},
        "engine": {"kind": info.engine, "version": info.version, "model": info.model},
    }
    return JSONResponse(body, status_code=200 if body["status"] == "ok" else 503)


@_OTHER_ROUTES.get("/metrics")
async def prometheus(request: Request) -> Response:
    return Response(_parts(request).metrics.render(), media_type="text/plain; version=0.0.4")


def _parts(request: Request) -> ServerParts:
    parts: ServerParts = request.app.state.parts
    return parts


def _model_card(parts: ServerParts, name: str) -> dict[str, Any]:
    info = parts.info(name)
    return {
        "id": name,
        "object": "model",
        "created": parts.started_at,
        "owned_by": "polar",
        "max_model_len": info.context_length,
        "engine": info.engine,
        # Anthropic's clients read the same list by these names.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(parts.started_at, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": info.context_length,
        "max_tokens": info.max_answer or info.context_length,
    }


def _is_google_client(request: Request) -> bool:
    """Return whether the client is Google's. Google's and OpenAI's clients both request `/v1/models`."""
    if request.url.path.startswith(("/v1alpha", "/v1beta")):
        return True
    return "x-goog-api-key" in request.headers or "x-goog-api-client" in request.headers
