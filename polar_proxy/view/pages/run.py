"""Two pages: one shows a run (a rollout or a session, with its calls), the other shows one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from polar_proxy.api.context import require
from polar_proxy.records import original_of
from polar_proxy.store import RolloutRow
from polar_proxy.store.repositories.artifacts import ArtifactRow
from polar_proxy.store.repositories.calls import CallSummary
from polar_proxy.store.repositories.rollouts import StageRow
from polar_proxy.store.repositories.sessions import SessionSummary
from polar_proxy.store.repositories.traces import TraceSummary
from polar_proxy.types import Json
from polar_proxy.view.call_tree import draw_tree
from polar_proxy.view.context import ViewContext
from polar_proxy.view.conversation import show_call
from polar_proxy.view.diff import read_diff
from polar_proxy.view.timeline import draw_timeline

_SHOWN_BYTES = 256 * 1024
"""Maximum number of bytes of a file that a page shows. The page links to the whole file."""
_MOST_MESSAGES = 100
"""Maximum number of earlier messages that are shown with a call. The call's own page has all of them."""
MOST_CALLS = 300
"""Maximum number of calls in the tree of one page."""
_LIVE_SECONDS = 600.0
"""A session without a rollout counts as in use for this long after its last call."""
Chosen = Annotated[str | None, Query(alias="call", description="The shown call. Default: the last answered call.")]


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    store = view.store

    @pages.get("/view/rollouts/{rollout_id}")
    async def rollout_page(request: Request, rollout_id: str, chosen: Chosen = None) -> Response:
        return await show(request, await rollout_values(view, rollout_id, chosen))

    @pages.get("/view/sessions/{session_id}")
    async def session_page(request: Request, session_id: str, chosen: Chosen = None) -> Response:
        return await show(request, await session_values(view, session_id, chosen))

    async def show(request: Request, values: Json) -> Response:
        may_write = view.writable and request.state.visitor.name is not None
        return await view.page(request, "run.html", writable=view.writable, may_write=may_write, **values)

    @pages.get("/view/calls/{call_id}")
    async def call_page(request: Request, call_id: str) -> Response:
        call = await require("call", call_id, store.calls.get(call_id))
        calls = await store.calls.summaries(call.session_id)
        values = await call_values(view, calls, call_id, whole=True)
        return await view.page(request, "call.html", is_story=False, **values)

    @pages.get("/view/parts/calls/{call_id}")
    async def call_part(request: Request, call_id: str) -> Response:
        """Return a call as a part of its run's page."""
        call = await require("call", call_id, store.calls.get(call_id))
        calls = await store.calls.summaries(call.session_id)
        values = await call_values(view, calls, call_id)
        return await view.page(request, "parts/call.html", is_story=False, **values)

    @pages.get("/view/artifacts/{artifact_id}")
    async def artifact(artifact_id: str) -> Response:
        """Return a stored file. It is always sent as plain text, even if an agent wrote HTML into it."""
        row = await require("artifact", artifact_id, store.artifacts.get(artifact_id))
        return FileResponse(row.path, media_type="text/plain; charset=utf-8")


async def rollout_values(
    view: ViewContext, rollout_id: str, chosen: str | None = None, *, all_calls: bool = False
) -> Json:
    """Return the values of a rollout's page. Raises ApiError 404 if there is no such rollout.

    `all_calls`: draw the whole tree of calls, not only the page of it that contains the call `chosen`.
    """
    store = view.store
    row = await require("rollout", rollout_id, store.rollouts.get(rollout_id))
    stages, rewards, remarks, events, files, attempts = await asyncio.gather(
        store.rollouts.stages(rollout_id),
        store.rewards.of_rollout(rollout_id),
        store.remarks.of_rollout(rollout_id),
        store.rollouts.events(rollout_id),
        store.artifacts.of_rollout(rollout_id),
        store.sessions.ids_of_rollout(rollout_id),
    )
    return {
        "rollout": row,
        "repeat_of": await original_of(store, row),
        "task": await store.tasks.get(row.task_id),
        "rewards": rewards,
        "remarks": remarks,
        "events": events,
        "files": files,
        "earlier_attempts": [one for one in attempts if one != row.session_id],
        **await asyncio.to_thread(_read_files, files),
        **await _session(view, row, stages, row.session_id, chosen, all_calls=all_calls),
    }


async def session_values(
    view: ViewContext, session_id: str, chosen: str | None = None, *, all_calls: bool = False
) -> Json:
    """Return the values of a session's page. Raises ApiError 404 if there is no such session. `all_calls`: see
    `rollout_values`."""
    store = view.store
    await require("session", session_id, store.sessions.get(session_id))
    return {
        "rollout": None,
        "repeat_of": None,
        "task": None,
        "rewards": await store.rewards.of_session(session_id),
        "remarks": await store.remarks.of_session(session_id),
        "events": (),
        "files": (),
        "earlier_attempts": (),
        "patch": None,
        "logs": (),
        **await _session(view, None, (), session_id, chosen, all_calls=all_calls),
    }


async def _session(
    view: ViewContext,
    rollout: RolloutRow | None,
    stages: Sequence[StageRow],
    session_id: str | None,
    chosen: str | None,
    *,
    all_calls: bool,
) -> Json:
    """Return the template values for the session's part of a run's page."""
    store = view.store
    session = None if session_id is None else await store.sessions.summary(session_id)
    calls: list[CallSummary] = []
    traces: list[TraceSummary] = []
    excluded: dict[str, str] = {}
    if session is not None:
        calls, traces, excluded = await asyncio.gather(
            store.calls.summaries(session.session_id),
            store.traces.summaries(session.session_id),
            store.traces.exclusions(session.session_id),
        )
    is_story = chosen is None  # the whole run is shown by its last answered call, with all messages
    if chosen is None:
        chosen = next((call.call_id for call in reversed(calls) if call.choices), calls[-1].call_id if calls else None)
    trace_of = {call_id: trace for trace in traces if trace.builder == "merged" for call_id in trace.call_ids}
    return {
        "session": session,
        "tree": draw_tree(calls, chosen, None if all_calls else MOST_CALLS),
        "timeline": draw_timeline(rollout, stages, calls, time.time()),
        "traces": traces,
        "trace_of": trace_of,
        "excluded": excluded,
        "is_live": _is_live(rollout, session),
        **await call_values(view, calls, chosen),
        "is_story": is_story,
        "is_report": False,
    }


def _is_live(rollout: RolloutRow | None, session: SessionSummary | None) -> bool:
    """Return whether further calls may follow: the rollout runs, or a session without a rollout was used recently."""
    if rollout is not None or session is None:
        return rollout is not None and not rollout.final
    return session.closed_at is None and time.time() - (session.last_call_at or session.created_at) < _LIVE_SECONDS


async def call_values(
    view: ViewContext, calls: Sequence[CallSummary], call_id: str | None, *, whole: bool = False
) -> Json:
    """Return the template values of one call. `whole`: include all messages, and the request as it was received."""
    positions = {call.call_id: index for index, call in enumerate(calls)}
    call = await view.store.calls.get(call_id) if call_id in positions else None
    if call is None:
        return {"call": None, "shown": None, "number": None, "summary": None}
    summary = calls[positions[call.call_id]]
    next_id = next((one.call_id for one in calls if one.base_call_id == call_id and one.edge == "continues"), None)
    following = None if next_id is None else await view.store.calls.get(next_id)
    base = calls[positions[summary.base_call_id]] if summary.base_call_id in positions else None
    known = 0 if base is None else base.message_count + 1
    return {
        "call": call,
        "summary": summary,
        "number": positions[call.call_id] + 1,
        "shown": await asyncio.to_thread(
            show_call, call, following, known, most=None if whole else _MOST_MESSAGES, with_raw=whole
        ),
    }


def _read_files(files: Sequence[ArtifactRow]) -> Json:
    """Return the patch, and the logs by name. Reads files, so call it in a thread."""
    newest = {file.name: file for file in files}
    patch = newest.get("patch.diff")
    logs = []
    for name in ("tests.log", "agent.log"):
        if name in newest:
            text, is_cut = _tail(newest[name])
            logs.append({"file": newest[name], "text": text, "is_cut": is_cut})
    return {"patch": None if patch is None else read_diff(_head(patch)), "logs": logs}


def _head(file: ArtifactRow) -> str:
    with file.path.open("rb") as content:
        return content.read(_SHOWN_BYTES).decode(errors="replace")


def _tail(file: ArtifactRow) -> tuple[str, bool]:
    """Return the end of a log, because the result is there. Also return whether earlier bytes are left out."""
    with file.path.open("rb") as content:
        content.seek(max(0, file.bytes - _SHOWN_BYTES))
        return content.read().decode(errors="replace"), file.bytes > _SHOWN_BYTES
