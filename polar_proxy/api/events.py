"""The route of server-sent events: what happens, from any point on, by any server of the database.

Source of the form: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header
from fastapi.responses import StreamingResponse

from polar_proxy.api.context import ApiContext, Routers, not_found
from polar_proxy.store import json_codec
from polar_proxy.store.job_events import EventCursor
from polar_proxy.types import Json

HEARTBEAT_SECONDS = 15.0
_LOOK_SECONDS = 0.5
_STREAM: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."}}


def add(rooms: Routers, api: ApiContext) -> None:
    store = api.store

    @rooms.trainer.get("/events", tags=["events"], response_class=StreamingResponse, responses=_STREAM)
    async def events(
        job: str | None = None,
        after: str | None = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> StreamingResponse:
        """Events `stage`, `group`, `job` and `feed`. With `job`, those of one job from its start, until it is over,
        which the event `end` says; without, those of all jobs from now on. Each has an id: given as `Last-Event-ID`,
        or as `after`, the stream goes on behind that event, on any server of the same database."""
        if job is not None and await store.jobs.get(job) is None:
            raise not_found("job", job)
        known = last_event_id or after
        start = await store.job_events.start(job) if known is None else EventCursor.parse(known)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_follow(api, job, start), media_type="text/event-stream", headers=headers)


async def _follow(api: ApiContext, job_id: str | None, after: EventCursor) -> AsyncIterator[bytes]:
    store = api.store
    yield b": polar\n\n"
    said = time.monotonic()
    while not api.closing.is_set():
        # Asked before the events are read: what made it so is then among them.
        over = job_id is not None and await store.job_events.is_over(job_id)
        rows, seen = await store.job_events.read(after, job_id=job_id)
        if rows:
            yield b"".join(_event(str(row.cursor), row.kind, {**row.data, "at": row.at}) for row in rows)
            said = time.monotonic()
        if seen != after:
            after = seen
            continue
        if over and job_id is not None:
            end = await store.job_events.end(job_id)
            if after.stage >= end.stage and after.job >= end.job:
                yield _event(str(after), "end", {"job_id": job_id})
                return
        if time.monotonic() - said >= HEARTBEAT_SECONDS:
            yield b":\n\n"
            said = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)


def _event(cursor: str, kind: str, data: Json) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (cursor.encode(), kind.encode(), json_codec.dumps(data))
