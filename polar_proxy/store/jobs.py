"""Jobs: what was submitted, in groups of rollouts, how far it is, and its pausing and ending.

Promises, for any number of processes on one database:

* an idempotency key makes one job, whoever says it how often;
* what becomes of jobs and groups is told (`progress`, `callbacks`) by the transaction that makes it so.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, and_, case, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import UsageError
from polar_proxy.store import json_codec, schema
from polar_proxy.store.artifacts import insert_event
from polar_proxy.store.callbacks import queue_callback
from polar_proxy.store.job_events import insert_job_event
from polar_proxy.store.queue import QueueRepository, cancel_rollouts
from polar_proxy.types import Json, new_id

JobStatus = Literal["open", "paused", "done", "cancelled"]

_r = schema.rollouts.c
_g = schema.groups.c
_j = schema.jobs.c
_final = schema.rollout_is_final


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
    max_staleness: int | None = None
    """In policy versions: an offered group that has fallen further behind is neither gone on with nor delivered."""


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
    paused_until: float | None
    """When a paused job goes on by itself (seconds since the epoch); None: when somebody says so."""
    callback_url: str | None
    groups: int
    rollouts: dict[str, int]


class JobRepository(QueueRepository):
    async def submit(
        self,
        spec: Json,
        groups: Sequence[NewGroup],
        *,
        idempotency_key: str | None = None,
        priority: int = 0,
        label: str | None = None,
        owned: bool = False,
        callback_url: str | None = None,
    ) -> tuple[JobRow, bool]:
        """Queue a job with all its groups and rollouts, and whether it is new: a known key gives the job that has it.

        `callback_url` is told when a group of it ends, and when it ends (see `callbacks`).

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
                    label=json_codec.clean_text(label),
                    spec=spec,
                    priority=priority,
                    status="open" if groups else "done",
                    created_at=now,
                    ended_at=None if groups else now,
                    callback_url=callback_url,
                )
            )
            is_new = added.rowcount == 1
            if is_new:
                await insert_job_event(connection, job_id, None, now, "job", {"status": "open" if groups else "done"})
                if not groups:
                    await queue_callback(connection, job_id, "job.ended", None, now)
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
        row = await self.get(job_id)
        assert row is not None
        return row, is_new

    async def get(self, job_id: str) -> JobRow | None:
        rows = await self._jobs(_j.job_id == job_id)
        return rows[0] if rows else None

    async def find(
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
        more = (_j.created_at, _j.ended_at, _j.paused_until, _j.callback_url)
        query = select(*columns, *more).where(*conditions).order_by(_j.job_id.desc()).limit(limit)
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

    async def set_status(
        self,
        job_id: str,
        status: JobStatus,
        *,
        error: str | None = None,
        paused_until: float | None = None,
        only_if: tuple[JobStatus, float | None] | None = None,
    ) -> list[str]:
        """Pause, resume, cancel or end a job. Cancelling ends what is still queued at once; returns the ids of its
        rollouts that workers have in hand, which they must end.

        `paused_until`: when a pause ends by itself. `only_if`: nothing is done unless this is its status, and this the
        end of its pause. A job that has ended stays as it is. Raises UsageError for an id that is none.
        """
        now = time.time()
        async with self._database.writing() as connection:
            query = select(_j.status, _j.paused_until).where(_j.job_id == job_id).with_for_update()
            found = (await connection.execute(query)).one_or_none()
            if found is None:
                raise UsageError(f"There is no job {job_id}.")
            if found.status in ("done", "cancelled") or only_if not in (None, tuple(found)):
                return []
            ends = now if status in ("done", "cancelled") else None
            await connection.execute(
                update(schema.jobs)
                .where(_j.job_id == job_id)
                .values(
                    status=status,
                    error=json_codec.clean_text(error),
                    ended_at=ends,
                    paused_until=paused_until if status == "paused" else None,
                )
            )
            in_flight: list[str] = []
            if status == "cancelled":
                in_flight = await cancel_rollouts(connection, _r.job_id == job_id, now)
                await _cancel_idle_groups(connection, job_id, now)
            if status != found.status:
                await insert_job_event(connection, job_id, None, now, "job", {"status": status})
            if ends is not None:
                await queue_callback(connection, job_id, "job.ended", None, now)
            return in_flight

    async def resume_due(self) -> list[str]:
        """Open the jobs whose pause is over; returns their ids. Of these, workers take rollouts in any case."""
        now = time.time()
        over = and_(_j.status == "paused", _j.paused_until <= now)
        async with self._database.reading() as connection:  # which hinders nobody, and mostly there is none
            if (await connection.execute(select(_j.job_id).where(over).limit(1))).scalar_one_or_none() is None:
                return []
        async with self._database.writing() as connection:
            ids = list((await connection.execute(select(_j.job_id).where(over).with_for_update())).scalars())
            mine = _j.job_id.in_(ids)
            await connection.execute(update(schema.jobs).where(mine).values(status="open", paused_until=None))
            for job_id in ids:
                await insert_job_event(connection, job_id, None, now, "job", {"status": "open"})
        return ids

    async def in_flight(self, job_id: str) -> int:
        """How many of a job's rollouts workers have, those that wait for a place included."""
        query = select(func.count()).where(_r.job_id == job_id, _r.claimed_by.is_not(None), ~_final)
        async with self._database.reading() as connection:
            return int((await connection.execute(query)).scalar_one())


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
            max_staleness=group.max_staleness,
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


async def _cancel_idle_groups(connection: AsyncConnection, job_id: str, now: float) -> None:
    """Those of a cancelled job of which nothing is in hand."""
    busy = select(_r.group_id).where(_r.job_id == job_id, ~_final)
    idle = select(_g.group_id).where(_g.job_id == job_id, _g.status == "open", _g.group_id.not_in(busy))
    reason = "the job was cancelled"
    for group_id in list((await connection.execute(idle)).scalars()):
        delivery = case((_g.delivery.is_(None), None), else_="dropped")
        values = {"status": "cancelled", "reason": reason, "ended_at": now, "delivery": delivery}
        await connection.execute(update(schema.groups).where(_g.group_id == group_id).values(**values))
        await insert_job_event(connection, job_id, group_id, now, "group", {"status": "cancelled", "reason": reason})
