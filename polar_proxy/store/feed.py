"""The trainer feed: finished groups, each leased to one consumer at a time and acknowledged when it was trained on.

Promises, for any number of consumers and processes on one database:

* no group is with two consumers: a group has at most one open lease, which the database itself enforces;
* a lease that is neither acknowledged nor extended in time ends, and the group is offered again;
* a group whose newest trained token is older than the consumer's bound is dropped and counted, never delivered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import schema
from polar_proxy.store.base import Part
from polar_proxy.types import new_id

_g = schema.groups.c
_l = schema.leases.c
_r = schema.rollouts.c


@dataclass(frozen=True, slots=True)
class Lease:
    """A group that a consumer has until `expires_at` (seconds since the epoch)."""

    lease_id: str
    group_id: str
    consumer: str
    expires_at: float
    staleness: int | None
    """How many policy versions the group's oldest rollout is behind; None where versions are not numbers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a consumer was given, and what could not be given any more."""

    leases: tuple[Lease, ...]
    dropped: tuple[str, ...]
    """Groups that were too stale."""


class Feed(Part):
    async def lease_groups(
        self,
        consumer: str,
        limit: int,
        seconds: float,
        *,
        policy_version: str | None = None,
        max_staleness: int | None = None,
    ) -> Offer:
        """Up to `limit` finished groups, oldest first, for `seconds`.

        With `max_staleness`, groups dispatched under a policy more than so many versions before `policy_version` are
        dropped instead. Raises UsageError where that is asked for and versions are not whole numbers.
        """
        now = time.time()
        current = _number(policy_version)
        if max_staleness is not None and current is None:
            raise UsageError(f"A bound on staleness needs policy versions that are numbers, not {policy_version!r}.")
        leases: list[Lease] = []
        dropped: list[str] = []
        async with self._database.writing() as connection:
            await _expire(connection, now)
            # More than asked for, since some may be too stale.
            waiting = select(_g.group_id).where(_g.delivery == "waiting").order_by(_g.ended_at, _g.group_id)
            query = waiting.with_for_update(skip_locked=True).limit(limit * 4 + 16)
            for group_id in list((await connection.execute(query)).scalars()):
                if len(leases) == limit:
                    break
                behind = None if current is None else await _behind(connection, group_id, current)
                if max_staleness is not None and (behind is None or behind > max_staleness):
                    dropped.append(group_id)
                    continue
                lease = Lease(new_id("lease"), group_id, consumer, now + seconds, behind)
                await connection.execute(
                    insert(schema.leases).values(
                        lease_id=lease.lease_id,
                        group_id=group_id,
                        consumer=consumer,
                        policy_version=policy_version,
                        leased_at=now,
                        expires_at=lease.expires_at,
                    )
                )
                leases.append(lease)
            await _deliver(connection, [lease.group_id for lease in leases], "leased")
            await _deliver(connection, dropped, "dropped", f"staler than {max_staleness} policy versions")
        return Offer(tuple(leases), tuple(dropped))

    async def acknowledge(self, lease_id: str) -> None:
        """The group was trained on: it is never offered again. Raises StoreError where the lease has run out."""
        await self._end(lease_id, "acknowledged", "delivered")

    async def give_back(self, lease_id: str) -> None:
        """The consumer will not use the group: it is offered again."""
        await self._end(lease_id, "returned", "waiting")

    async def extend_lease(self, lease_id: str, seconds: float) -> float:
        """Keep the group for `seconds` from now; returns when that ends."""
        now = time.time()
        async with self._database.writing() as connection:
            await _expire(connection, now)
            mine = and_(_l.lease_id == lease_id, _l.ended_at.is_(None))
            changed = await connection.execute(update(schema.leases).where(mine).values(expires_at=now + seconds))
            if changed.rowcount != 1:
                raise _gone(lease_id)
        return now + seconds

    async def feed_depth(self) -> dict[str, int]:
        """How many groups are waiting, leased, delivered, dropped; `open` ones are still being rolled out."""
        query = select(_g.delivery, func.count()).where(_g.delivery.is_not(None)).group_by(_g.delivery)
        async with self._database.writing() as connection:
            await _expire(connection, time.time())
            return {row[0]: row[1] for row in await connection.execute(query)}

    async def _end(self, lease_id: str, outcome: str, delivery: str) -> None:
        now = time.time()
        async with self._database.writing() as connection:
            await _expire(connection, now)
            query = select(_l.group_id, _l.outcome).where(_l.lease_id == lease_id).with_for_update()
            found = (await connection.execute(query)).one_or_none()
            if found is not None and found.outcome == outcome:
                return  # said twice, as a client does whose first answer was lost
            if found is None or found.outcome is not None:
                raise _gone(lease_id)
            await connection.execute(
                update(schema.leases).where(_l.lease_id == lease_id).values(ended_at=now, outcome=outcome)
            )
            await _deliver(connection, [found.group_id], delivery)


def _gone(lease_id: str) -> StoreError:
    return StoreError(f"The lease {lease_id} has run out or never was: its group may be with another consumer")


async def _expire(connection: AsyncConnection, now: float) -> None:
    over = and_(_l.ended_at.is_(None), _l.expires_at < now)
    rows = (await connection.execute(select(_l.lease_id, _l.group_id).where(over).with_for_update())).all()
    if rows:
        mine = _l.lease_id.in_([row.lease_id for row in rows])
        await connection.execute(update(schema.leases).where(mine).values(ended_at=now, outcome="expired"))
        await _deliver(connection, [row.group_id for row in rows], "waiting")


async def _deliver(connection: AsyncConnection, groups: Sequence[str], state: str, reason: str | None = None) -> None:
    values = {"delivery": state} | ({} if reason is None else {"reason": reason})
    if groups:
        await connection.execute(update(schema.groups).where(_g.group_id.in_(groups)).values(**values))


async def _behind(connection: AsyncConnection, group_id: str, current: int) -> int | None:
    """How many versions the oldest rollout of a group is behind; None where one has no number."""
    query = select(_r.policy_version).where(_r.group_id == group_id, _r.status.in_(("done", "timed_out")))
    versions = [_number(version) for version in (await connection.execute(query)).scalars()]
    known = [version for version in versions if version is not None]
    return current - min(known) if known and len(known) == len(versions) else None


def _number(version: str | None) -> int | None:
    return int(version) if version is not None and version.isdecimal() else None
