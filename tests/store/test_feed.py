"""The trainer feed: one consumer per group, leases that expire, and staleness."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import Store, open_store
from tests.store.test_jobs import submit

pytestmark = pytest.mark.slow


async def finished(
    store: Store, groups: int, version: str | None = None, max_staleness: int | None = None
) -> list[str]:
    """Return groups that wait for a consumer."""
    job_id = await submit(store, groups=groups, size=1, max_staleness=max_staleness)
    for held in await store.queue.claim("w", groups, 60, policy_version=version):
        await store.rollouts.update(held.rollout_id, status="done")
        await store.groups.settle(held.group_id)
    return [group.group_id for group in await store.groups.of_job(job_id)]


async def test_each_group_is_delivered_once_oldest_first(store: Store) -> None:
    first, second, third = await finished(store, 3)
    offer = await store.feed.lease("trainer", 2, 60)
    assert [lease.group_id for lease in offer.leases] == [first, second]
    assert await store.feed.depth() == {"leased": 2, "waiting": 1}
    await store.feed.acknowledge(offer.leases[0].lease_id)
    await store.feed.acknowledge(offer.leases[0].lease_id)
    await store.feed.release(offer.leases[1].lease_id)
    again = await store.feed.lease("trainer", 5, 60)
    assert {lease.group_id for lease in again.leases} == {second, third}
    assert await store.feed.depth() == {"delivered": 1, "leased": 2}
    with pytest.raises(StoreError, match="has expired"):
        await store.feed.release(offer.leases[0].lease_id)


async def test_expired_lease_offers_the_group_again(store: Store) -> None:
    (group,) = await finished(store, 1)
    (lease,) = (await store.feed.lease("dead", 1, -1)).leases
    (other,) = (await store.feed.lease("living", 1, 60)).leases
    assert (lease.group_id, other.group_id) == (group, group)
    with pytest.raises(StoreError, match="has expired"):
        await store.feed.acknowledge(lease.lease_id)
    with pytest.raises(StoreError, match="has expired"):
        await store.feed.extend(lease.lease_id, 60)
    assert await store.feed.extend(other.lease_id, 600) > other.expires_at
    assert (await store.feed.lease("third", 1, 60)).leases == ()
    await store.feed.acknowledge(other.lease_id)


async def test_two_consumers_never_get_the_same_group(store: Store, url: str) -> None:
    groups = await finished(store, 12)
    async with open_store(url) as other:

        async def consume(one: Store, name: str) -> list[str]:
            mine = []
            while (offer := await one.feed.lease(name, 1, 60)).leases:
                mine += [lease.group_id for lease in offer.leases]
            return mine

        got = await asyncio.gather(*(consume(one, f"c{n}") for n, one in enumerate((store, other, store, other))))
    counts = Counter(group for mine in got for group in mine)
    assert counts == Counter(groups)


async def test_stale_groups_are_dropped_with_a_reason(store: Store) -> None:
    (old,) = await finished(store, 1, version="3")
    (young,) = await finished(store, 1, version="5")
    (unknown,) = await finished(store, 1, version=None)
    offer = await store.feed.lease("t", 5, 60, policy_version="6", max_staleness=2)
    assert [(lease.group_id, lease.staleness) for lease in offer.leases] == [(young, 1)]
    assert set(offer.dropped) == {old, unknown}
    assert await store.feed.depth() == {"leased": 1, "dropped": 2}
    dropped = await store.groups.get(old)
    assert dropped is not None
    assert dropped.reason == "more than 2 policy versions old"
    with pytest.raises(UsageError, match="that is a number"):
        await store.feed.lease("t", 5, 60, policy_version="abc", max_staleness=2)


async def test_own_staleness_limit_of_a_group(store: Store) -> None:
    """The limit applies at delivery, whatever the consumer asks for, and before rollouts are claimed."""
    late = await finished(store, 1, version="3", max_staleness=1)
    young = await finished(store, 1, version="4", max_staleness=1)
    offer = await store.feed.lease("t", 5, 60, policy_version="5")
    assert ([lease.group_id for lease in offer.leases], list(offer.dropped)) == (young, late)
    assert offer.leases[0].policy_version == "4"

    job_id = await submit(store, groups=3, size=3, max_staleness=1)
    finished_one, running = await store.queue.claim("w", 2, 60, policy_version="6")
    await store.rollouts.update(finished_one.rollout_id, status="done")
    for version in (None, "a", "7"):
        assert await store.feed.drop_stale(version) == ([], [])
    first, second, third = await store.groups.of_job(job_id)
    assert await store.feed.drop_stale("8") == ([first.group_id], [running.rollout_id])
    assert await store.feed.drop_stale("8") == ([], [])
    rows = await store.rollouts.find(group_id=first.group_id)
    assert [(row.status, row.cause) for row in rows] == [
        ("done", None),
        ("queued", "cancel_requested"),
        ("cancelled", "cancelled"),
    ]
    await store.queue.release(running, cause="cancelled")
    settled = await store.groups.settle(first.group_id)
    assert settled is not None
    assert (settled[0].status, settled[0].delivery, settled[0].reason) == (
        *("finished", "dropped", "more than 1 policy versions old"),
    )
    assert await store.feed.drop_reasons() == {"more than 1 policy versions old": 2}
    assert {held.group_id for held in await store.queue.claim("w", 9, 60)} == {second.group_id, third.group_id}


async def test_groups_that_would_be_delivered_too_late_do_not_start(store: Store) -> None:
    """The trainer takes two groups per version, so with a staleness limit of one version three groups may be ahead."""
    bounded = await submit(store, groups=9, size=2, max_staleness=1)
    assert await store.queue.claim("w", 2, 60, policy_version="0") != []  # throughput is not known yet: no group waits
    for version in ("1", "1", "2", "2", "3"):
        await finished(store, 1, version=version)
        (lease,) = (await store.feed.lease("t", 1, 60, policy_version=version)).leases
        await store.feed.acknowledge(lease.lease_id)
    first, *others = [group.group_id for group in await store.groups.of_job(bounded)]
    held = await store.queue.claim("w", 99, 60, policy_version="3")
    assert [one.group_id for one in held] == [group for group in others[:3] for _ in range(2)]
    assert await store.queue.claim("w", 99, 60, policy_version="3") == []
    free = await submit(store, groups=1, size=1)
    assert [one.job_id for one in await store.queue.claim("w", 99, 60, policy_version="3")] == [free]
    (unbounded,) = await store.groups.of_job(free)
    for group_id in (first, unbounded.group_id):
        for one in await store.rollouts.find(group_id=group_id):
            await store.rollouts.update(one.rollout_id, status="done")
        await store.groups.settle(group_id)
    assert await store.feed.any_waiting()
    assert await store.queue.claim("w", 99, 60, policy_version="3") == []  # waiting groups count as well
    await store.feed.lease("t", 2, 60, policy_version="3")
    assert not await store.feed.any_waiting()
    assert {one.group_id for one in await store.queue.claim("w", 99, 60, policy_version="3")} == {others[3]}
    await store.queue.release(held[0], cause="sandbox")  # its group has started, so it continues
    assert [one.rollout_id for one in await store.queue.claim("w", 99, 60)] == [held[0].rollout_id]
