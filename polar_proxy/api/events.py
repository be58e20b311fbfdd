"""The route of server-sent events. A stream can be continued on any server of the database.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header, Query
from fastapi.responses import StreamingResponse

from polar_proxy.api.context import ApiContext, Routers, not_found
from polar_proxy.store import json_codec
from polar_proxy.store.service.job_events import EventCursor
from polar_proxy.types import Json

HEARTBEAT_SECONDS = 15.0
_POLL_SECONDS = 0.5
_STREAM: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."}}


def add_routes(routers: Routers, context: ApiContext) -> None:
    store = context.store

    @routers.trainer.get("/events", tags=["events"], response_class=StreamingResponse, responses=_STREAM)
    async def events(
        job: Annotated[str | None, Query(description="Only events of this job, until it has ended.")] = None,
        after: Annotated[str | None, Query(description="Continue after the event with this id.")] = None,
        last_event_id: Annotated[
            str | None, Header(description="Like `after`; browsers send it when they reconnect.")
        ] = None,
    ) -> StreamingResponse:
        """Stream events of the kinds `stage`, `group`, `job` and `feed`.

        With `job`, the stream has the events of this job from its start and ends with the event `end` once the job has
        ended. Without `job`, it has the events of all jobs from now on. A stream can be continued after any event, on
        any server of the same database.
        """
        if job is not None and await store.jobs.get(job) is None:
            raise not_found("job", job)
        position = last_event_id or after
        start = await store.job_events.start(job) if position is None else EventCursor.parse(position)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_follow(context, job, start), media_type="text/event-stream", headers=headers)


async def _follow(context: ApiContext, job_id: str | None, after: EventCursor) -> AsyncIterator[bytes]:
    store = context.store
    yield b": polar\n\n"
    last_sent = time.monotonic()
    while not context.closing.is_set():
        # Check for the end before reading events, so that the events that led to the end are read below.
        over = job_id is not None and await store.job_events.is_over(job_id)
        rows, seen = await store.job_events.read(after, job_id=job_id)
        if rows:
            yield b"".join(_event(str(row.cursor), row.kind, {**row.data, "at": row.at}) for row in rows)
            last_sent = time.monotonic()
        if seen != after:
            after = seen
            continue
        if over and job_id is not None:
            end = await store.job_events.end(job_id)
            if after.stage >= end.stage and after.job >= end.job:
                yield _event(str(after), "end", {"job_id": job_id})
                return
        if time.monotonic() - last_sent >= HEARTBEAT_SECONDS:
            yield b":\n\n"
            last_sent = time.monotonic()
        await asyncio.sleep(_POLL_SECONDS)


def _event(cursor: str, kind: str, data: Json) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (cursor.encode(), kind.encode(), json_codec.dumps(data))
