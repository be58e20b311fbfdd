"""Job events, read from a cursor: each once and in order, from any process."""

from __future__ import annotations

import asyncio

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store, open_store
from polar_proxy.store.service.job_events import EventCursor, JobEventRow
from tests.store.test_jobs import submit

pytestmark = pytest.mark.slow


async def run(store: Store, job_id: str) -> None:
    for claim in await store.queue.claim("w", 99, 60, job_id=job_id):
        await store.rollouts.enter_stage(claim, "preparing")
        await store.rollouts.end(claim, "done")
        await store.groups.settle(claim.group_id)


async def read(store: Store, after: EventCursor, job_id: str | None = None, limit: int = 500) -> list[JobEventRow]:
    found: list[JobEventRow] = []
    while True:
        rows, seen = await store.job_events.read(after, job_id=job_id, limit=limit)
        found += rows
        if seen == after:
            return found
        after = seen


def words(rows: list[JobEventRow]) -> list[str]:
    return [f"{row.kind} {row.data.get('to') or row.data['status']}" for row in rows]


async def test_events_of_one_job(store: Store) -> None:
    await run(store, await submit(store))
    job_id = await submit(store, size=1)
    await run(store, job_id)
    await run(store, await submit(store))
    (lease,) = (await store.feed.lease("t", 9, 60)).leases[1:2]
    await store.feed.acknowledge(lease.lease_id)
    rows = await read(store, await store.job_events.start(job_id), job_id)
    assert words(rows) == [
        *("job open", "stage queued", "stage preparing", "stage done", "group finished", "job done"),
        *("feed leased", "feed delivered"),
    ]
    assert {row.data["job_id"] for row in rows} == {job_id}
    assert await store.job_events.is_over(job_id)
    last, end = rows[-1].cursor, await store.job_events.end(job_id)
    assert (last.rollout_event >= end.rollout_event, last.job_event) == (True, end.job_event)
    for place, row in enumerate(rows):
        assert await read(store, row.cursor, job_id, limit=1) == rows[place + 1 :]
        assert EventCursor.parse(str(row.cursor)) == row.cursor


async def test_events_of_all_jobs_from_now(store: Store) -> None:
    await run(store, await submit(store))
    now = await store.job_events.start()
    assert await read(store, now) == []
    job_id = await submit(store, size=1)
    await store.jobs.set_status(job_id, "paused")
    assert not await store.job_events.is_over(job_id)
    await store.jobs.set_status(job_id, "cancelled")
    assert await store.job_events.is_over(job_id)
    assert words(await read(store, now)) == [
        *("job open", "stage queued", "job paused", "stage cancelled", "group cancelled", "job cancelled")
    ]
    with pytest.raises(UsageError, match="not a position"):
        EventCursor.parse("12")


async def test_reader_sees_all_events_of_concurrent_writers(store: Store, url: str) -> None:
    """A reader that polls while two processes write sees every event once and in order."""
    start = await store.job_events.start()
    seen: list[JobEventRow] = []
    over = asyncio.Event()

    async def follow() -> None:
        after = start
        while True:
            last = over.is_set()
            rows, position = await store.job_events.read(after, limit=7)
            seen.extend(rows)
            if last and position == after:
                return
            after = position
            await asyncio.sleep(0)

    async with open_store(url) as other:

        async def write(one: Store) -> None:
            for _ in range(6):
                await run(one, await submit(one, size=3))

        task = asyncio.create_task(follow())
        await asyncio.gather(write(store), write(other), write(other))
        over.set()
        await task
    assert len({str(row.cursor) for row in seen}) == len(seen)
    events = [(row.kind, row.at, row.data) for row in seen]
    assert sorted(map(repr, events)) == sorted(repr((row.kind, row.at, row.data)) for row in await read(store, start))
    assert len(seen) == 18 * (1 + 3 * 3 + 1 + 1)
