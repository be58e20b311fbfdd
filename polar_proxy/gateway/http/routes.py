"""Adding ready-made routes to an application."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI


def add_router(app: FastAPI, router: APIRouter, **state: object) -> None:
    """Add the routes of `router` to `app` without building them again. `state`: values for `app.state`, which the
    routes read.

    `include_router` would build each route again at the first request. This takes longer than the rest of the start.
    """
    app.router.routes.extend(router.routes)
    for name, value in state.items():
        setattr(app.state, name, value)
    app.openapi_schema = None  # generated again when it is next requested
