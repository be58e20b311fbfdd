"""Callbacks: written down with what they tell, sent by one, again until they are taken or given up."""

from __future__ import annotations

import asyncio

from polar_proxy.store import Store, open_store
from tests.store.test_jobs import submit

URL = "http://127.0.0.1:9/told"


async def ended(store: Store, statuses: tuple[str, ...]) -> str:
    """A job whose groups, of one rollout each, ended so."""
    job_id = await submit(store, groups=len(statuses), size=1, callback_url=URL)
    for status in statuses:
        (held,) = await store.queue.claim("w", 1, 60)
        await store.rollouts.update(held.rollout_id, status=status)  # type: ignore[arg-type]
        await store.groups.settle(held.group_id)
    return job_id


async def test_each_group_and_the_end_of_the_job(store: Store) -> None:
    job_id = await ended(store, ("done", "failed"))
    first, second = await store.groups.of_job(job_id)
    rows = await store.callbacks.of_job(job_id)
    assert [(row.kind, row.group_id, row.url) for row in rows] == [
        ("group.finished", first.group_id, URL),
        ("group.cancelled", second.group_id, URL),
        ("job.ended", None, URL),
    ]
    await store.groups.settle(first.group_id)  # said twice
    cancelled = await submit(store, groups=2, callback_url=URL)
    await store.jobs.set_status(cancelled, "cancelled")
    await store.jobs.set_status(cancelled, "cancelled")
    assert [row.kind for row in await store.callbacks.of_job(cancelled)] == ["job.ended"]
    quiet = await submit(store)
    await store.jobs.set_status(quiet, "cancelled")
    assert await store.callbacks.of_job(quiet) == []
    assert len(await store.callbacks.of_job(job_id)) == 3


async def test_one_sender_at_a_time(store: Store, url: str) -> None:
    job_id = await ended(store, ("done",) * 6)
    async with open_store(url) as other:
        got = await asyncio.gather(*(one.callbacks.claim(2, 60) for one in (store, other) * 4))
    ids = [row.callback_id for rows in got for row in rows]
    assert sorted(ids) == sorted(row.callback_id for row in await store.callbacks.of_job(job_id))
    assert len(set(ids)) == 7


async def test_until_it_is_taken_or_given_up(store: Store) -> None:
    job_id = await ended(store, ("done",))
    group, job = await store.callbacks.claim(9, -1)  # a sender that was killed: its time is over at once
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
    told = {row.kind: (row.delivered_at is not None, row.error) for row in await store.callbacks.of_job(job_id)}
    assert told == {"group.finished": (True, None), "job.ended": (False, "gone")}
