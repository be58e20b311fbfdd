"""Pauses: nothing starts, they end automatically, and only the pause that was read is changed."""

from __future__ import annotations

import asyncio
import time

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.store.service.queue import FleetRow
from tests.store.test_jobs import submit


async def test_rollouts_of_a_paused_job_do_not_start(store: Store) -> None:
    job_id = await submit(store, groups=2, size=2)
    begun, waiting = await store.queue.claim("w", 2, 60)
    await store.rollouts.enter_stage(begun, "preparing")
    await store.jobs.set_status(job_id, "paused")
    assert await store.queue.claim("w", 9, 60) == []
    # A claimed rollout that has not started goes back into the queue; a started one continues.
    assert await store.queue.heartbeat("w", [begun.rollout_id, waiting.rollout_id], 60) == (set(), {waiting.rollout_id})
    assert await store.jobs.in_flight(job_id) == 1
    await store.jobs.set_status(job_id, "open")
    assert [held.rollout_id for held in await store.queue.claim("w", 1, 60)] == [waiting.rollout_id]


async def test_pause_ends_automatically(store: Store) -> None:
    job_id = await submit(store)
    await store.jobs.set_status(job_id, "paused", paused_until=time.time() + 60)
    assert await store.jobs.resume_due() == []
    assert await store.queue.claim("w", 9, 60) == []
    await store.jobs.set_status(job_id, "paused", paused_until=time.time() - 1)
    assert len(await store.queue.claim("w", 1, 60)) == 1  # even before `resume_due` opens the job
    assert await store.jobs.resume_due() == [job_id]
    job = await store.jobs.get(job_id)
    assert job is not None
    assert (job.status, job.paused_until) == ("open", None)


async def test_status_changes_only_if_it_is_as_expected(store: Store) -> None:
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


async def test_nothing_is_claimed_while_the_fleet_is_paused(store: Store) -> None:
    await submit(store, groups=2, size=2)
    (begun,) = await store.queue.claim("w", 1, 60)
    now = time.time()
    assert await store.fleet.update(FleetRow(now, None))
    assert (await store.fleet.get()).paused
    assert await store.queue.claim("w", 9, 60) == []
    # Claimed rollouts stay claimed, also those that have not started.
    assert await store.queue.heartbeat("w", [begun.rollout_id], 60) == (set(), set())
    assert await store.fleet.in_flight() == [begun.rollout_id]
    await store.fleet.update(FleetRow(now, now - 1))
    assert not (await store.fleet.get()).paused
    assert len(await store.queue.claim("w", 1, 60)) == 1  # the pause is over
    assert not await store.fleet.update(FleetRow(None, None), only_if=FleetRow(now, None))
    assert await store.fleet.update(FleetRow(None, None), only_if=FleetRow(now, now - 1))
    assert await store.fleet.get() == FleetRow(None, None)
    assert len(await store.queue.claim("w", 9, 60)) == 2
    assert len(await store.fleet.in_flight()) == 4


async def test_owned_jobs_ignore_a_pause_of_the_fleet(store: Store) -> None:
    job_id = await submit(store, size=1, owned=True)
    await store.fleet.update(FleetRow(time.time(), None))
    assert len(await store.queue.claim("w", 1, 60, job_id=job_id)) == 1
    assert await store.fleet.in_flight() == []


async def test_pausing_the_fleet_waits_for_claims_in_progress(store: Store) -> None:
    """After the pause returns, `in_flight` is complete: no rollout starts unnoticed."""
    await submit(store, size=4)
    for number in range(4):
        await store.fleet.update(FleetRow(None, None))
        claiming = asyncio.create_task(store.queue.claim(f"w{number}", 1, 60))
        await asyncio.sleep(0.002 * number)
        await store.fleet.update(FleetRow(time.time(), None))
        seen = len(await store.fleet.in_flight())
        await claiming
        assert len(await store.fleet.in_flight()) == seen
