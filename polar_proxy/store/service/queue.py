"""The queue of rollouts: which worker runs which rollout, for any number of processes on one database.

Promises:

* One worker at a time has a claim on a rollout. Without a heartbeat, the claim ends at `lease_expires_at`.
* A cancelled rollout never starts, and rollouts of a paused job do not start until the job is resumed.
* While the fleet (all servers) is paused, only jobs that a process runs for itself (`polar run`) start rollouts. Each
  claim reads the pause in its own transaction, so a pause holds on every server as soon as it is committed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, exists, func, or_, select, update

from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.repositories.rollouts import (
    Claim,
    ClaimLostError,
    close_sessions,
    end_stages,
    insert_status_event,
    update_rollouts,
)

CANCEL_REQUESTED = "cancel_requested"
"""The value of `rollouts.cause` that asks the worker of a claimed rollout to end the rollout."""

_THROUGHPUT_LEASES = 256
"""The number of newest acknowledged leases from which the consumers' throughput is measured."""

_r = schema.rollouts.c
_g = schema.groups.c
_j = schema.jobs.c
_l = schema.leases.c
_f = schema.fleet.c
_st = schema.stages.c
_final = schema.rollout_is_final
not_ending = or_(_r.cause.is_(None), _r.cause != CANCEL_REQUESTED)
"""SQL condition: the rollout's worker has not been asked to end it."""
unowned = _r.owner_pid.is_(None)
"""SQL condition: the rollout does not belong to a `polar run` process, so the workers of all servers may claim it."""


class QueueRepository(Repository):
    """Queued and claimed rollouts."""

    async def claim(
        self, worker: str, limit: int, seconds: float, *, policy_version: str | None = None, job_id: str | None = None
    ) -> list[Claim]:
        """Claim up to `limit` queued rollouts for `worker`, which must send the first heartbeat within `seconds`.

        `job_id`: only rollouts of this job. None: rollouts of all jobs that no process owns. Jobs of higher priority
        come first. Jobs of equal priority take turns, the one with the fewest claimed rollouts first. Within a job,
        groups keep their order and the rollouts of a group stay together. Groups that would be delivered too stale wait
        (see `staleness_filter`).
        """
        now = time.time()

        def write(connection: Connection) -> list[Claim]:
            conditions = [_job_may_start(now), _of_job_or_unowned(job_id)]
            if (fresh := staleness_filter(connection)) is not None:
                conditions.append(fresh)
            ids = list(connection.scalars(_next_in_queue(conditions).limit(limit)))
            if ids and job_id is None and _fleet_is_paused(connection, now):
                return []
            # On PostgreSQL another worker may have claimed some between the two statements: they are skipped.
            lock = select(_r.rollout_id).where(_r.rollout_id.in_(ids), _r.status == "queued", _r.claimed_by.is_(None))
            free = list(connection.scalars(lock.with_for_update(skip_locked=True)))
            if not free:
                return []
            mine = _r.rollout_id.in_(free)
            values = {"claimed_by": worker, "lease_expires_at": now + seconds, "policy_version": policy_version}
            update_rollouts(connection, mine, **values)
            rows = connection.execute(select(*row_columns(Claim, schema.rollouts)).where(mine))
            return sorted((Claim(*row) for row in rows), key=lambda claim: ids.index(claim.rollout_id))

        return await self._database.write(write)

    async def heartbeat(self, worker: str, rollout_ids: Collection[str], seconds: float) -> tuple[set[str], set[str]]:
        """Extend the worker's claims by `seconds`.

        Returns two sets of ids: cancelled rollouts, which the worker must end, and lost rollouts, for which it must not
        write anything. Rollouts of a paused job that have not started go back into the queue, and count as lost.
        """
        mine = and_(_r.rollout_id.in_(list(rollout_ids)), _r.claimed_by == worker)
        now = time.time()
        job_paused = and_(_r.status == "queued", _r.job_id.in_(select(_j.job_id).where(_j.status == "paused")))

        def write(connection: Connection) -> Sequence[Row[Any]]:
            free_again = and_(mine, job_paused, not_ending)
            update_rollouts(connection, free_again, claimed_by=None, lease_expires_at=None)
            update_rollouts(connection, mine, lease_expires_at=now + seconds)
            must_end = and_(~_final, _r.cause == CANCEL_REQUESTED)
            return connection.execute(select(_r.rollout_id, must_end.label("cancelled")).where(mine)).all()

        rows = await self._database.write(write)
        return {row.rollout_id for row in rows if row.cancelled}, set(rollout_ids) - {row.rollout_id for row in rows}

    async def release(self, claim: Claim, *, cause: str, counts: bool = True) -> int:
        """Queue a rollout for another attempt and return the number of that attempt.

        `counts=False`: the attempt never began, so the next attempt gets the same number. If the rollout's cancellation
        was requested, it is cancelled instead, and 0 is returned. Raises ClaimLostError if the claim was lost.
        """
        now = time.time()
        held = (_r.rollout_id == claim.rollout_id, _r.claimed_by == claim.claimed_by, _r.attempt == claim.attempt)
        attempt = await self._database.write(
            lambda connection: _requeue(connection, and_(*held), cause, now, counts=counts)
        )
        if not attempt:
            raise ClaimLostError(claim.rollout_id)
        return attempt[claim.rollout_id]

    async def cancel(self, rollout_id: str) -> bool:
        """Cancel a queued rollout, and return whether the rollout is cancelled now.

        If a worker has claimed the rollout, ask the worker to end it, and return False.
        """

        def write(connection: Connection) -> bool:
            cancel_rollouts(connection, _r.rollout_id == rollout_id, time.time())
            status = connection.scalar(select(_r.status).where(_r.rollout_id == rollout_id))
            return bool(status == "cancelled")

        return await self._database.write(write)

    async def reclaim_expired(self, *, attempts: int, job_id: str | None = None) -> dict[str, int]:
        """Queue again the rollouts whose leases have expired, and return rollout id -> number of the next attempt.

        The number is 0 for a rollout that ends instead: it fails if it has had `attempts` attempts, and is cancelled if
        its cancellation was requested. `job_id`: only rollouts of this job. None: rollouts of all jobs that no
        process owns.
        """
        return await self._reclaim(and_(_r.lease_expires_at < time.time(), _of_job_or_unowned(job_id)), attempts)

    async def workers(self) -> set[str]:
        """Return the workers that have claimed rollouts. Processes that run a job for themselves (`polar run`) are left
        out."""
        query = select(_r.claimed_by).where(_r.claimed_by.is_not(None), ~_final, unowned).distinct()
        return set(await self._scalars(query))

    async def reclaim_from(self, worker: str, *, attempts: int) -> dict[str, int]:
        """Do what `reclaim_expired` does, for all rollouts of a worker that is known to be dead."""
        return await self._reclaim(and_(_r.claimed_by == worker, unowned), attempts)

    async def _reclaim(self, which: ColumnElement[bool], attempts: int) -> dict[str, int]:
        now = time.time()
        lost = and_(which, _r.claimed_by.is_not(None), ~_final)

        def write(connection: Connection) -> dict[str, int]:
            query = select(_r.rollout_id, _r.status).where(lost, _r.attempt >= attempts, not_ending)
            exhausted = connection.execute(query).all()
            for row in exhausted:
                insert_status_event(connection, row.rollout_id, now, row.status, "failed")
            failed = [row.rollout_id for row in exhausted]
            end_stages(connection, _st.rollout_id.in_(failed), now, "failed", "worker_lost")
            close_sessions(connection, failed, now)
            values = {"cause": "worker_lost", "error": "its worker sent no heartbeat", "ended_at": now}
            update_rollouts(connection, _r.rollout_id.in_(failed), status="failed", claimed_by=None, **values)
            return {**_requeue(connection, lost, "worker_lost", now), **dict.fromkeys(failed, 0)}

        return await self._database.write(write)


@dataclass(frozen=True, slots=True)
class FleetRow:
    """The pause state of the fleet (all servers). Times in seconds since the epoch."""

    paused_at: float | None
    """When the last pause began. None if there was no pause, or if a resume ended it. A pause that ended by itself
    keeps this time."""
    paused_until: float | None
    """When the pause ends by itself; None if only a resume ends it."""

    @property
    def paused(self) -> bool:
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > time.time())


_this_fleet = _f.fleet_id == 1
_select_fleet = select(_f.paused_at, _f.paused_until).where(_this_fleet)


class FleetRepository(Repository):
    """The pause that stops the rollout services of all servers from starting rollouts."""

    async def get(self) -> FleetRow:
        (row,) = await self._rows(FleetRow, _select_fleet)
        return row

    async def update(self, wanted: FleetRow, *, only_if: FleetRow | None = None) -> bool:
        """Pause or resume all servers and return True. If `only_if` is given and is not the present state, change
        nothing and return False.

        A pause waits for the claims in progress, so that `in_flight` includes their rollouts afterwards.
        """

        def write(connection: Connection) -> bool:
            found = FleetRow(*connection.execute(_select_fleet.with_for_update()).one())
            if only_if not in (None, found):
                return False
            paused_until = wanted.paused_until if wanted.paused_at else None
            values = {"paused_at": wanted.paused_at, "paused_until": paused_until}
            connection.execute(update(schema.fleet).where(_this_fleet).values(values))
            return True

        return await self._database.write(write)

    async def in_flight(self) -> list[str]:
        """Return the ids of the unfinished rollouts that the rollout services of all servers have claimed.

        Rollouts that a process runs for itself (`owner_pid`) are not included.
        """
        claimed = and_(_r.claimed_by.is_not(None), unowned, ~_final)
        return await self._scalars(select(_r.rollout_id).where(claimed).order_by(_r.rollout_id))


def staleness_filter(connection: Connection) -> ColumnElement[bool] | None:
    """Return a condition on rollouts that holds back groups which would be delivered too stale. The result is None if
    the throughput of the consumers is unknown, or if no unfinished group has a limit.

    The feed delivers the oldest groups first. Let G be the number of groups that consumers take per policy version. Let
    A be the number of groups for training that come before a group: those that wait for a consumer, and those that were
    started and have not finished. Then the group is delivered floor(A / G) or more versions from now. If this is more
    than the group's `max_staleness`, the rollouts of the group wait. G is measured from acknowledged leases; until G is
    known, no group waits.
    """
    started = exists().where(_r.group_id == _g.group_id, or_(_r.status != "queued", _r.claimed_by.is_not(None)))
    limited = (_g.delivery == "open", _g.max_staleness.is_not(None))
    query = select(_g.group_id, _g.max_staleness, started).where(*limited).order_by(_g.group_id)
    groups = connection.execute(query).all()
    if not groups or (groups_per_version := _groups_per_version(connection)) is None:
        return None
    before = select(func.count()).where(or_(_g.delivery == "waiting", and_(_g.delivery == "open", started)))
    ahead = connection.scalar(before) or 0
    may_start: list[str] = []
    for group_id, max_staleness, is_started in groups:
        if not is_started and int(ahead / groups_per_version) <= max_staleness:
            may_start.append(group_id)
            ahead += 1
    not_started = select(_g.group_id).where(*limited, ~started)
    return or_(_r.group_id.not_in(not_started), _r.group_id.in_(may_start))


def _groups_per_version(connection: Connection) -> float | None:
    """Return the mean number of groups acknowledged per policy version; None if unknown.

    The newest version is left out, because its groups may not all be acknowledged yet.
    """
    query = select(_l.policy_version).where(_l.outcome == "acknowledged").order_by(_l.lease_id.desc())
    numbers = map(version_number, connection.scalars(query.limit(_THROUGHPUT_LEASES)))
    versions = [number for number in numbers if number is not None]
    complete = [version for version in versions if version != max(versions)]
    return len(complete) / len(set(complete)) if complete else None


def version_number(version: str | None) -> int | None:
    """Return a policy version as a number; None if it is missing or not a number."""
    return int(version) if version is not None and version.isdecimal() else None


def _next_in_queue(conditions: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """Select the ids of unclaimed rollouts in the order in which they are to be claimed."""
    busy = (
        select(_r.job_id, func.count().label("claimed"))
        .where(_r.claimed_by.is_not(None), ~_final)
        .group_by(_r.job_id)
        .subquery()
    )
    position = func.row_number().over(
        partition_by=func.coalesce(_r.job_id, _r.group_id), order_by=(_r.group_id, _r.group_index)
    )
    queue = (
        select(
            _r.rollout_id,
            func.coalesce(_j.priority, 0).label("priority"),
            (position + func.coalesce(busy.c.claimed, 0)).label("turn"),
            _r.group_id,
            _r.group_index,
        )
        .outerjoin(schema.jobs, _j.job_id == _r.job_id)
        .outerjoin(busy, busy.c.job_id == _r.job_id)
        .where(_r.status == "queued", _r.claimed_by.is_(None), *conditions)
        .subquery()
    )
    c = queue.c
    return select(c.rollout_id).order_by(c.priority.desc(), c.turn, c.group_id, c.group_index)


def _fleet_is_paused(connection: Connection, now: float) -> bool:
    # A shared lock: a pause waits for the claims in progress, so that it can count them, and claims do not wait for
    # each other.
    paused = and_(_f.paused_at.is_not(None), or_(_f.paused_until.is_(None), _f.paused_until > now))
    query = select(paused).select_from(schema.fleet).with_for_update(read=True)
    return bool(connection.execute(query).scalar_one())


def _of_job_or_unowned(job_id: str | None) -> ColumnElement[bool]:
    return unowned if job_id is None else _r.job_id == job_id


def _job_may_start(now: float) -> ColumnElement[bool]:
    """Return a condition: the rollout has no job, or an open job, or a paused job whose pause is over."""
    pause_over = and_(_j.status == "paused", _j.paused_until <= now)
    return or_(_j.status.is_(None), _j.status == "open", pause_over)


def cancel_rollouts(connection: Connection, which: ColumnElement[bool], now: float) -> list[str]:
    """Cancel the unclaimed rollouts that meet `which`. Ask workers to end the claimed rollouts, and return the ids of
    the claimed rollouts."""
    rows = connection.execute(select(_r.rollout_id, _r.status, _r.claimed_by).where(which, ~_final)).all()
    unclaimed = [row for row in rows if row.claimed_by is None]
    for row in unclaimed:
        insert_status_event(connection, row.rollout_id, now, row.status, "cancelled")
    values = {"cause": "cancelled", "error": "cancelled before it started", "ended_at": now}
    mine = _r.rollout_id.in_([row.rollout_id for row in unclaimed])
    update_rollouts(connection, mine, status="cancelled", **values)
    claimed = [row.rollout_id for row in rows if row.claimed_by is not None]
    update_rollouts(connection, _r.rollout_id.in_(claimed), cause=CANCEL_REQUESTED)
    return claimed


def _requeue(
    connection: Connection, which: ColumnElement[bool], cause: str, now: float, *, counts: bool = True
) -> dict[str, int]:
    """Queue rollouts for another attempt, or cancel those whose cancellation was requested. Return rollout id -> number
    of the next attempt (0: cancelled).

    `counts=False`: the next attempt takes the number of the present attempt, whose stages are removed."""
    query = select(_r.rollout_id, _r.status, _r.attempt, _r.cause).where(which, ~_final).with_for_update()
    rows = connection.execute(query).all()
    attempts = {row.rollout_id: 0 if row.cause == CANCEL_REQUESTED else row.attempt + counts for row in rows}
    for row in rows:
        status = "queued" if attempts[row.rollout_id] else "cancelled"
        insert_status_event(connection, row.rollout_id, now, row.status, status, cause)
    end_stages(connection, _st.rollout_id.in_(attempts), now, "failed", cause)
    for rollout_id, attempt in attempts.items() if not counts else ():
        connection.execute(delete(schema.stages).where(_st.rollout_id == rollout_id, _st.attempt == attempt))
    # In the same transaction: the next worker opens its own session, which must not be closed.
    close_sessions(connection, list(attempts), now)
    again = _r.rollout_id.in_([rollout_id for rollout_id, attempt in attempts.items() if attempt])
    cancelled = _r.rollout_id.in_([rollout_id for rollout_id, attempt in attempts.items() if not attempt])
    unclaimed: dict[str, Any] = {"claimed_by": None, "lease_expires_at": None}
    fresh = {
        "attempt": _r.attempt + int(counts),
        "session_id": None,
        "started_at": None,
        "incomplete": False,
        **unclaimed,
    }
    update_rollouts(connection, again, status="queued", cause=cause, **fresh)
    ended = {"cause": "cancelled", "error": "cancelled", "ended_at": now, **unclaimed}
    update_rollouts(connection, cancelled, status="cancelled", **ended)
    return attempts
