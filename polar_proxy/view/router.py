"""The routes of the web page: the pages, and their common parts (login, search, changes, assets, errors).

The overview is at `/`. All other pages are below `/view/`, where no route of the gateway or the API is.
"""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
from functools import cache
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import RedirectResponse

from polar_proxy.api import ApiContext
from polar_proxy.api.context import not_found
from polar_proxy.errors import ApiError
from polar_proxy.store.repositories.changes import Followed
from polar_proxy.view.access import COOKIE, LOGIN, PageAccess, page_route, require_same_origin, safe_next, with_headers
from polar_proxy.view.context import ViewContext
from polar_proxy.view.forms import read_form
from polar_proxy.view.pages import comparison, export, groups, lists, remarks, run, tokens, training
from polar_proxy.view.templates import ASSETS

_KIND_OF_ID = {"group_": "groups", "trc_": "traces"}


def create_view_router(api: ApiContext, *, open_on_loopback: bool, writable: bool = True) -> APIRouter:
    """Return the routes of all pages. `open_on_loopback`: requests from this machine need no login to read.
    `writable`: visitors who are logged in may give remarks and rewards."""
    access = PageAccess(api.store, open_on_loopback)
    view = ViewContext(api, access, writable)

    async def show_error(request: Request, error: ApiError) -> Response:
        return await view.page(request, "error.html", status=error.status, error=error)

    pages = APIRouter(route_class=page_route(access, show_error), include_in_schema=False)
    for kind in (lists, comparison, groups, run, tokens, training, remarks, export):
        kind.add_routes(pages, view)
    _add_search(pages, view)
    _add_changes(pages, view)

    @pages.get("/view/{path:path}")
    async def unknown_page(path: str) -> None:
        raise not_found("page", f"/view/{path}")

    router = APIRouter(include_in_schema=False)
    _add_public(router, view)
    router.routes.extend(pages.routes)
    return router


def _add_search(pages: APIRouter, view: ViewContext) -> None:
    @pages.get("/view/find")
    async def find(name: Annotated[str, Query(max_length=300)]) -> Response:
        """Redirect to the page of a record. `name`: its id, the beginning of its id, or its label."""
        return RedirectResponse(await find_page(view, name.strip()), status_code=303)


async def find_page(view: ViewContext, name: str) -> str:
    """Return the path of the page of a rollout, session, call, group, trace or training run. Raises UsageError if no
    record has the name, or if several records have it. For the id of a group or trace, the path is returned even if
    there is no such record."""
    for prefix, kind in _KIND_OF_ID.items():
        if name.startswith(prefix):
            return f"/view/{kind}/{name}"
    if await view.store.training.runs(name):
        return f"/view/training/{name}"
    found = await view.store.names.find(name)
    return f"/view/{found.kind}s/{found.record_id}"


def _add_changes(pages: APIRouter, view: ViewContext) -> None:
    @pages.get("/view/changes/{followed}")
    @pages.get("/view/changes/{followed}/{record_id}")
    async def changes(followed: Followed, record_id: str = "") -> Response:
        """Stream an event for each change of the lists or of a record."""
        return view.changes.respond(view.api, followed, record_id)


def _add_public(router: APIRouter, view: ViewContext) -> None:
    """Add the routes that need no login: the login itself and the assets."""

    @router.get(LOGIN)
    async def login_page(request: Request, next: str = "/") -> Response:
        return await show_login(request, next, "")

    @router.post(LOGIN)
    async def log_in(request: Request) -> Response:
        try:
            require_same_origin(request)
            form = await read_form(request)
        except ApiError as error:
            return await show_login(request, "/", str(error), error.status)
        where = safe_next(form.get("next", "/"))
        response: Response = RedirectResponse(where, status_code=303)
        if not await view.access.log_in(form.get("key", ""), response, secure=request.url.scheme == "https"):
            return await show_login(request, where, "This is not a valid API key. `polar key new` makes one.", 403)
        return with_headers(response)

    @router.post("/view/logout")
    async def log_out(request: Request) -> Response:
        try:
            require_same_origin(request)
        except ApiError as error:
            return await show_login(request, "/", str(error), error.status)
        response = RedirectResponse("/", status_code=303)
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return with_headers(response)

    @router.get("/view/assets/{name}")
    async def asset(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
        content = (await asyncio.to_thread(_assets)).get(name)
        if content is None:
            return with_headers(Response(status_code=404))
        # A browser asks each time, so that it never has the scripts of one version and the pages of another.
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if if_none_match == tag:
            return with_headers(Response(status_code=304, headers=headers))
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return with_headers(Response(content, media_type=media_type, headers=headers))

    async def show_login(request: Request, where: str, problem: str, status: int = 200) -> Response:
        page = await view.page(request, "login.html", status=status, next=safe_next(where), problem=problem)
        return with_headers(page)


@cache
def _assets() -> dict[str, bytes]:
    """Return the content of each file in the folder of assets."""
    return {file.name: file.read_bytes() for file in ASSETS.iterdir() if file.is_file()}
