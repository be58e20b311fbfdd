"""Adding routes that are already built to an application."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI


def add_router(app: FastAPI, router: APIRouter, **state: object) -> None:
    """Serve the routes of `router` as they are. `state`: values that they read from `request.app.state`.

    `include_router` would build each route again at the first request, which takes longer than the rest of a server's
    start.
    """
    app.router.routes.extend(router.routes)
    for name, value in state.items():
        setattr(app.state, name, value)
    app.openapi_schema = None  # generated again when it is next requested
