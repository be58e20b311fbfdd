"""The trainer feed: finished groups, each leased to one consumer and acknowledged after training.

Promises, for any number of consumers and processes on one database:

* A group has at most one open lease; a unique index enforces it.
* A lease that is neither acknowledged nor extended in time expires, and the group is offered again.
* A group whose staleness exceeds the consumer's limit or the group's own limit is dropped, never delivered.
* An unfinished group that already exceeds its own limit is dropped (`drop_stale`), and starts no more rollouts.

The staleness of a group is the trainer's policy version minus the lowest policy version at which one of its rollouts
was claimed. Rollouts that failed or were cancelled do not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, exists, func, insert, or_, select, update

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.secrets import storable_text
from polar_proxy.store.service.groups import update_groups
from polar_proxy.store.service.job_events import insert_job_event
from polar_proxy.store.service.queue import cancel_rollouts, version_number
from polar_proxy.types import new_id

_g = schema.groups.c
_l = schema.leases.c
_r = schema.rollouts.c


class LeaseExpiredError(StoreError):
    """The lease has ended (it was acknowledged or returned, or it has expired), or never existed."""

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"The lease {lease_id} has expired, was ended or never existed: its group may be leased again")


@dataclass(frozen=True, slots=True)
class GroupLease:
    """A group that belongs to a consumer until `expires_at` (seconds since the epoch)."""

    lease_id: str
    group_id: str
    consumer: str
    expires_at: float
    staleness: int | None
    """The trainer's policy version minus `policy_version` of the group; None if a version is missing or not a
    number."""
    policy_version: str | None = None
    """The lowest policy version at which a finished rollout of the group was claimed; None if a version is missing or
    not a number."""


@dataclass(frozen=True, slots=True)
class LeaseBatch:
    """The groups leased to a consumer, and the groups that this lease request dropped as too stale."""

    leases: tuple[GroupLease, ...]
    dropped: tuple[str, ...]
    """Ids of the dropped groups."""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease of a group, open or ended. `outcome`: acknowledged, returned or expired; None while it is open."""

    consumer: str
    policy_version: str | None
    leased_at: float
    ended_at: float | None
    outcome: str | None


class FeedRepository(Repository):
    """Finished groups for training, and their leases."""

    async def leases_of(self, group_id: str) -> list[LeaseRow]:
        """Return all leases of a group, oldest first."""
        query = select(*row_columns(LeaseRow, schema.leases)).where(_l.group_id == group_id).order_by(_l.lease_id)
        return await self._rows(LeaseRow, query)

    async def lease(
        self,
        consumer: str,
        limit: int,
        seconds: float,
        *,
        policy_version: str | None = None,
        max_staleness: int | None = None,
    ) -> LeaseBatch:
        """Lease up to `limit` finished groups, oldest first, for `seconds`.

        If `policy_version` is a whole number, groups with a limit (`max_staleness` or their own) are checked first: a
        group is dropped, not leased, if its staleness exceeds a limit or is unknown. If `policy_version` is not a whole
        number, no group is dropped, and UsageError is raised if `max_staleness` is given.
        """
        now = time.time()
        current = version_number(policy_version)
        if max_staleness is not None and current is None:
            raise UsageError(f"max_staleness needs a policy version that is a number, not {policy_version!r}.")

        def write(connection: Connection) -> LeaseBatch:
            _expire(connection, now)
            # More than the limit, because some may be too stale.
            waiting = select(_g.group_id, _g.max_staleness).where(_g.delivery == "waiting")
            query = waiting.order_by(_g.ended_at, _g.group_id).with_for_update(skip_locked=True).limit(limit * 4 + 16)
            leases: list[GroupLease] = []
            exceeded: dict[str, int] = {}  # group id -> the limit that its staleness exceeds
            for group_id, own_limit in connection.execute(query).all():
                if len(leases) == limit:
                    break
                oldest = None if current is None else _oldest_version(connection, group_id)
                staleness = None if current is None or oldest is None else current - oldest
                limits = [] if current is None else [one for one in (max_staleness, own_limit) if one is not None]
                if limits and (staleness is None or staleness > min(limits)):
                    exceeded[group_id] = min(limits)
                    continue
                version = None if oldest is None else str(oldest)
                leases.append(GroupLease(new_id("lease"), group_id, consumer, now + seconds, staleness, version))
            for lease in leases:
                values = {"lease_id": lease.lease_id, "group_id": lease.group_id, "expires_at": lease.expires_at}
                values |= {"consumer": storable_text(consumer), "policy_version": policy_version, "leased_at": now}
                connection.execute(insert(schema.leases).values(values))
            _set_delivery(connection, now, [lease.group_id for lease in leases], "leased")
            for group_id, max_age in exceeded.items():
                _set_delivery(connection, now, [group_id], "dropped", _stale_reason(max_age))
            return LeaseBatch(tuple(leases), tuple(exceeded))

        return await self._database.write(write)

    async def any_waiting(self) -> bool:
        """Return whether a group waits for a consumer or has an expired lease."""
        waiting = exists().where(_g.delivery == "waiting")
        expired = exists().where(_l.ended_at.is_(None), _l.expires_at < time.time())
        return any(await self._scalars(select(or_(waiting, expired))))

    async def drop_stale(self, policy_version: str | None) -> tuple[list[str], list[str]]:
        """Drop unfinished groups that exceed their own staleness limit, because they can no longer be delivered.

        Returns the ids of the groups, and the ids of their claimed rollouts, which the workers must end.
        """
        current = version_number(policy_version)
        if current is None:
            return [], []
        now = time.time()
        started = (
            select(_g.group_id, _g.max_staleness, _r.policy_version)
            .join(schema.rollouts, _r.group_id == _g.group_id)
            .where(_g.delivery == "open", _g.max_staleness.is_not(None))
            .where(_r.policy_version.is_not(None), _r.status.not_in(("failed", "cancelled")))
            .distinct()
        )

        rows = await self._database.read(lambda connection: connection.execute(started).all())
        limits = {
            row.group_id: row.max_staleness
            for row in rows
            if (version := version_number(row.policy_version)) is not None and current - version > row.max_staleness
        }
        if not limits:
            return [], []

        def write(connection: Connection) -> tuple[list[str], list[str]]:
            still_open = (_g.group_id.in_(sorted(limits)), _g.delivery == "open")
            groups = list(connection.scalars(select(_g.group_id).where(*still_open).with_for_update()))
            for group_id in groups:
                _set_delivery(connection, now, [group_id], "dropped", _stale_reason(limits[group_id]))
            return groups, cancel_rollouts(connection, _r.group_id.in_(groups), now)

        return await self._database.write(write)

    async def acknowledge(self, lease_id: str) -> None:
        """Mark the group as trained on. Raises LeaseExpiredError if the lease has expired or was released."""
        await self._end(lease_id, "acknowledged", "delivered")

    async def release(self, lease_id: str) -> None:
        """Give the group back unused, so that it is offered again. Raises LeaseExpiredError if the lease has expired or
        was acknowledged."""
        await self._end(lease_id, "returned", "waiting")

    async def extend(self, lease_id: str, seconds: float) -> float:
        """Extend the lease to `seconds` from now and return the new end. Raises LeaseExpiredError if the lease has
        ended."""
        now = time.time()

        def write(connection: Connection) -> None:
            _expire(connection, now)
            mine = and_(_l.lease_id == lease_id, _l.ended_at.is_(None))
            changed = connection.execute(update(schema.leases).where(mine).values(expires_at=now + seconds))
            if changed.rowcount != 1:
                raise LeaseExpiredError(lease_id)

        await self._database.write(write)
        return now + seconds

    async def depth(self) -> dict[str, int]:
        """Return the number of groups by state of delivery: open (unfinished), waiting, leased, delivered, dropped.

        States without groups are left out.
        """
        query = select(_g.delivery, func.count()).where(_g.delivery.is_not(None)).group_by(_g.delivery)
        now = time.time()
        if await self._scalars(select(_l.lease_id).where(_l.ended_at.is_(None), _l.expires_at < now).limit(1)):
            await self._database.write(lambda connection: _expire(connection, now))
        return dict(await self._database.read(lambda connection: connection.execute(query).all()))

    async def drop_reasons(self) -> dict[str, int]:
        """Return the number of dropped groups by reason."""
        query = select(_g.reason, func.count()).where(_g.delivery == "dropped").group_by(_g.reason)
        reasons = await self._database.read(lambda connection: connection.execute(query).all())
        return {reason or "unknown": groups for reason, groups in reasons}

    async def _end(self, lease_id: str, outcome: str, delivery: str) -> None:
        now = time.time()

        def write(connection: Connection) -> None:
            _expire(connection, now)
            query = select(_l.group_id, _l.outcome).where(_l.lease_id == lease_id).with_for_update()
            found = connection.execute(query).one_or_none()
            if found is not None and found.outcome == outcome:
                return  # repeated by a client that got no response
            if found is None or found.outcome is not None:
                raise LeaseExpiredError(lease_id)
            ended = update(schema.leases).where(_l.lease_id == lease_id).values(ended_at=now, outcome=outcome)
            connection.execute(ended)
            _set_delivery(connection, now, [found.group_id], delivery)

        await self._database.write(write)


def _expire(connection: Connection, now: float) -> None:
    """End expired leases, so that their groups can be leased again."""
    expired = and_(_l.ended_at.is_(None), _l.expires_at < now)
    rows = connection.execute(select(_l.lease_id, _l.group_id).where(expired).with_for_update()).all()
    if rows:
        mine = _l.lease_id.in_([row.lease_id for row in rows])
        connection.execute(update(schema.leases).where(mine).values(ended_at=now, outcome="expired"))
        _set_delivery(connection, now, [row.group_id for row in rows], "waiting")


def _set_delivery(
    connection: Connection, now: float, groups: Sequence[str], delivery: str, reason: str | None = None
) -> None:
    if not groups:
        return
    mine = _g.group_id.in_(groups)
    update_groups(connection, mine, delivery=delivery, **({} if reason is None else {"reason": reason}))
    for row in connection.execute(select(_g.group_id, _g.job_id).where(mine)).all():
        data = {"status": delivery, "reason": reason}
        insert_job_event(connection, row.job_id, row.group_id, now, "feed", data)


def _oldest_version(connection: Connection, group_id: str) -> int | None:
    """Return the lowest policy version of the group's finished rollouts; None if a version is missing or not a
    number."""
    query = select(_r.policy_version).where(_r.group_id == group_id, _r.status.in_(("done", "timed_out")))
    versions = [version_number(version) for version in connection.scalars(query)]
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def _stale_reason(max_staleness: int) -> str:
    return f"more than {max_staleness} policy versions old"
