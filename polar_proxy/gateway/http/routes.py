"""Routes that are built once and then served by an application."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI


def add_router(app: FastAPI | APIRouter, router: APIRouter) -> None:
    """Serve the routes of `router` as they are.

    `include_router` would build each of them again at the first request, with its prefix and dependencies, which takes
    longer than the rest of a server's start. So a router gets these when it is made.
    """
    target = app.router if isinstance(app, FastAPI) else app
    target.routes.extend(router.routes)
