"""Code that all routes share: the server's context, API keys, routers by role, and one format for all errors."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import Send

from polar_proxy.api_models import API_PREFIX, ErrorResponse, Role
from polar_proxy.atomic_file import create_file, replace_file
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import ApiError, PolarError, UsageError
from polar_proxy.export.processes import ExportProcesses
from polar_proxy.rollouts import RolloutService
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store
from polar_proxy.store.database import UnstorableValueError
from polar_proxy.store.repositories.names import UnknownNameError
from polar_proxy.store.repositories.training import MissingLinesError
from polar_proxy.store.service.feed import LeaseExpiredError

T = TypeVar("T")

log = logging.getLogger(__name__)

Authenticate = Callable[[Request], Awaitable[Role]]
"""A function that returns the role of a request's sender. Raises ApiError (401, 403)."""

_ERROR_TEXTS = {
    400: "Invalid request.",
    401: "The key is missing or unknown.",
    404: "Not found.",
    409: "Conflicts with the current state.",
    422: "The request does not match the schema; `detail` names the fields.",
    503: "The server, or a part that it needs, cannot answer now.",
}
HEARTBEAT_SECONDS = 15.0
"""Time without an event after which a stream sends a comment, so that no proxy closes the connection."""
_POLL_SECONDS = 0.1
KEY_FILE = "api-key"
_NEW_KEY = "`polar key new` makes one, on the server's machine with the server's --db."


@dataclass(frozen=True)
class ApiContext:
    """The objects that the routes of one API server use."""

    store: Store
    settings: Settings
    service: RolloutService | None = None
    """The rollout service of this process, if it has one."""
    engine: Engine | None = None
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """The engines of the settings [engines], by name."""
    from_this_process: bool = False
    """True if the requests come from a command that runs in this process. Such requests may use all of this machine."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server stops, so that streams end."""
    exports: ExportProcesses | None = None
    """Processes that make exports. If None, exports are made in this process."""

    def wake(self) -> None:
        """Let the rollout service look at the queue now."""
        if self.service is not None:
            self.service.worker.wake()


@dataclass(frozen=True)
class Routers:
    """The API's routers. All routes of one router may be used by the same roles."""

    admin: APIRouter
    trainer: APIRouter
    """Routes that trainers and admins may use."""


def make_routers() -> Routers:
    return Routers(_router(frozenset({"admin"})), _router(frozenset({"admin", "trainer"})))


def server_state(context: ApiContext, authenticate: Authenticate | None = None) -> dict[str, Any]:
    """Return the values that the routes read from the application's state. By default, `authenticate` checks the API
    keys in the store."""
    return {"api_context": context, "api_authenticate": authenticate or by_api_key(context.store)}


async def _context_of(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.api_context
    return context


async def _store_of(request: Request) -> Store:
    return (await _context_of(request)).store


Context = Annotated[ApiContext, Depends(_context_of)]
"""A route's parameter: the context of the server that serves the request."""
ApiStore = Annotated[Store, Depends(_store_of)]
"""A route's parameter: the store of the server that serves the request."""


def not_found(kind: str, name: str) -> ApiError:
    return ApiError(f"There is no {kind} {name}.", status=404, code="not_found")


async def require(kind: str, name: str, reading: Awaitable[T | None]) -> T:
    """Await `reading` and return its result. If the result is None, raise ApiError 404 about the `kind` and `name`."""
    row = await reading
    if row is None:
        raise not_found(kind, name)
    return row


async def wait_until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Poll the condition, at least once, until it holds or the time is over. Return whether it holds."""
    deadline = time.monotonic() + seconds
    while not await condition():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        await asyncio.sleep(min(_POLL_SECONDS, remaining))
    return True


async def wait_or_undo(
    condition: Callable[[], Awaitable[bool]], seconds: float, undo: Callable[[], Awaitable[None]]
) -> bool:
    """Like `wait_until`, but call `undo` if the condition does not hold in time or the wait is interrupted."""
    holds = False
    try:
        holds = await wait_until(condition, seconds)
    finally:
        if not holds:
            await undo()
    return holds


def pause_timed_out(seconds: float, in_flight: int, of_job: str = "") -> ApiError:
    message = f"After {seconds:g} s, {in_flight} rollouts{of_job} still run, so the pause was undone."
    return ApiError(message, status=409, code="pause_timed_out", detail={"in_flight": in_flight})


def _router(roles: frozenset[Role]) -> APIRouter:
    texts = {**_ERROR_TEXTS, 403: f"The route needs a key with the role {' or '.join(sorted(roles))}."}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": texts[status]} for status in sorted(texts)
    }
    return APIRouter(
        prefix=API_PREFIX,
        # For the OpenAPI document only: guarded routes check the key themselves.
        dependencies=[Depends(HTTPBearer(auto_error=False))],
        route_class=_guarded_route(roles),
        responses=responses,
    )


def _guarded_route(roles: frozenset[Role]) -> type[APIRoute]:
    """Return a route class that checks the key before it reads the request, and answers errors with ErrorResponse."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    role: Role = await request.app.state.api_authenticate(request)
                    if role not in roles:
                        message = f"A {role} key may not {request.method} {request.url.path}: use an admin key."
                        raise ApiError(message, status=403, code="forbidden")
                    return await handle(request)
                except (PolarError, RequestValidationError, HTTPException) as error:
                    return _error_response(to_api_error(error))

            return guarded

    return GuardedRoute


class StreamedResponse(StreamingResponse):
    """A response that is sent while it is made.

    If an error ends it early, the error is logged, and the connection is closed without the end of the body, so that
    the client sees that the response is incomplete.
    """

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except PolarError as error:
            log.error("a response broke off: %s", error)


def event_stream(events: AsyncIterable[bytes]) -> StreamedResponse:
    """Return a stream of server-sent events, which no cache keeps and no reverse proxy holds back."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamedResponse(events, media_type="text/event-stream", headers=headers)


def to_api_error(error: PolarError | RequestValidationError | HTTPException) -> ApiError:
    """Return any error of a route as an error of the API."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            problems = [_problem(one) for one in error.errors()]
            first = f"{problems[0]['where']}: {problems[0]['problem']}" if problems else "unreadable"
            return ApiError(f"Bad request: {first}.", status=422, code="invalid", detail=problems)
        case LeaseExpiredError():
            return ApiError(f"{error}.", status=409, code="lease_lost")
        case MissingLinesError():
            return ApiError(f"{error}.", status=409, code="conflict", detail={"lines": error.lines})
        case UnknownNameError():
            return ApiError(str(error), status=404, code="not_found")
        case UsageError() | UnstorableValueError():
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


def new_api_key(role: Role) -> str:
    return f"polar-{role}-{secrets.token_urlsafe(32)}"


def by_api_key(store: Store) -> Authenticate:
    """Authenticate requests by the API keys in the store."""

    async def authenticate(request: Request) -> Role:
        """Return the role of the request's API key, and set `request.state.author` to the key's label and name.

        Raises ApiError: 401 without a valid key, 403 for the key of an agent's session.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorised(f"The API requires a key: Authorization: Bearer KEY. {_NEW_KEY}")
        digest = hash_key(key.strip())
        row = await store.api_keys.get(digest)
        if row is None:
            if await store.sessions.by_key(digest) is not None:
                message = "This is an agent's key: it is valid for the model routes, not for the API."
                raise ApiError(message, status=403, code="forbidden")
            raise _unauthorised(f"This key is unknown in {store.location}. {_NEW_KEY}")
        if row.revoked_at is not None:
            raise _unauthorised(f"This key was revoked in {store.location}. {_NEW_KEY}")
        request.state.author = row.title
        return row.role

    return authenticate


async def allow_all(request: Request) -> Role:
    """Give every request the role admin. For clients in this process only: they can open the database anyway."""
    request.state.author = "this machine"
    return "admin"


async def local_admin_key(store: Store, home: Path) -> Path:
    """Return the path of the file with this machine's admin key.

    If the file is missing or its key was revoked, a new key is written to the file first. If the store does not have
    the key, the key is added to the store.
    """
    path = home / KEY_FILE
    key = path.read_text().strip() if path.exists() else ""
    row = await store.api_keys.get(hash_key(key)) if key else None
    if not key or (row is not None and row.revoked_at is not None):
        key, row = new_api_key("admin"), None
        write_private(path, key)
    if row is None:
        await store.api_keys.add(hash_key(key), "admin", f"made by polar serve, in {KEY_FILE}")
    return path


def write_private(path: Path, text: str, *, keep_existing: bool = False) -> None:
    """Write a file atomically, so that only its owner can read it. Raises UsageError if it cannot be written.

    `keep_existing`: write nothing if the file exists, even if another process has just made it.
    """
    write = create_file if keep_existing else replace_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(path, f"{text}\n".encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def _unauthorised(message: str) -> ApiError:
    return ApiError(message, status=401, code="unauthorised")
