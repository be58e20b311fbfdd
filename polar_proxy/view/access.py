"""Access to the pages: a login with an API key sets a cookie, and the visitor then has the role of the key.

The cookie is not the key. It is `NAME.EXPIRY.MAC`: the name of an API key, and a MAC made with the key's stored hash.
The cookie opens nothing but the pages, because browsers send it to other servers on the same host too (cookies have no
port). It is valid for seven days or until the key is revoked, on every server of the database.

On loopback no login is needed to read, if the gateway takes unknown keys there (`gateway.require_known_keys`) and no
proxy forwarded the request. Every change needs a login, because an agent in a process sandbox also connects from
loopback and must not reward itself. The gateway's sockets inside sandboxes do not serve the pages.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from polar_proxy.api.context import by_api_key, to_api_error
from polar_proxy.api_models import Role
from polar_proxy.config import is_loopback
from polar_proxy.errors import ApiError, PolarError
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store
from polar_proxy.store.repositories.sessions import ApiKeyRow

LOGIN = "/view/login"
COOKIE = "polar_view"
COOKIE_SECONDS = 7 * 24 * 3600
_EXPIRY = re.compile(r"[0-9]{1,12}")
_READING = ("GET", "HEAD")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, a form's request would have the Origin null
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
ShowError = Callable[[Request, ApiError], Awaitable[Response]]


class LoginRequiredError(PolarError):
    """The page needs a login."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request. `name`: the label and name of the sender's API key; None without a login."""

    role: Role
    name: str | None


@dataclass(frozen=True)
class PageAccess:
    """Decides who may see the pages of one server."""

    store: Store
    open_on_loopback: bool
    """True if programs of this machine may read the pages without a login. Every change needs a login."""

    async def visitor(self, request: Request) -> Visitor:
        """Return the request's sender. Raises LoginRequiredError if a login is needed, ApiError for a bad API key."""
        if "authorization" in request.headers:
            role = await by_api_key(self.store)(request)
            return Visitor(role, request.state.author)
        row = await self._key_of_cookie(request.cookies.get(COOKIE, ""))
        if row is not None:
            return Visitor(row.role, row.title)
        if self.open_on_loopback and request.method in _READING and _is_local(request):
            return Visitor("trainer", None)
        raise LoginRequiredError("This page needs a login with an API key.")

    async def log_in(self, key: str, response: Response, *, secure: bool) -> bool:
        """If the API key is valid, set a login cookie in the response and return True, else return False."""
        key_hash = hash_key(key.strip())
        row = await self.store.api_keys.get(key_hash)
        if row is None or row.revoked_at is not None:
            return False
        value = make_cookie(row, key_hash, int(time.time()) + COOKIE_SECONDS)
        response.set_cookie(
            COOKIE, value, max_age=COOKIE_SECONDS, path="/", secure=secure, httponly=True, samesite="strict"
        )
        return True

    async def _key_of_cookie(self, value: str) -> ApiKeyRow | None:
        """Return the API key that a valid cookie was made for; None for any other cookie."""
        name, _, rest = value.partition(".")
        expiry = rest.partition(".")[0]
        if _EXPIRY.fullmatch(expiry) is None or int(expiry) <= time.time():
            return None
        key_hash = await self.store.api_keys.find_hash(name)
        row = None if key_hash is None else await self.store.api_keys.get(key_hash)
        if row is None or key_hash is None or row.revoked_at is not None:
            return None
        is_valid = hmac.compare_digest(make_cookie(row, key_hash, int(expiry)).encode(), value.encode())
        return row if is_valid else None


def make_cookie(row: ApiKeyRow, key_hash: bytes, expiry: int) -> str:
    """Return a cookie for an API key. The cookie is valid until `expiry`, in seconds since the epoch."""
    text = f"{row.name}.{expiry}"
    return f"{text}.{hmac.digest(key_hash, f'polar view {text}'.encode(), 'sha256').hex()}"


def _is_local(request: Request) -> bool:
    """Return whether a program of this machine sent the request, and no proxy forwarded it."""
    peer = request.client.host if request.client is not None else ""
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    return is_loopback(peer) and is_loopback(host) and not any(name in request.headers for name in _FORWARDED)


def require_same_origin(request: Request) -> None:
    """Raise ApiError unless a page of this server sends the request."""
    origin = urlsplit(request.headers.get("origin", "")).netloc
    if not origin or origin != request.headers.get("host"):
        raise ApiError("Only a page of this server may send this request.", status=403, code="forbidden")


def page_route(access: PageAccess, show_error: ShowError) -> type[APIRoute]:
    """Return a route class that checks access first, adds the security headers, and shows each error as a page."""

    class PageRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    request.state.visitor = await access.visitor(request)
                    if request.method not in _READING:
                        require_same_origin(request)
                    response = await handle(request)
                except LoginRequiredError:
                    response = _to_login(request)
                except (PolarError, RequestValidationError, HTTPException) as error:
                    response = await show_error(request, to_api_error(error))
                return with_headers(response)

            return guarded

    return PageRoute


def with_headers(response: Response) -> Response:
    """Add the security headers. Pages are not cached, because they show recorded conversations."""
    response.headers.update(HEADERS)
    response.headers.setdefault("cache-control", "no-store")
    return response


def _to_login(request: Request) -> Response:
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{LOGIN}?next={quote(here, safe='')}", status_code=303)


def safe_next(path: str) -> str:
    """Return `path` if it is a page of this server, else `/`. The browser goes there after the login."""
    is_ours = path == "/" or path.startswith(("/?", "/view/"))
    return path if is_ours and "\\" not in path and not any(ord(letter) < 33 for letter in path) else "/"
