"""The API put together: routes below `/api/v1` for the gateway to serve, or an application of its own."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer

from polar_proxy import __version__
from polar_proxy.api import events, feed, jobs, rollouts, service, training
from polar_proxy.api.auth import KeyAuthenticator
from polar_proxy.api.context import ApiContext, Authenticate, make_routers
from polar_proxy.api_models import API_PREFIX
from polar_proxy.client.errors import ApiError
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.rollouts import RolloutService
from polar_proxy.store import Store

_ANY = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def create_router(api: ApiContext, auth: Authenticate | None = None) -> APIRouter:
    """All routes. `auth`: who asks; None: by the keys in the store."""
    made = make_routers(auth or KeyAuthenticator(api.store))
    for part in (jobs, rollouts, feed, training, events, service):
        part.add(made, api)

    @made.trainer.api_route("/{path:path}", methods=_ANY, include_in_schema=False)
    async def nothing_here(path: str, request: Request) -> None:
        raise ApiError(f"There is no {request.method} {request.url.path}.", status=404, code="not_found")

    # For the documentation: the routes look at the key themselves, before anything else of the request is read.
    whole = APIRouter(prefix=API_PREFIX, dependencies=[Depends(HTTPBearer(auto_error=False))])
    whole.include_router(made.admin)
    whole.include_router(made.trainer)
    return whole


def create_api(
    store: Store,
    *,
    settings: Settings,
    service: RolloutService | None = None,
    engine: Engine | None = None,
    auth: Authenticate | None = None,
) -> FastAPI:
    """An ASGI application of the API alone. It has no work of its own: `Housekeeping` has."""
    app = FastAPI(title="Polar", version=__version__, docs_url="/docs", redoc_url=None)
    app.include_router(create_router(ApiContext(store, settings, service, engine), auth))
    return app
