"""The queue of rollouts: which worker has which, for any number of processes on one database.

Promises:

* a rollout is held by one worker at a time; a worker that says nothing until `lease_expires_at` has lost it;
* what was cancelled is never begun afterwards, and of a paused job nothing is begun until it goes on;
* while all servers are paused (`fleet`) nothing is begun but what a process runs for itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import UsageError
from polar_proxy.store import schema
from polar_proxy.store.artifacts import insert_event
from polar_proxy.store.base import Repository
from polar_proxy.store.fleet import fleet_paused
from polar_proxy.store.pace import staleness_filter
from polar_proxy.store.stages import Claim, close_sessions, end_stages

CANCEL_REQUESTED = "cancel_requested"
"""The cause of a rollout that a worker has in hand and is asked to end."""


_r = schema.rollouts.c
_j = schema.jobs.c
_st = schema.stages.c
_final = schema.rollout_is_final


class QueueRepository(Repository):
    async def claim(
        self, worker: str, limit: int, seconds: float, *, policy_version: str | None = None, job_id: str | None = None
    ) -> list[Claim]:
        """Take up to `limit` queued rollouts for `worker`, to be kept by `hold` before `seconds` have passed.

        Of one job, or of all that no process owns. Jobs of higher priority come first, then jobs take turns, the one
        with least in work first; within a job groups go in order and siblings together. A group that could only be
        delivered too stale waits (`pace`).
        """
        now = time.time()
        columns = (_r.rollout_id, _r.group_id, _r.job_id, _r.task_id, _r.group_index, _r.attempt)
        more = (_r.harness, _r.sandbox, _r.seed, _r.config, _r.claimed_by)
        async with self._database.writing() as connection:
            may_begin = [_may_begin(now), _within(job_id)]
            if (timely := await staleness_filter(connection)) is not None:
                may_begin.append(timely)
            ids = list((await connection.execute(_queued(may_begin).limit(limit))).scalars())
            if ids and job_id is None and await _fleet_paused(connection, now):
                return []
            # Another worker may have taken some between the two statements (PostgreSQL): those are skipped.
            lock = select(_r.rollout_id).where(_r.rollout_id.in_(ids), _r.status == "queued", _r.claimed_by.is_(None))
            mine = list((await connection.execute(lock.with_for_update(skip_locked=True))).scalars())
            if not mine:
                return []
            await connection.execute(
                update(schema.rollouts)
                .where(_r.rollout_id.in_(mine))
                .values(claimed_by=worker, lease_expires_at=now + seconds, policy_version=policy_version)
            )
            rows = (await connection.execute(select(*columns, *more).where(_r.rollout_id.in_(mine)))).all()
        held = {row.rollout_id: Claim(**row._mapping) for row in rows}
        return [held[rollout_id] for rollout_id in ids if rollout_id in held]

    async def heartbeat(self, worker: str, rollout_ids: Collection[str], seconds: float) -> tuple[set[str], set[str]]:
        """Say that the worker still has these. Returns those it must end because they were cancelled, and those that
        are not its own any more, about which it has nothing to say.

        What it has not begun of a job that was paused since goes back into the queue, and is not its own any more.
        """
        mine = and_(_r.rollout_id.in_(list(rollout_ids)), _r.claimed_by == worker)
        now = time.time()
        paused = and_(_r.status == "queued", _r.job_id.in_(select(_j.job_id).where(_j.status == "paused")))
        async with self._database.writing() as connection:
            await connection.execute(
                update(schema.rollouts)
                .where(mine, paused, or_(_r.cause.is_(None), _r.cause != CANCEL_REQUESTED))
                .values(claimed_by=None, lease_expires_at=None)
            )
            await connection.execute(update(schema.rollouts).where(mine).values(lease_expires_at=now + seconds))
            asked = and_(~_final, _r.cause == CANCEL_REQUESTED)
            rows = (await connection.execute(select(_r.rollout_id, asked.label("cancelled")).where(mine))).all()
        return {row.rollout_id for row in rows if row.cancelled}, set(rollout_ids) - {row.rollout_id for row in rows}

    async def release(self, rollout_id: str, *, cause: str) -> int:
        """Put a rollout back into the queue for another attempt, whose number is returned.

        0: it was to be cancelled, and now is. Raises UsageError where it has ended."""
        now = time.time()
        async with self._database.writing() as connection:
            attempt = await _requeue(connection, _r.rollout_id == rollout_id, cause, now)
        if not attempt:
            raise UsageError(f"The rollout {rollout_id} has ended, or does not exist.")
        return attempt[rollout_id]

    async def reclaim_expired(self, *, attempts: int, job_id: str | None = None) -> dict[str, int]:
        """Take rollouts from workers that fell silent: queued again, with their new attempt's number, or, after so
        many `attempts` or where they were to be cancelled, ended (attempt 0). Of one job, or of all that no process
        owns."""
        return await self._take(and_(_r.lease_expires_at < time.time(), _within(job_id)), attempts)

    async def workers(self) -> set[str]:
        """The workers that hold rollouts which no process owns."""
        query = select(_r.claimed_by).where(_r.claimed_by.is_not(None), ~_final, _within(None)).distinct()
        async with self._database.reading() as connection:
            return {str(worker) for worker in (await connection.execute(query)).scalars()}

    async def reclaim_from(self, worker: str, *, attempts: int) -> dict[str, int]:
        """As `lost`, of all that this worker holds: it is known to be dead."""
        return await self._take(and_(_r.claimed_by == worker, _within(None)), attempts)

    async def _take(self, which: ColumnElement[bool], attempts: int) -> dict[str, int]:
        now = time.time()
        silent = and_(which, _r.claimed_by.is_not(None), ~_final)
        async with self._database.writing() as connection:
            spent = (
                await connection.execute(select(_r.rollout_id, _r.status).where(silent, _r.attempt >= attempts))
            ).all()
            for row in spent:
                await insert_event(connection, row.rollout_id, now, "status", {"from": row.status, "to": "failed"})
            gone = [row.rollout_id for row in spent]
            await end_stages(connection, _st.rollout_id.in_(gone), now, "failed", "worker_lost")
            await close_sessions(connection, gone, now)
            await connection.execute(
                update(schema.rollouts)
                .where(_r.rollout_id.in_(gone))
                .values(
                    status="failed", cause="worker_lost", error="its worker fell silent", ended_at=now, claimed_by=None
                )
            )
            again = await _requeue(connection, silent, "worker_lost", now)
        return {**again, **dict.fromkeys(gone, 0)}

    async def cancel(self, rollout_id: str) -> bool:
        """Cancel a rollout that is queued. False: a worker has it in hand and must end it, or it has ended."""
        async with self._database.writing() as connection:
            await cancel_rollouts(connection, _r.rollout_id == rollout_id, time.time())
            query = select(_r.status).where(_r.rollout_id == rollout_id)
            return (await connection.execute(query)).scalar_one_or_none() == "cancelled"


def _queued(which: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """Ids of what nobody has in hand, whoever is next first."""
    busy = (
        select(_r.job_id, func.count().label("n"))
        .where(_r.claimed_by.is_not(None), ~_final)
        .group_by(_r.job_id)
        .subquery()
    )
    place = func.row_number().over(
        partition_by=func.coalesce(_r.job_id, _r.group_id), order_by=(_r.group_id, _r.group_index)
    )
    queue = (
        select(
            _r.rollout_id,
            func.coalesce(_j.priority, 0).label("priority"),
            (place + func.coalesce(busy.c.n, 0)).label("turn"),
            _r.group_id,
            _r.group_index,
        )
        .outerjoin(schema.jobs, _j.job_id == _r.job_id)
        .outerjoin(busy, busy.c.job_id == _r.job_id)
        .where(_r.status == "queued", _r.claimed_by.is_(None), *which)
        .subquery()
    )
    c = queue.c
    return select(c.rollout_id).order_by(c.priority.desc(), c.turn, c.group_id, c.group_index)


async def _fleet_paused(connection: AsyncConnection, now: float) -> bool:
    """Locked, but not against other claims: who pauses waits for the claims that are under way, and counts them."""
    query = select(fleet_paused(now)).select_from(schema.fleet).with_for_update(read=True)
    return bool((await connection.execute(query)).scalar_one())


def _within(job_id: str | None) -> ColumnElement[bool]:
    return _r.owner_pid.is_(None) if job_id is None else _r.job_id == job_id


def _may_begin(now: float) -> ColumnElement[bool]:
    """Whether rollouts of this job, or of none, may be begun."""
    over = and_(_j.status == "paused", _j.paused_until <= now)
    return or_(_j.status.is_(None), _j.status == "open", over)


async def cancel_rollouts(connection: AsyncConnection, which: ColumnElement[bool], now: float) -> list[str]:
    """Cancel what nobody has in hand and ask for the end of the rest, whose ids are returned."""
    rows = (await connection.execute(select(_r.rollout_id, _r.status, _r.claimed_by).where(which, ~_final))).all()
    free = [row.rollout_id for row in rows if row.claimed_by is None]
    for row in rows:
        if row.claimed_by is None:
            await insert_event(connection, row.rollout_id, now, "status", {"from": row.status, "to": "cancelled"})
    await connection.execute(
        update(schema.rollouts)
        .where(_r.rollout_id.in_(free))
        .values(status="cancelled", cause="cancelled", error="cancelled before it began", ended_at=now)
    )
    held = [row.rollout_id for row in rows if row.claimed_by is not None]
    await connection.execute(update(schema.rollouts).where(_r.rollout_id.in_(held)).values(cause=CANCEL_REQUESTED))
    return held


async def _requeue(connection: AsyncConnection, which: ColumnElement[bool], cause: str, now: float) -> dict[str, int]:
    """Queue them for another attempt, whose numbers are returned; 0: it was to be cancelled, and now is."""
    query = select(_r.rollout_id, _r.status, _r.attempt, _r.cause).where(which, ~_final).with_for_update()
    rows = (await connection.execute(query)).all()
    ended = [row.rollout_id for row in rows if row.cause == CANCEL_REQUESTED]
    again = {row.rollout_id: row.attempt + 1 for row in rows if row.cause != CANCEL_REQUESTED}
    for row in rows:
        to = "queued" if row.rollout_id in again else "cancelled"
        data: Any = {"from": row.status, "to": to, "cause": cause}
        await insert_event(connection, row.rollout_id, now, "status", data)
    await end_stages(connection, _st.rollout_id.in_([*again, *ended]), now, "failed", cause)
    # In this transaction: whoever takes it next opens a session of its own, which is not to be closed.
    await close_sessions(connection, [*again, *ended], now)
    free: dict[str, Any] = {"claimed_by": None, "lease_expires_at": None}
    await connection.execute(
        update(schema.rollouts)
        .where(_r.rollout_id.in_(list(again)))
        .values(
            status="queued",
            attempt=_r.attempt + 1,
            cause=cause,
            session_id=None,
            started_at=None,
            incomplete=False,
            **free,
        )
    )
    await connection.execute(
        update(schema.rollouts)
        .where(_r.rollout_id.in_(ended))
        .values(status="cancelled", cause="cancelled", error="cancelled", ended_at=now, **free)
    )
    return {**again, **dict.fromkeys(ended, 0)}
