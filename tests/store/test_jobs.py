"""Jobs and the queue: claims, heartbeats, retries and cancelling."""

from __future__ import annotations

import asyncio

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store, open_store
from polar_proxy.store.repositories.rollouts import ClaimLostError
from polar_proxy.store.service.jobs import NewGroup, NewRollout

pytestmark = pytest.mark.slow

ROLLOUT = NewRollout("mini-swe-agent 2", "process", "local", "polar-tiny", 1, {})


async def submit(
    store: Store, groups: int = 1, size: int = 2, max_staleness: int | None = None, **given: object
) -> str:
    await store.tasks.put("task-1", "family", 1, "do it", {})
    new = [NewGroup("task-1", size, {}, (ROLLOUT,) * size, True, max_staleness)] * groups
    job, is_new = await store.jobs.submit({"groups": groups}, new, **given)  # type: ignore[arg-type]
    assert is_new
    return job.job_id


async def test_job_from_queued_to_done(store: Store) -> None:
    job_id = await submit(store, groups=2)
    job = await store.jobs.get(job_id)
    assert job is not None
    assert (job.status, job.groups, job.rollouts) == ("open", 2, {"queued": 4})
    claim = await store.queue.claim("w", 3, 60, policy_version="7")
    first, second = await store.groups.of_job(job_id)
    assert [item.group_id for item in claim] == [first.group_id, first.group_id, second.group_id]
    assert [item.group_index for item in claim] == [0, 1, 0]
    assert await store.queue.heartbeat("w", [item.rollout_id for item in claim], 60) == (set(), set())
    for item in claim[:2]:
        await store.rollouts.update(item.rollout_id, status="done")
    done, mine = await store.groups.settle(first.group_id) or pytest.fail("still open")
    assert (done.status, done.delivery, mine) == ("finished", "waiting", True)
    assert await store.groups.settle(first.group_id) == (done, False)
    assert await store.groups.settle(second.group_id) is None
    (last,) = await store.queue.claim("w", 3, 60)
    for item in (claim[2], last):
        await store.rollouts.update(item.rollout_id, status="failed")
    lost, _ = await store.groups.settle(second.group_id) or pytest.fail("still open")
    assert (lost.status, lost.delivery, lost.reason) == ("cancelled", "dropped", "no rollout of the group finished")
    job = await store.jobs.get(job_id)
    assert job is not None
    assert (job.status, job.rollouts) == ("done", {"done": 2, "failed": 2})
    assert job.ended_at is not None


async def test_idempotency_key_makes_one_job(store: Store) -> None:
    job_id = await submit(store, idempotency_key="k")
    again, is_new = await store.jobs.submit({"groups": 1}, [], idempotency_key="k")
    assert (again.job_id, is_new, again.rollouts) == (job_id, False, {"queued": 2})
    with pytest.raises(UsageError, match="was used for another job"):
        await store.jobs.submit({"groups": 2}, [], idempotency_key="k")


async def test_jobs_take_turns_after_higher_priorities(store: Store) -> None:
    large = await submit(store, groups=3)
    small = await submit(store, groups=1)
    urgent = await submit(store, groups=1, priority=5)
    order = [(await store.queue.claim("w", 1, 60))[0].job_id for _ in range(10)]
    assert order[:2] == [urgent, urgent]
    assert sorted(map(str, order[2:6])) == sorted([large, large, small, small])
    assert order[6:] == [large] * 4
    assert await store.queue.claim("w", 1, 60) == []


async def test_two_stores_never_claim_the_same_rollout(store: Store, url: str) -> None:
    await submit(store, groups=10, size=3)
    async with open_store(url) as other:

        async def work(one: Store, name: str) -> list[str]:
            mine: list[str] = []
            while got := await one.queue.claim(name, 2, 60):
                mine += [item.rollout_id for item in got]
            return mine

        claimed = await asyncio.gather(*(work(one, f"w{n}") for n, one in enumerate((store, other, store, other))))
    ids = [rollout_id for mine in claimed for rollout_id in mine]
    # A claim whose candidates were taken returns early; the others are still queued.
    ids += [item.rollout_id for item in await store.queue.claim("last", 30, 60)]
    assert len(ids) == len(set(ids)) == 30


async def test_worker_without_heartbeat_loses_its_rollouts(store: Store) -> None:
    await submit(store)
    silent = await store.queue.claim("silent", 1, -1)
    (living,) = await store.queue.claim("living", 1, 60)
    await store.rollouts.update(silent[0].rollout_id, status="running")
    assert await store.queue.reclaim_expired(attempts=2) == {silent[0].rollout_id: 2}
    assert await store.queue.heartbeat("silent", [silent[0].rollout_id], 60) == (set(), {silent[0].rollout_id})
    (again,) = await store.queue.claim("other", 5, -1)
    assert (again.rollout_id, again.attempt) == (silent[0].rollout_id, 2)
    assert await store.queue.reclaim_expired(attempts=2) == {again.rollout_id: 0}
    row = await store.rollouts.get(again.rollout_id)
    assert row is not None
    assert (row.status, row.error) == ("failed", "its worker sent no heartbeat")
    assert await store.queue.heartbeat("living", [living.rollout_id], 60) == (set(), set())


async def test_cancelled_rollout_of_a_dead_worker_ends_as_cancelled(store: Store) -> None:
    """Also in its last attempt, in which any other rollout would fail."""
    await submit(store, size=1)
    (claim,) = await store.queue.claim("silent", 1, -1)
    await store.rollouts.update(claim.rollout_id, status="running")
    assert await store.queue.cancel(claim.rollout_id) is False
    assert await store.queue.reclaim_expired(attempts=1) == {claim.rollout_id: 0}
    row = await store.rollouts.get(claim.rollout_id)
    assert row is not None
    assert (row.status, row.cause) == ("cancelled", "cancelled")


async def test_released_rollout_gets_another_attempt(store: Store) -> None:
    await submit(store, size=1)
    (claim,) = await store.queue.claim("w", 1, 60)
    await store.rollouts.enter_stage(claim, "preparing")
    assert await store.queue.release(claim, cause="sandbox") == 2
    (claim,) = await store.queue.claim("w", 1, 60)
    assert claim.attempt == 2
    await store.rollouts.enter_stage(claim, "preparing")
    stages = await store.rollouts.stages(claim.rollout_id)
    assert [(stage.attempt, stage.outcome, stage.cause) for stage in stages] == [
        (1, "failed", "sandbox"),
        (2, None, None),
    ]
    await store.rollouts.update(claim.rollout_id, status="done")
    with pytest.raises(ClaimLostError, match="has ended"):
        await store.queue.release(claim, cause="sandbox")


@pytest.mark.parametrize("what", ["job", "group", "rollout"])
async def test_cancelling_ends_unclaimed_rollouts_at_once(store: Store, what: str) -> None:
    job_id = await submit(store, size=3)
    (claim,) = await store.queue.claim("w", 1, 60)
    if what == "job":
        assert await store.jobs.set_status(job_id, "cancelled") == [claim.rollout_id]
    elif what == "group":
        assert await store.groups.cancel(claim.group_id, reason="decided") == [claim.rollout_id]
    else:
        assert await store.queue.cancel(claim.rollout_id) is False
    assert await store.queue.heartbeat("w", [claim.rollout_id], 60) == ({claim.rollout_id}, set())
    job = await store.jobs.get(job_id)
    assert job is not None
    # The claimed rollout keeps its status until its worker ends it.
    assert job.rollouts == ({"queued": 3} if what == "rollout" else {"queued": 1, "cancelled": 2})
    assert len(await store.queue.claim("w", 5, 60)) == (2 if what == "rollout" else 0)


async def test_paused_job_does_not_start(store: Store) -> None:
    job_id = await submit(store)
    await store.jobs.set_status(job_id, "paused")
    assert await store.queue.claim("w", 5, 60) == []
    await store.jobs.set_status(job_id, "open")
    assert len(await store.queue.claim("w", 5, 60)) == 2
    with pytest.raises(UsageError, match="no job"):
        await store.jobs.set_status("job_x", "paused")
