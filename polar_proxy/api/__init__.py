"""The HTTP API: jobs, rollouts, rewards, the trainer feed, training runs, and the server itself.

All routes are below `/api/v1`. They are served by the gateway, or by an application of their own.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request

from polar_proxy import __version__
from polar_proxy.api import jobs, keys, records, rollouts, service, training
from polar_proxy.api.background import BackgroundLoops
from polar_proxy.api.context import (
    ApiContext,
    Authenticate,
    allow_all,
    local_admin_key,
    make_routers,
    new_api_key,
    server_state,
)
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import ApiError
from polar_proxy.gateway.http.docs_page import serve_docs
from polar_proxy.gateway.http.routes import add_router
from polar_proxy.rollouts import RolloutService
from polar_proxy.store import Store

__all__ = [
    "API_ROUTES",
    "ApiContext",
    "BackgroundLoops",
    "allow_all",
    "create_api",
    "local_admin_key",
    "new_api_key",
    "server_state",
]

_others = make_routers().trainer


@_others.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
async def unknown_route(path: str, request: Request) -> None:
    raise ApiError(f"There is no {request.method} {request.url.path}.", status=404, code="not_found")


def _all_routes() -> APIRouter:
    resources = (jobs, rollouts, records, keys, training, service)
    admin = [resource.routers.admin for resource in resources]
    trainer = [resource.routers.trainer for resource in resources]
    router = APIRouter()
    for one in (*admin, *trainer, _others):
        router.routes.extend(one.routes)
    return router


API_ROUTES = _all_routes()
"""All routes. They read their server's context and keys from the application (`server_state`)."""


def create_api(
    store: Store,
    *,
    settings: Settings,
    service: RolloutService | None = None,
    engine: Engine | None = None,
    auth: Authenticate | None = None,
    from_this_process: bool = False,
) -> FastAPI:
    """Return an ASGI application with the API only. Run `BackgroundLoops` as well if callbacks must be sent."""
    app = FastAPI(title="Polar", version=__version__, docs_url=None, redoc_url=None)
    serve_docs(app)
    context = ApiContext(store, settings, service, engine, from_this_process=from_this_process)
    add_router(app, API_ROUTES, **server_state(context, auth))
    return app
