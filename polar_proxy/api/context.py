"""What the routes work with, and who may use which."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from polar_proxy.api_models import ErrorResponse, Role
from polar_proxy.client.errors import ApiError
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import PolarError, UsageError
from polar_proxy.rollouts import RolloutService
from polar_proxy.store import Store
from polar_proxy.store.feed import LeaseExpiredError
from polar_proxy.store.training import MissingLinesError

Authenticate = Callable[[Request], Awaitable[Role]]
"""Who asks. Raises ApiError (401, 403)."""


@dataclass(frozen=True)
class ApiContext:
    """One server of the API."""

    store: Store
    settings: Settings
    service: RolloutService | None = None
    """What works on the queue in this process, if anything does."""
    engine: Engine | None = None
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where the server stops: streams end."""

    def wake(self) -> None:
        if self.service is not None:
            self.service.scheduler.wake()


@dataclass(frozen=True)
class Routers:
    """The routes, by who may use them."""

    admin: APIRouter
    trainer: APIRouter
    """And admins."""


def make_routers(authenticate: Authenticate) -> Routers:
    return Routers(_router(authenticate, frozenset({"admin"})), _router(authenticate, frozenset({"admin", "trainer"})))


def not_found(what: str, name: str) -> ApiError:
    return ApiError(f"There is no {what} {name}.", status=404, code="not_found")


def _router(authenticate: Authenticate, roles: frozenset[Role]) -> APIRouter:
    told: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": text}
        for status, text in (
            (400, "It cannot be as asked."),
            (401, "No key, or an unknown one."),
            (403, "The key's role may not do this."),
            (404, "There is no such thing."),
            (409, "Not in the state that things are in."),
            (422, "The request is not of the form that is asked for; `detail` says where."),
            (503, "The server, or what it needs, cannot answer now."),
        )
    }
    return APIRouter(route_class=_guarded(authenticate, roles), responses=told)


def _guarded(authenticate: Authenticate, roles: frozenset[Role]) -> type[APIRoute]:
    """Routes that look at the key before they read anything else, and tell every error in the API's own form."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            serve = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    role = await authenticate(request)
                    if role not in roles:
                        raise ApiError(
                            f"A {role} key may not {request.method} {request.url.path}: it takes an admin key.",
                            status=403,
                            code="forbidden",
                        )
                    return await serve(request)
                except (PolarError, RequestValidationError, HTTPException) as error:
                    return _error_response(_to_api_error(error))

            return guarded

    return Guarded


def _to_api_error(error: PolarError | RequestValidationError | HTTPException) -> ApiError:
    """What a caller is told of it."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            found = [_problem(one) for one in error.errors()]
            first = f"{found[0]['where']}: {found[0]['problem']}" if found else "unreadable"
            return ApiError(f"Bad request: {first}.", status=422, code="invalid", detail=found)
        case LeaseExpiredError():
            return ApiError(f"{error}.", status=409, code="lease_lost")
        case MissingLinesError():
            return ApiError(f"{error}.", status=409, code="conflict", detail={"lines": error.lines})
        case UsageError():
            return ApiError(str(error), status=400, code="bad_request")
        case HTTPException():
            return ApiError(str(error.detail), status=error.status_code, code="bad_request")
    return ApiError(str(error), status=503, code="unavailable")


def _problem(error: Any) -> dict[str, str]:
    where = ".".join(str(part) for part in error["loc"] if part != "body")
    return {"where": where or "body", "problem": str(error["msg"]).removeprefix("Value error, ")}


def _error_response(error: ApiError) -> JSONResponse:
    body: dict[str, Any] = {"code": error.code, "message": str(error)}
    if error.detail is not None:
        body["detail"] = jsonable_encoder(error.detail)
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse({"error": body}, status_code=error.status, headers=headers)
