"""Pauses: nothing is begun, they end by themselves, and whoever undoes one undoes only his own."""

from __future__ import annotations

import asyncio
import time

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.store.queue import FleetRow
from tests.store.test_jobs import submit


async def test_nothing_of_a_paused_job_is_begun(store: Store) -> None:
    job_id = await submit(store, groups=2, size=2)
    begun, waiting = await store.queue.claim("w", 2, 60)
    await store.rollouts.enter_stage(begun, "preparing")
    await store.jobs.set_status(job_id, "paused")
    assert await store.queue.claim("w", 9, 60) == []
    # What waits for a place goes back into the queue; what was begun goes on.
    assert await store.queue.heartbeat("w", [begun.rollout_id, waiting.rollout_id], 60) == (set(), {waiting.rollout_id})
    assert await store.jobs.in_flight(job_id) == 1
    await store.jobs.set_status(job_id, "open")
    assert [held.rollout_id for held in await store.queue.claim("w", 1, 60)] == [waiting.rollout_id]


async def test_a_pause_ends_by_itself(store: Store) -> None:
    job_id = await submit(store)
    await store.jobs.set_status(job_id, "paused", paused_until=time.time() + 60)
    assert await store.jobs.resume_due() == []
    assert await store.queue.claim("w", 9, 60) == []
    await store.jobs.set_status(job_id, "paused", paused_until=time.time() - 1)
    assert len(await store.queue.claim("w", 1, 60)) == 1  # whether or not anybody has opened it yet
    assert await store.jobs.resume_due() == [job_id]
    job = await store.jobs.get(job_id)
    assert job is not None
    assert (job.status, job.paused_until) == ("open", None)


async def test_only_the_own_pause_is_undone(store: Store) -> None:
    job_id = await submit(store)
    await store.jobs.set_status(job_id, "paused", paused_until=1e12)
    await store.jobs.set_status(job_id, "open", only_if=("paused", 2e12))
    job = await store.jobs.get(job_id)
    assert job is not None
    assert (job.status, job.paused_until) == ("paused", 1e12)
    await store.jobs.set_status(job_id, "open", only_if=("paused", 1e12))
    job = await store.jobs.get(job_id)
    assert job is not None
    assert job.status == "open"
    with pytest.raises(UsageError, match="no job job_none"):
        await store.jobs.set_status("job_none", "paused")


async def test_while_all_servers_are_paused_nothing_is_claimed(store: Store) -> None:
    await submit(store, groups=2, size=2)
    (begun,) = await store.queue.claim("w", 1, 60)
    now = time.time()
    assert await store.fleet.update(FleetRow(now, None))
    assert (await store.fleet.get()).paused
    assert await store.queue.claim("w", 9, 60) == []
    # What is in hand stays so, also what waits for a place.
    assert await store.queue.heartbeat("w", [begun.rollout_id], 60) == (set(), set())
    assert await store.fleet.in_flight() == [begun.rollout_id]
    await store.fleet.update(FleetRow(now, now - 1))
    assert not (await store.fleet.get()).paused
    assert len(await store.queue.claim("w", 1, 60)) == 1  # it has ended by itself
    assert not await store.fleet.update(FleetRow(None, None), only_if=FleetRow(now, None))
    assert await store.fleet.update(FleetRow(None, None), only_if=FleetRow(now, now - 1))
    assert await store.fleet.get() == FleetRow(None, None)
    assert len(await store.queue.claim("w", 9, 60)) == 2
    assert len(await store.fleet.in_flight()) == 4


async def test_a_processs_own_job_is_not_paused_with_the_servers(store: Store) -> None:
    job_id = await submit(store, size=1, owned=True)
    await store.fleet.update(FleetRow(time.time(), None))
    assert len(await store.queue.claim("w", 1, 60, job_id=job_id)) == 1
    assert await store.fleet.in_flight() == []


async def test_who_pauses_waits_for_the_claims_that_are_under_way(store: Store) -> None:
    """So that nothing is begun behind the back of somebody who was told that nothing is in hand."""
    await submit(store, size=4)
    for number in range(4):
        await store.fleet.update(FleetRow(None, None))
        claiming = asyncio.create_task(store.queue.claim(f"w{number}", 1, 60))
        await asyncio.sleep(0.002 * number)
        await store.fleet.update(FleetRow(time.time(), None))
        seen = len(await store.fleet.in_flight())
        await claiming
        assert len(await store.fleet.in_flight()) == seen
