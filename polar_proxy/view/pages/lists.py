"""The overview and the lists: rollouts, sessions, groups and jobs, newest first.

Lists are paged by id (`before`), so a page costs the same at any depth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from polar_proxy import records
from polar_proxy.api.service import read_service_state
from polar_proxy.errors import UsageError
from polar_proxy.export.exporter import FORMATS
from polar_proxy.store import RolloutRow
from polar_proxy.store.schema import FINAL_STATUSES, ROLLOUT_STATUSES
from polar_proxy.view.context import ViewContext
from polar_proxy.view.query_cache import QueryCache

PAGE = 50
_SHORT = 12
"""Number of rows of each table on the overview."""
_RUNNING = 40
"""Maximum number of running rollouts on the overview."""
_STATE_SECONDS = 1.0
"""Maximum age of the state of server and engine that an overview shows."""
Before = Annotated[str | None, Query(description="Show only rows that are older than the row with this id.")]
Where = Annotated[str, Query(description="Conditions such as `reward>=1, harness=codex`.")]


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    _add_overview(pages, view)
    _add_rollouts(pages, view)
    _add_others(pages, view)


def _add_overview(pages: APIRouter, view: ViewContext) -> None:
    store = view.store
    states = QueryCache(_STATE_SECONDS)

    @pages.get("/")
    async def overview(request: Request) -> Response:
        running, rollouts, sessions, jobs, groups, runs = await asyncio.gather(
            store.rollouts.find(statuses=ROLLOUT_STATUSES - FINAL_STATUSES - {"queued"}, limit=_RUNNING),
            store.rollouts.find(limit=_SHORT),
            store.sessions.recent(_SHORT),
            store.jobs.find(limit=_SHORT),
            store.groups.recent(_SHORT),
            store.training.runs(),
        )
        return await view.page(
            request,
            "overview.html",
            running=running[::-1],
            rollouts=rollouts[::-1],
            sessions=sessions,
            jobs=jobs,
            groups=groups,
            runs=runs[:_SHORT],
        )

    @pages.get("/view/parts/service")
    async def service(request: Request) -> Response:
        """Return the state of server and engine. The browser loads it separately, because an engine may answer
        slowly."""
        state = await states.get("service", lambda: read_service_state(view.api))
        return await view.page(request, "parts/service.html", state=state)


def _add_rollouts(pages: APIRouter, view: ViewContext) -> None:
    store = view.store

    @pages.get("/view/rollouts")
    async def rollouts(request: Request, where: Where = "", before: Before = None) -> Response:
        rows: Sequence[RolloutRow] = ()
        problem = note = None
        try:
            rows = (await store.rollouts.find(where=where or None, limit=PAGE, before=before))[::-1]
            if not rows and where and before is None:
                note = await store.rollouts.explain_no_match(where)
        except UsageError as error:
            problem = str(error)
        older = _older(request, rows[-1].rollout_id if len(rows) == PAGE else None, where=where)
        return await view.page(
            request,
            "rollouts.html",
            status=200 if problem is None else 400,
            rows=rows,
            where=where,
            before=before,
            problem=problem,
            note=note,
            older=older,
            formats=FORMATS,
        )


def _add_others(pages: APIRouter, view: ViewContext) -> None:
    store = view.store

    @pages.get("/view/sessions")
    async def sessions(request: Request, before: Before = None) -> Response:
        rows = (await records.list_sessions(store, limit=PAGE, before=before)).sessions
        return await show_list(request, "sessions.html", rows, before, rows[-1].session_id if rows else None)

    @pages.get("/view/groups")
    async def groups(request: Request, before: Before = None) -> Response:
        rows = await store.groups.recent(PAGE, before)
        return await show_list(request, "groups.html", rows, before, rows[-1].group_id if rows else None)

    @pages.get("/view/jobs")
    async def jobs(request: Request, before: Before = None) -> Response:
        rows = (await records.list_jobs(store, limit=PAGE, before=before)).jobs
        return await show_list(request, "jobs.html", rows, before, rows[-1].job_id if rows else None)

    async def show_list(
        request: Request, template: str, rows: Sequence[Any], before: str | None, last: str | None
    ) -> Response:
        older = _older(request, last if len(rows) == PAGE else None)
        return await view.page(request, template, rows=rows, before=before, older=older)


def _older(request: Request, last: str | None, **query: str) -> str | None:
    """Return the link to the next page; None on the last page."""
    if last is None:
        return None
    given = {name: value for name, value in query.items() if value}
    return f"{request.url.path}?{urlencode({**given, 'before': last})}"
