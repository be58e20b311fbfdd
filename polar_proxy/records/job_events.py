"""The events of jobs, read from the database as they happen. A reader can continue after any event, in any process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from polar_proxy import api_models as m
from polar_proxy.store import Store
from polar_proxy.store.service.job_events import EventCursor

_POLL_SECONDS = 0.5


async def follow_events(store: Store, job_id: str | None, after: str | None) -> AsyncIterator[list[m.Event]]:
    """Return an iterator that polls for events. Each item is a list of new events, which may be empty.

    With `job_id`: the events of this job from its start to the event `end`. Without `job_id`: the events of all jobs
    from now on; the iterator never ends. `after`: begin after the event with this id. Raises UsageError if `after` is
    not the id of an event.
    """
    start = await store.job_events.start(job_id) if after is None else EventCursor.parse(after)
    return _read_events(store, job_id, start)


async def _read_events(store: Store, job_id: str | None, after: EventCursor) -> AsyncIterator[list[m.Event]]:
    while True:
        # Check for the end before reading events, so that the events that led to the end are read below.
        over = job_id is not None and await store.job_events.is_over(job_id)
        rows, seen = await store.job_events.read(after, job_id=job_id)
        if seen != after:
            after = seen
            yield [m.Event(id=str(row.cursor), event=row.kind, data={**row.data, "at": row.at}) for row in rows]
            continue
        if over and job_id is not None:
            end = await store.job_events.end(job_id)
            if after.rollout_event >= end.rollout_event and after.job_event >= end.job_event:
                yield [m.Event(id=str(after), event="end", data={"job_id": job_id})]
                return
        yield []
        await asyncio.sleep(_POLL_SECONDS)
