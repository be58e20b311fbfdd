"""Jobs and the queue: what was submitted, which worker has which rollout, and the stages that each went through.

Promises, for any number of processes on one database:

* a rollout is held by one worker at a time; a worker that says nothing until `held_until` has lost it;
* an idempotency key makes one job, whoever says it how often;
* what a job was cancelled for is never begun afterwards.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, case, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import UsageError
from polar_proxy.store import jsontext, schema
from polar_proxy.store.evidence import insert_event
from polar_proxy.store.rows import FINAL_STATUSES
from polar_proxy.store.stages import Held, Stages, close_sessions, end_stages
from polar_proxy.types import Json, new_id

CANCEL_REQUESTED = "cancel_requested"
"""The cause of a rollout that a worker has in hand and is asked to end."""

JobStatus = Literal["open", "paused", "done", "cancelled"]

_r = schema.rollouts.c
_g = schema.groups.c
_j = schema.jobs.c
_st = schema.stages.c
_final = _r.status.in_(sorted(FINAL_STATUSES))


@dataclass(frozen=True, slots=True)
class NewRollout:
    """A rollout to queue."""

    harness: str
    sandbox: str
    engine: str
    model: str
    seed: int | None
    config: Json


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group to queue: its rollouts, of which `wanted` decide it (more may be started)."""

    task_id: str
    wanted: int
    config: Json
    rollouts: tuple[NewRollout, ...]
    offered: bool = False
    """It goes to the trainer feed when it is finished."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job with how many of its rollouts stand where: {"queued": 3, "running": 1, ...}."""

    job_id: str
    idempotency_key: str | None
    label: str | None
    spec: Json
    priority: int
    status: JobStatus
    error: str | None
    created_at: float
    ended_at: float | None
    groups: int
    rollouts: dict[str, int]


@dataclass(frozen=True, slots=True)
class GroupRow:
    group_id: str
    job_id: str | None
    task_id: str
    size: int
    wanted: int
    config: Json
    status: str
    reason: str | None
    delivery: str | None
    created_at: float
    ended_at: float | None


class Jobs(Stages):
    async def submit_job(
        self,
        spec: Json,
        groups: Sequence[NewGroup],
        *,
        idempotency_key: str | None = None,
        priority: int = 0,
        label: str | None = None,
        owned: bool = False,
    ) -> tuple[JobRow, bool]:
        """Queue a job with all its groups and rollouts, and whether it is new: a known key gives the job that has it.

        `owned`: it lives and dies with this process (`polar run`), which alone claims it, by its id.

        The tasks must be stored already. Raises UsageError where the key was used for another `spec`.
        """
        now = time.time()
        job_id = new_id("job")
        async with self._database.writing() as connection:
            added = await connection.execute(
                self._database.insert_new(schema.jobs).values(
                    job_id=job_id,
                    idempotency_key=idempotency_key,
                    label=jsontext.clean_text(label),
                    spec=spec,
                    priority=priority,
                    status="open" if groups else "done",
                    created_at=now,
                    ended_at=None if groups else now,
                )
            )
            is_new = added.rowcount == 1
            if is_new:
                for group in groups:
                    await _queue(connection, job_id, group, now, owned)
            else:
                found = (
                    await connection.execute(select(_j.job_id, _j.spec).where(_j.idempotency_key == idempotency_key))
                ).one()
                if found.spec != spec:
                    raise UsageError(
                        f"The idempotency key {idempotency_key!r} was used for another job, {found.job_id}."
                    )
                job_id = found.job_id
        row = await self.job(job_id)
        assert row is not None
        return row, is_new

    async def job(self, job_id: str) -> JobRow | None:
        rows = await self._jobs(_j.job_id == job_id)
        return rows[0] if rows else None

    async def jobs(
        self, *, statuses: Collection[str] | None = None, limit: int | None = None, before: str | None = None
    ) -> list[JobRow]:
        """Newest first."""
        conditions: list[ColumnElement[bool]] = []
        if statuses is not None:
            conditions.append(_j.status.in_(sorted(statuses)))
        if before is not None:
            conditions.append(_j.job_id < before)
        return await self._jobs(*conditions, limit=limit)

    async def _jobs(self, *conditions: ColumnElement[bool], limit: int | None = None) -> list[JobRow]:
        columns = (_j.job_id, _j.idempotency_key, _j.label, _j.spec, _j.priority, _j.status, _j.error)
        query = select(*columns, _j.created_at, _j.ended_at).where(*conditions).order_by(_j.job_id.desc()).limit(limit)
        async with self._database.reading() as connection:
            rows = (await connection.execute(query)).all()
            ids = [row.job_id for row in rows]
            counted = (
                select(_r.job_id, _r.status, func.count()).where(_r.job_id.in_(ids)).group_by(_r.job_id, _r.status)
            )
            stands: dict[str, dict[str, int]] = {}
            for job_id, status, count in await connection.execute(counted):
                stands.setdefault(job_id, {})[status] = count
            grouped = select(_g.job_id, func.count()).where(_g.job_id.in_(ids)).group_by(_g.job_id)
            sizes = {row[0]: row[1] for row in await connection.execute(grouped)}
        return [JobRow(*row, sizes.get(row.job_id, 0), stands.get(row.job_id, {})) for row in rows]

    async def set_job(self, job_id: str, status: JobStatus, *, error: str | None = None) -> list[str]:
        """Pause, resume, cancel or end a job. Cancelling ends what is still queued at once; returns the ids of its
        rollouts that workers have in hand, which they must end."""
        now = time.time()
        async with self._database.writing() as connection:
            found = (
                await connection.execute(select(_j.status).where(_j.job_id == job_id).with_for_update())
            ).one_or_none()
            if found is None:
                raise UsageError(f"There is no job {job_id}.")
            if found.status in ("done", "cancelled"):
                return []
            ends = now if status in ("done", "cancelled") else None
            await connection.execute(
                update(schema.jobs)
                .where(_j.job_id == job_id)
                .values(status=status, error=jsontext.clean_text(error), ended_at=ends)
            )
            if status != "cancelled":
                return []
            in_hand = await _cancel(connection, _r.job_id == job_id, now)
            busy = select(_r.group_id).where(_r.job_id == job_id, ~_final)
            await connection.execute(
                update(schema.groups)
                .where(_g.job_id == job_id, _g.status == "open", _g.group_id.not_in(busy))
                .values(
                    status="cancelled",
                    reason="the job was cancelled",
                    ended_at=now,
                    delivery=case((_g.delivery.is_(None), None), else_="dropped"),
                )
            )
            return in_hand

    async def cancel_group(self, group_id: str, *, reason: str) -> list[str]:
        """Cancel what is left of a group; returns the ids of its rollouts that workers have in hand."""
        now = time.time()
        async with self._database.writing() as connection:
            await connection.execute(
                update(schema.groups)
                .where(_g.group_id == group_id, _g.status == "open")
                .values(reason=jsontext.clean_text(reason))
            )
            return await _cancel(connection, _r.group_id == group_id, now)

    async def cancel_rollout(self, rollout_id: str) -> bool:
        """Cancel a rollout that is queued. False: a worker has it in hand and must end it, or it has ended."""
        async with self._database.writing() as connection:
            await _cancel(connection, _r.rollout_id == rollout_id, time.time())
            query = select(_r.status).where(_r.rollout_id == rollout_id)
            return (await connection.execute(query)).scalar_one_or_none() == "cancelled"

    async def claim(
        self, worker: str, limit: int, seconds: float, *, policy_version: str | None = None, job_id: str | None = None
    ) -> list[Held]:
        """Take up to `limit` queued rollouts for `worker`, to be kept by `hold` before `seconds` have passed.

        Of one job, or of all that no process owns. Jobs of higher priority come first, then jobs take turns, the one
        with least in work first; within a job groups go in order and siblings together.
        """
        now = time.time()
        busy = (
            select(_r.job_id, func.count().label("n"))
            .where(_r.held_by.is_not(None), ~_final)
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
            .where(_r.status == "queued", _r.held_by.is_(None), or_(_j.status.is_(None), _j.status == "open"))
            .where(_within(job_id))
            .subquery()
        )
        c = queue.c
        first = select(c.rollout_id).order_by(c.priority.desc(), c.turn, c.group_id, c.group_index).limit(limit)
        columns = (_r.rollout_id, _r.group_id, _r.job_id, _r.task_id, _r.group_index, _r.attempt)
        more = (_r.harness, _r.sandbox, _r.seed, _r.config, _r.held_by)
        async with self._database.writing() as connection:
            ids = list((await connection.execute(first)).scalars())
            # Another worker may have taken some between the two statements (PostgreSQL): those are skipped.
            lock = select(_r.rollout_id).where(_r.rollout_id.in_(ids), _r.status == "queued", _r.held_by.is_(None))
            mine = list((await connection.execute(lock.with_for_update(skip_locked=True))).scalars())
            if not mine:
                return []
            await connection.execute(
                update(schema.rollouts)
                .where(_r.rollout_id.in_(mine))
                .values(held_by=worker, held_until=now + seconds, policy_version=policy_version)
            )
            rows = (await connection.execute(select(*columns, *more).where(_r.rollout_id.in_(mine)))).all()
        held = {row.rollout_id: Held(**row._mapping) for row in rows}
        return [held[rollout_id] for rollout_id in ids if rollout_id in held]

    async def hold(self, worker: str, rollout_ids: Collection[str], seconds: float) -> tuple[set[str], set[str]]:
        """Say that the worker still has these. Returns those it must end because they were cancelled, and those that
        are not its own any more, about which it has nothing to say."""
        mine = and_(_r.rollout_id.in_(list(rollout_ids)), _r.held_by == worker)
        async with self._database.writing() as connection:
            await connection.execute(update(schema.rollouts).where(mine).values(held_until=time.time() + seconds))
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

    async def lost(self, *, attempts: int, job_id: str | None = None) -> dict[str, int]:
        """Take rollouts from workers that fell silent: queued again, with their new attempt's number, or, after so
        many `attempts` or where they were to be cancelled, ended (attempt 0). Of one job, or of all that no process
        owns."""
        return await self._take(and_(_r.held_until < time.time(), _within(job_id)), attempts)

    async def holders(self) -> set[str]:
        """The workers that hold rollouts which no process owns."""
        query = select(_r.held_by).where(_r.held_by.is_not(None), ~_final, _within(None)).distinct()
        async with self._database.reading() as connection:
            return {str(worker) for worker in (await connection.execute(query)).scalars()}

    async def take_from(self, worker: str, *, attempts: int) -> dict[str, int]:
        """As `lost`, of all that this worker holds: it is known to be dead."""
        return await self._take(and_(_r.held_by == worker, _within(None)), attempts)

    async def _take(self, which: ColumnElement[bool], attempts: int) -> dict[str, int]:
        now = time.time()
        silent = and_(which, _r.held_by.is_not(None), ~_final)
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
                    status="failed", cause="worker_lost", error="its worker fell silent", ended_at=now, held_by=None
                )
            )
            again = await _requeue(connection, silent, "worker_lost", now)
        return {**again, **dict.fromkeys(gone, 0)}

    async def group(self, group_id: str) -> GroupRow | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(_groups.where(_g.group_id == group_id))).one_or_none()
        return None if row is None else GroupRow(*row)

    async def groups(self, job_id: str) -> list[GroupRow]:
        """Of a job, in the order of submission."""
        async with self._database.reading() as connection:
            rows = await connection.execute(_groups.where(_g.job_id == job_id).order_by(_g.group_id))
            return [GroupRow(*row) for row in rows]

    async def unsettled_groups(self) -> list[str]:
        """Groups of jobs that are open though all of their rollouts have ended: whoever ended the last was killed."""
        busy = select(_r.group_id).where(~_final)
        query = select(_g.group_id).where(_g.job_id.is_not(None), _g.status == "open", _g.group_id.not_in(busy))
        async with self._database.reading() as connection:
            return list((await connection.execute(query)).scalars())

    async def settle_group(self, group_id: str) -> tuple[GroupRow, bool] | None:
        """End a group all of whose rollouts have ended, and its job with the last group; and whether it
        was this call that did. None: it is still open.

        An offered group then waits for a consumer, unless none of its rollouts came to an end of its own.
        """
        now = time.time()
        async with self._database.writing() as connection:
            found = (await connection.execute(_groups.where(_g.group_id == group_id).with_for_update())).one()
            if found.status != "open":
                return GroupRow(*found), False
            left = select(func.count()).where(_r.group_id == group_id, ~_final)
            if (await connection.execute(left)).scalar_one():
                return None
            useful = select(func.count()).where(_r.group_id == group_id, _r.status.in_(("done", "timed_out")))
            finished = bool((await connection.execute(useful)).scalar_one())
            await connection.execute(
                update(schema.groups)
                .where(_g.group_id == group_id)
                .values(
                    status="finished" if finished else "cancelled",
                    ended_at=now,
                    delivery=case((_g.delivery.is_(None), None), else_="waiting" if finished else "dropped"),
                    reason=func.coalesce(_g.reason, None if finished else "no rollout of it came to an end"),
                )
            )
            if found.job_id is not None:
                open_groups = select(func.count()).where(_g.job_id == found.job_id, _g.status == "open")
                if not (await connection.execute(open_groups)).scalar_one():
                    await connection.execute(
                        update(schema.jobs)
                        .where(_j.job_id == found.job_id, _j.status.in_(("open", "paused")))
                        .values(status="done", ended_at=now)
                    )
            return GroupRow(*(await connection.execute(_groups.where(_g.group_id == group_id))).one()), True


_groups = select(
    *(_g.group_id, _g.job_id, _g.task_id, _g.size, func.coalesce(_g.wanted, _g.size), _g.config, _g.status),
    *(_g.reason, _g.delivery, _g.created_at, _g.ended_at),
)


async def _queue(connection: AsyncConnection, job_id: str, group: NewGroup, now: float, owned: bool) -> None:
    group_id = new_id("group")
    await connection.execute(
        insert(schema.groups).values(
            group_id=group_id,
            job_id=job_id,
            task_id=group.task_id,
            size=len(group.rollouts),
            wanted=group.wanted,
            config=group.config,
            created_at=now,
            delivery="open" if group.offered else None,
        )
    )
    for index, rollout in enumerate(group.rollouts):
        rollout_id = new_id("roll")
        await connection.execute(
            insert(schema.rollouts).values(
                rollout_id=rollout_id,
                group_id=group_id,
                job_id=job_id,
                task_id=group.task_id,
                group_index=index,
                status="queued",
                harness=rollout.harness,
                sandbox=rollout.sandbox,
                engine=rollout.engine,
                model=rollout.model,
                seed=rollout.seed,
                config=rollout.config,
                owner_host=socket.gethostname() if owned else None,
                owner_pid=os.getpid() if owned else None,
                created_at=now,
            )
        )
        await insert_event(connection, rollout_id, now, "status", {"from": None, "to": "queued"})


def _within(job_id: str | None) -> ColumnElement[bool]:
    return _r.owner_pid.is_(None) if job_id is None else _r.job_id == job_id


async def _cancel(connection: AsyncConnection, which: ColumnElement[bool], now: float) -> list[str]:
    """Cancel what nobody has in hand and ask for the end of the rest, whose ids are returned."""
    rows = (await connection.execute(select(_r.rollout_id, _r.status, _r.held_by).where(which, ~_final))).all()
    free = [row.rollout_id for row in rows if row.held_by is None]
    for row in rows:
        if row.held_by is None:
            await insert_event(connection, row.rollout_id, now, "status", {"from": row.status, "to": "cancelled"})
    await connection.execute(
        update(schema.rollouts)
        .where(_r.rollout_id.in_(free))
        .values(status="cancelled", cause="cancelled", error="cancelled before it began", ended_at=now)
    )
    held = [row.rollout_id for row in rows if row.held_by is not None]
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
    free: dict[str, Any] = {"held_by": None, "held_until": None}
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


__all__ = ["CANCEL_REQUESTED", "GroupRow", "Held", "JobRow", "JobStatus", "Jobs", "NewGroup", "NewRollout"]
