"""The trainer feed: finished groups, each leased to one consumer at a time and acknowledged when it was trained on.

Promises, for any number of consumers and processes on one database:

* no group is with two consumers: a group has at most one open lease, which the database itself enforces;
* a lease that is neither acknowledged nor extended in time ends, and the group is offered again;
* a group that is further behind than the consumer's bound, or its own, is dropped and counted, never delivered;
* one that could only be delivered too late is not gone on with (`drop_stale`, which whoever begins rollouts asks).

How far behind: the versions between the policy under which its oldest rollout was begun and the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import schema
from polar_proxy.store.base import Repository
from polar_proxy.store.job_events import insert_job_event
from polar_proxy.store.queue import cancel_rollouts
from polar_proxy.types import new_id

_g = schema.groups.c
_l = schema.leases.c
_r = schema.rollouts.c


class LeaseExpiredError(StoreError):
    """The lease has run out, or never was."""


@dataclass(frozen=True, slots=True)
class GroupLease:
    """A group that a consumer has until `expires_at` (seconds since the epoch)."""

    lease_id: str
    group_id: str
    consumer: str
    expires_at: float
    staleness: int | None
    """How many policy versions the group's oldest rollout is behind; None where versions are not numbers."""
    policy_version: str | None = None
    """Under which that rollout was begun; None where versions are not numbers."""


@dataclass(frozen=True, slots=True)
class LeaseBatch:
    """What a consumer was given, and what could not be given any more."""

    leases: tuple[GroupLease, ...]
    dropped: tuple[str, ...]
    """Groups that were too stale."""


class FeedRepository(Repository):
    async def lease(
        self,
        consumer: str,
        limit: int,
        seconds: float,
        *,
        policy_version: str | None = None,
        max_staleness: int | None = None,
    ) -> LeaseBatch:
        """Up to `limit` finished groups, oldest first, for `seconds`.

        With `max_staleness`, groups begun under a policy more than so many versions before `policy_version` are
        dropped instead, and so are those further behind than their own bound. Raises UsageError where that is asked
        for and versions are not whole numbers.
        """
        now = time.time()
        current = _number(policy_version)
        if max_staleness is not None and current is None:
            raise UsageError(f"A bound on staleness needs policy versions that are numbers, not {policy_version!r}.")
        leases: list[GroupLease] = []
        dropped: list[str] = []
        async with self._database.writing() as connection:
            await _expire(connection, now)
            # More than asked for, since some may be too stale.
            waiting = select(_g.group_id, _g.max_staleness).where(_g.delivery == "waiting")
            query = waiting.order_by(_g.ended_at, _g.group_id).with_for_update(skip_locked=True).limit(limit * 4 + 16)
            stale: dict[int, list[str]] = {}
            for group_id, own in (await connection.execute(query)).all():
                if len(leases) == limit:
                    break
                oldest = None if current is None else await _oldest(connection, group_id)
                behind = None if current is None or oldest is None else current - oldest
                bound = (
                    None
                    if current is None
                    else min((one for one in (max_staleness, own) if one is not None), default=None)
                )
                if bound is not None and (behind is None or behind > bound):
                    stale.setdefault(bound, []).append(group_id)
                    continue
                begun = None if oldest is None else str(oldest)
                lease = GroupLease(new_id("lease"), group_id, consumer, now + seconds, behind, begun)
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
            await _deliver(connection, now, [lease.group_id for lease in leases], "leased")
            for bound, groups in stale.items():
                await _deliver(connection, now, groups, "dropped", _too_stale(bound))
                dropped += groups
        return LeaseBatch(tuple(leases), tuple(dropped))

    async def any_waiting(self) -> bool:
        """Whether there may be a group for a consumer now."""
        waiting = exists().where(_g.delivery == "waiting")
        over = exists().where(_l.ended_at.is_(None), _l.expires_at < time.time())
        async with self._database.reading() as connection:
            return bool((await connection.execute(select(or_(waiting, over)))).scalar_one())

    async def drop_stale(self, policy_version: str | None) -> tuple[list[str], list[str]]:
        """Give up the groups that are not finished and have fallen behind their own bound: whoever begins rollouts
        asks this first. Returns the groups, and their rollouts that workers have in hand and must end.

        Nothing of such a group can be delivered any more, whatever becomes of the rest of it.
        """
        current = _number(policy_version)
        if current is None:
            return [], []
        now = time.time()
        begun = select(_g.group_id, _g.max_staleness, _r.policy_version).join(
            schema.rollouts, _r.group_id == _g.group_id
        )
        begun = begun.where(_g.delivery == "open", _g.max_staleness.is_not(None))
        begun = begun.where(_r.policy_version.is_not(None), _r.status.not_in(("failed", "cancelled"))).distinct()
        async with self._database.reading() as connection:
            rows = (await connection.execute(begun)).all()
        bounds = {row.group_id: row.max_staleness for row in rows if _is_behind(row.policy_version, current, row[1])}
        if not bounds:
            return [], []
        async with self._database.writing() as connection:
            mine = and_(_g.group_id.in_(list(bounds)), _g.delivery == "open")
            ids = list((await connection.execute(select(_g.group_id).where(mine).with_for_update())).scalars())
            for group_id in ids:
                await _deliver(connection, now, [group_id], "dropped", _too_stale(bounds[group_id]))
            in_flight = await cancel_rollouts(connection, _r.group_id.in_(ids), now)
        return ids, in_flight

    async def acknowledge(self, lease_id: str) -> None:
        """The group was trained on: it is never offered again. Raises LeaseLostError where the lease has
        run out."""
        await self._end(lease_id, "acknowledged", "delivered")

    async def release(self, lease_id: str) -> None:
        """The consumer will not use the group: it is offered again."""
        await self._end(lease_id, "returned", "waiting")

    async def extend(self, lease_id: str, seconds: float) -> float:
        """Keep the group for `seconds` from now; returns when that ends."""
        now = time.time()
        async with self._database.writing() as connection:
            await _expire(connection, now)
            mine = and_(_l.lease_id == lease_id, _l.ended_at.is_(None))
            changed = await connection.execute(update(schema.leases).where(mine).values(expires_at=now + seconds))
            if changed.rowcount != 1:
                raise _gone(lease_id)
        return now + seconds

    async def depth(self) -> dict[str, int]:
        """How many groups are waiting, leased, delivered, dropped; `open` ones are still being rolled out."""
        query = select(_g.delivery, func.count()).where(_g.delivery.is_not(None)).group_by(_g.delivery)
        async with self._database.writing() as connection:
            await _expire(connection, time.time())
            return {row[0]: row[1] for row in await connection.execute(query)}

    async def drop_reasons(self) -> dict[str, int]:
        """How many groups were offered and dropped, by reason."""
        query = select(_g.reason, func.count()).where(_g.delivery == "dropped").group_by(_g.reason)
        async with self._database.reading() as connection:
            return {row[0] or "unknown": row[1] for row in await connection.execute(query)}

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
            await _deliver(connection, now, [found.group_id], delivery)


def _gone(lease_id: str) -> LeaseExpiredError:
    return LeaseExpiredError(f"The lease {lease_id} has run out or never was: its group may be with another consumer")


async def _expire(connection: AsyncConnection, now: float) -> None:
    over = and_(_l.ended_at.is_(None), _l.expires_at < now)
    rows = (await connection.execute(select(_l.lease_id, _l.group_id).where(over).with_for_update())).all()
    if rows:
        mine = _l.lease_id.in_([row.lease_id for row in rows])
        await connection.execute(update(schema.leases).where(mine).values(ended_at=now, outcome="expired"))
        await _deliver(connection, now, [row.group_id for row in rows], "waiting")


async def _deliver(
    connection: AsyncConnection, now: float, groups: Sequence[str], state: str, reason: str | None = None
) -> None:
    if not groups:
        return
    mine = _g.group_id.in_(groups)
    values = {"delivery": state} | ({} if reason is None else {"reason": reason})
    await connection.execute(update(schema.groups).where(mine).values(**values))
    for row in (await connection.execute(select(_g.group_id, _g.job_id).where(mine))).all():
        told = {"status": state, "reason": reason}
        await insert_job_event(connection, row.job_id, row.group_id, now, "feed", told)


async def _oldest(connection: AsyncConnection, group_id: str) -> int | None:
    """The version under which the oldest rollout of a group was begun; None where one has no number."""
    query = select(_r.policy_version).where(_r.group_id == group_id, _r.status.in_(("done", "timed_out")))
    versions = [_number(version) for version in (await connection.execute(query)).scalars()]
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def _is_behind(version: str, current: int, bound: int) -> bool:
    number = _number(version)
    return number is not None and current - number > bound


def _too_stale(bound: int) -> str:
    return f"staler than {bound} policy versions"


def _number(version: str | None) -> int | None:
    return int(version) if version is not None and version.isdecimal() else None
