"""Overflow: running rollouts of a complete group move to another group, and each counts once."""

from __future__ import annotations

from collections import Counter

from polar_proxy.store import Store
from polar_proxy.store.repositories.rollouts import Claim
from polar_proxy.store.service.groups import KEEP_OVERFLOW
from polar_proxy.store.service.jobs import NewGroup, NewRollout
from polar_proxy.types import Json

CONFIG: Json = {"group_policy": "first_n", **KEEP_OVERFLOW}
ROLLOUT = NewRollout("mini-swe-agent 2", "process", "local", "polar-tiny", 1, {"harness": "mini-swe-agent"})
OTHER = NewRollout("mini-swe-agent 2", "process", "local", "polar-tiny", 1, {"harness": "mini-swe-agent", "timeout": 1})


async def submit(store: Store, *groups: tuple[str, int, NewRollout], config: Json = CONFIG) -> list[str]:
    """Submit groups of (task, number of rollouts, rollout) and return their ids."""
    for task, _, _ in groups:
        await store.tasks.put(task, "family", 1, "do it", {})
    new = [NewGroup(task, max(1, size - 1), config, (rollout,) * size, True) for task, size, rollout in groups]
    job, _ = await store.jobs.submit({}, new)
    return [group.group_id for group in await store.groups.of_job(job.job_id)]


async def claim(store: Store, count: int, version: str | None = None) -> list[Claim]:
    claims = await store.queue.claim("w", count, 60, policy_version=version)
    for one in claims:
        await store.rollouts.enter_stage(one, "running")
    return claims


async def end(store: Store, claim: Claim) -> None:
    await store.rewards.add(claim.rollout_id, 1.0, "tests", {})
    await store.rollouts.end(claim, "done")


async def statuses(store: Store, group_id: str) -> dict[str, int]:
    return dict(Counter(row.status for row in await store.rollouts.find(group_id=group_id)))


async def test_overflow_moves_to_the_next_group_of_the_task(store: Store) -> None:
    first, other, second = await submit(store, ("t", 3, ROLLOUT), ("u", 2, ROLLOUT), ("t", 3, ROLLOUT))
    a, b, c = await claim(store, 3)
    await end(store, a)
    await end(store, b)
    assert await store.groups.keep_overflow(first, reason="the first 2 have ended") == {c.rollout_id: second}
    group, mine = await store.groups.settle(first) or (None, False)
    assert group is not None
    assert (group.status, group.reason, group.delivery, mine) == ("finished", "the first 2 have ended", "waiting", True)
    assert await statuses(store, first) == {"done": 2, "cancelled": 1}
    assert await statuses(store, second) == {"running": 1, "queued": 2}
    assert await store.rollouts.group_id(c.rollout_id) == second
    row = await store.rollouts.get(c.rollout_id)
    assert row is not None
    assert (row.group_index, row.job_id) == (0, group.job_id)
    left = await claim(store, 9)
    assert sorted(one.group_id for one in left) == sorted([other, other, second, second])
    await end(store, c)  # its worker need not know that it moved
    assert await statuses(store, second) == {"done": 1, "running": 2}
    replaced = [row for row in await store.rollouts.find(group_id=first) if row.status == "cancelled"]
    assert replaced[0].error == f"replaced by {c.rollout_id}, which was carried over from another group"
    assert [event.kind for event in await store.rollouts.events(c.rollout_id)].count("moved") == 1


async def test_overflow_includes_rollouts_claimed_a_moment_ago(store: Store) -> None:
    (first,) = await submit(store, ("t", 3, ROLLOUT))
    a, b = await store.queue.claim("w", 2, 60)
    await store.rollouts.enter_stage(a, "running")
    await end(store, a)
    (holding,) = set((await store.groups.keep_overflow(first, reason="decided")).values())
    assert await statuses(store, first) == {"done": 1, "cancelled": 1}
    assert await store.rollouts.group_id(b.rollout_id) == holding
    await store.rollouts.enter_stage(b, "preparing")


async def test_overflow_waits_for_a_next_group(store: Store) -> None:
    (first,) = await submit(store, ("t", 4, ROLLOUT))
    a, b, c, d = await claim(store, 4, "5")
    for one in (a, b):
        await end(store, one)
    moved = await store.groups.keep_overflow(first, reason="decided")
    (holding,) = set(moved.values())
    assert set(moved) == {c.rollout_id, d.rollout_id}
    await store.groups.settle(first)
    (job,) = await store.jobs.find()
    assert job.status == "done"  # the job does not wait for overflow
    await end(store, c)
    different, other_task = await submit(store, ("t", 2, OTHER), ("u", 2, ROLLOUT))
    (old,) = await submit(store, ("t", 2, ROLLOUT))
    assert await store.groups.carry_over(different) == []
    assert await store.groups.carry_over(other_task) == []
    assert await store.groups.carry_over(old, policy_version="7") == []
    assert sorted(await store.groups.carry_over(old, policy_version="6")) == sorted([c.rollout_id, d.rollout_id])
    assert await store.groups.carry_over(old) == []
    assert await statuses(store, old) == {"done": 1, "running": 1}
    assert await statuses(store, holding) == {"cancelled": 2}
    await end(store, d)
    settled = await store.groups.settle(old)
    assert settled is not None
    assert settled[0].delivery == "waiting"
    lease = (await store.feed.lease("trainer", 9, 60)).leases
    assert [one.group_id for one in lease] == [first, old]


async def test_cancelled_rollouts_do_not_move(store: Store) -> None:
    (first,) = await submit(store, ("t", 3, ROLLOUT))
    a, b, c = await claim(store, 3)
    await end(store, a)
    assert not await store.queue.cancel(b.rollout_id)
    assert set(await store.groups.keep_overflow(first, reason="decided")) == {c.rollout_id}
    assert await store.rollouts.group_id(b.rollout_id) == first
    assert await store.groups.keep_overflow(first, reason="again") == {}


async def test_groups_that_cancel_overflow_take_none(store: Store) -> None:
    (first,) = await submit(store, ("t", 2, ROLLOUT))
    a, b = await claim(store, 2)
    (second,) = await submit(store, ("t", 2, ROLLOUT), config={"group_policy": "first_n"})
    await end(store, a)
    (holding,) = set((await store.groups.keep_overflow(first, reason="decided")).values())
    assert holding != second
    assert await store.groups.carry_over(second) == []
    assert await store.rollouts.group_id(b.rollout_id) == holding
