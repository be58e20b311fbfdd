"""Callbacks: queued with the end of a group or job, sent by one process, retried until accepted or given up."""

from __future__ import annotations

import asyncio

from polar_proxy.store import RolloutStatus, Store, open_store
from tests.store.test_jobs import submit

URL = "http://127.0.0.1:9/callback"


async def ended_job(store: Store, statuses: tuple[RolloutStatus, ...]) -> str:
    """Return a job with one group per status, whose only rollout ended with it."""
    job_id = await submit(store, groups=len(statuses), size=1, callback_url=URL)
    for status in statuses:
        (claim,) = await store.queue.claim("w", 1, 60)
        await store.rollouts.update(claim.rollout_id, status=status)
        await store.groups.settle(claim.group_id)
    return job_id


async def test_callbacks_of_groups_and_jobs(store: Store) -> None:
    job_id = await ended_job(store, ("done", "failed"))
    first, second = await store.groups.of_job(job_id)
    rows = await store.callbacks.of_job(job_id)
    assert [(row.kind, row.group_id, row.url) for row in rows] == [
        ("group.finished", first.group_id, URL),
        ("group.cancelled", second.group_id, URL),
        ("job.ended", None, URL),
    ]
    await store.groups.settle(first.group_id)  # repeated
    cancelled = await submit(store, groups=2, callback_url=URL)
    await store.jobs.set_status(cancelled, "cancelled")
    await store.jobs.set_status(cancelled, "cancelled")
    assert [row.kind for row in await store.callbacks.of_job(cancelled)] == ["job.ended"]
    quiet = await submit(store)
    await store.jobs.set_status(quiet, "cancelled")
    assert await store.callbacks.of_job(quiet) == []
    assert len(await store.callbacks.of_job(job_id)) == 3


async def test_each_callback_has_one_sender(store: Store, url: str) -> None:
    job_id = await ended_job(store, ("done",) * 6)
    async with open_store(url) as other:
        got = await asyncio.gather(*(one.callbacks.claim(2, 60) for one in (store, other) * 4))
    ids = [row.callback_id for rows in got for row in rows]
    assert sorted(ids) == sorted(row.callback_id for row in await store.callbacks.of_job(job_id))
    assert len(set(ids)) == 7


async def test_retries_until_delivered_or_given_up(store: Store) -> None:
    job_id = await ended_job(store, ("done",))
    group, job = await store.callbacks.claim(9, -1)  # its sender was killed: its claim expires at once
    assert await store.callbacks.fix_body(group.callback_id, "first") == "first"
    again, _ = await store.callbacks.claim(9, 60)
    assert (again.callback_id, again.attempts, again.body) == (group.callback_id, 2, "first")
    assert await store.callbacks.fix_body(group.callback_id, "other") == "first"
    assert await store.callbacks.claim(9, 60) == []
    await store.callbacks.mark_failed(group.callback_id, "refused with Bearer abcdefgh12345678", 0)
    (third,) = await store.callbacks.claim(9, 60)
    assert third.attempts == 3
    assert third.error == "refused with Bearer [secret removed]"
    await store.callbacks.mark_delivered(group.callback_id)
    await store.callbacks.mark_failed(group.callback_id, "a late sender's", 0)
    await store.callbacks.mark_failed(job.callback_id, "gone", None)
    assert await store.callbacks.claim(9, 60) == []
    results = {row.kind: (row.delivered_at is not None, row.error) for row in await store.callbacks.of_job(job_id)}
    assert results == {"group.finished": (True, None), "job.ended": (False, "gone")}
