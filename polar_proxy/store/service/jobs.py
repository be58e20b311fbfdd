"""Jobs: groups of rollouts that were submitted together; their progress, pauses and end.

Promises, for any number of processes on one database:

* However often the same idempotency key is submitted, there is one job.
* The transaction that changes a job or a group also records the change (`job_events`) and queues the callback.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from sqlalchemy import ColumnElement, Connection, and_, case, func, insert, null, select, update

from polar_proxy.errors import UsageError
from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.repositories.rollouts import insert_status_event
from polar_proxy.store.secrets import storable_text
from polar_proxy.store.service.groups import update_groups
from polar_proxy.store.service.job_events import insert_job_event, queue_callback
from polar_proxy.store.service.queue import cancel_rollouts
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
    """A group to queue. If `group_size` is less than the number of rollouts, a `group_policy` can complete the group
    before all of them have ended."""

    task_id: str
    group_size: int
    config: Json
    rollouts: tuple[NewRollout, ...]
    for_training: bool = False
    """True if the finished group goes to the trainer feed."""
    max_staleness: int | None = None
    """A group for the trainer feed is dropped if it is more than this many policy versions old. None: no limit."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job, the number of its groups, and the counts of its rollouts by status: {"queued": 3, "running": 1, ...}."""

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
    """End of the pause, in seconds since the epoch. None: the job is not paused, or is paused until it is resumed."""
    callback_url: str | None
    groups: int
    rollouts: dict[str, int]

    @property
    def repeat_of(self) -> str | None:
        """Id of the rollout that the job repeats."""
        return self.spec.get("repeat_of")


_groups = select(func.count()).where(_g.job_id == _j.job_id).correlate(schema.jobs).scalar_subquery()
_select_jobs = select(*row_columns(JobRow, schema.jobs, groups=_groups, rollouts=null()))
"""`rollouts` is null here, because a second query counts the rollouts."""


class JobRepository(Repository):
    """Submitted jobs."""

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
        """Queue a job with all its groups and rollouts. Returns the job, and whether it is new.

        The tasks must be stored already. If the idempotency key is known, its job is returned; UsageError is raised if
        that job has another `spec`. `owned`: the job belongs to this process (`polar run`), and no other process
        claims its rollouts. `callback_url`: gets a request when a group or the job ends.
        """
        now = time.time()
        job_id = new_id("job")
        status = "open" if groups else "done"
        new = self._database.insert_new(schema.jobs).values(
            job_id=job_id,
            idempotency_key=idempotency_key,
            label=storable_text(label),
            spec=spec,
            priority=priority,
            status=status,
            created_at=now,
            ended_at=None if groups else now,
            callback_url=callback_url,
        )

        def write(connection: Connection) -> str:
            if connection.execute(new).rowcount == 0:
                same_key = select(_j.job_id, _j.spec).where(_j.idempotency_key == idempotency_key)
                known, known_spec = connection.execute(same_key).one()
                if known_spec != spec:
                    raise UsageError(f"The idempotency key {idempotency_key!r} was used for another job, {known}.")
                return str(known)
            insert_job_event(connection, job_id, None, now, "job", {"status": status})
            if not groups:
                queue_callback(connection, job_id, "job.ended", None, now)
            for group in groups:
                _queue_group(connection, job_id, group, now, owned)
            return job_id

        stored = await self._database.write(write)
        row = await self.get(stored)
        assert row is not None
        return row, stored == job_id

    async def spec(self, job_id: str) -> Json | None:
        """Return the options of a job without counting its rollouts; None if there is no such job."""
        found = await self._scalars(select(_j.spec).where(_j.job_id == job_id))
        return found[0] if found else None

    async def get(self, job_id: str) -> JobRow | None:
        rows = await self._fetch(_j.job_id == job_id)
        return rows[0] if rows else None

    async def find(
        self, *, statuses: Collection[str] | None = None, limit: int | None = None, before: str | None = None
    ) -> list[JobRow]:
        """Return a page of jobs, newest first. `before`: the last job id of the previous page."""
        conditions: list[ColumnElement[bool]] = []
        if statuses is not None:
            conditions.append(_j.status.in_(sorted(statuses)))
        if before is not None:
            conditions.append(_j.job_id < before)
        return await self._fetch(*conditions, limit=limit)

    async def _fetch(self, *conditions: ColumnElement[bool], limit: int | None = None) -> list[JobRow]:
        query = _select_jobs.where(*conditions).order_by(_j.job_id.desc()).limit(limit)
        by_status = select(_r.job_id, _r.status, func.count()).group_by(_r.job_id, _r.status)

        def read(connection: Connection) -> list[JobRow]:
            rollouts: dict[str, dict[str, int]] = defaultdict(dict)
            rows = [JobRow(*row) for row in connection.execute(query)]
            ids = [row.job_id for row in rows]
            for job_id, status, count in connection.execute(by_status.where(_r.job_id.in_(ids))):
                rollouts[job_id][status] = count
            return [replace(row, rollouts=rollouts[row.job_id]) for row in rows]

        return await self._database.read(read)

    async def set_status(
        self,
        job_id: str,
        status: JobStatus,
        *,
        paused_until: float | None = None,
        only_if: tuple[JobStatus, float | None] | None = None,
    ) -> list[str]:
        """Pause, resume, cancel or end a job. A job that has ended stays as it is.

        Cancelling a job cancels its unclaimed rollouts. The ids of the claimed rollouts are returned, because only
        their workers can end them. `paused_until`: the end of the pause. `only_if`: do nothing unless the job has this
        status and this end of its pause. Raises UsageError for an unknown job.
        """
        now = time.time()

        def write(connection: Connection) -> list[str]:
            query = select(_j.status, _j.paused_until).where(_j.job_id == job_id).with_for_update()
            found = connection.execute(query).one_or_none()
            if found is None:
                raise UsageError(f"There is no job {job_id}.")
            if found.status in ("done", "cancelled") or only_if not in (None, tuple(found)):
                return []
            ends = status in ("done", "cancelled")
            values = {"status": status, "ended_at": now if ends else None, "paused_until": paused_until}
            connection.execute(update(schema.jobs).where(_j.job_id == job_id).values(values))
            claimed: list[str] = []
            if status == "cancelled":
                claimed = cancel_rollouts(connection, _r.job_id == job_id, now)
                _cancel_idle_groups(connection, job_id, now)
            if status != found.status:
                insert_job_event(connection, job_id, None, now, "job", {"status": status})
            if ends:
                queue_callback(connection, job_id, "job.ended", None, now)
            return claimed

        return await self._database.write(write)

    async def resume_due(self) -> list[str]:
        """Set paused jobs whose pause is over to `open`, and return their ids.

        Rollouts of these jobs do not wait for this method: the queue treats a job as open when its pause is over.
        """
        now = time.time()
        due = and_(_j.status == "paused", _j.paused_until <= now)
        if not await self._scalars(select(_j.job_id).where(due).limit(1)):
            return []  # without a lock, because usually nothing is due

        def write(connection: Connection) -> list[str]:
            ids = list(connection.scalars(select(_j.job_id).where(due).with_for_update()))
            mine = _j.job_id.in_(ids)
            connection.execute(update(schema.jobs).where(mine).values(status="open", paused_until=None))
            for job_id in ids:
                insert_job_event(connection, job_id, None, now, "job", {"status": "open"})
            return ids

        return await self._database.write(write)

    async def in_flight(self, job_id: str) -> int:
        """Return the number of the job's claimed rollouts that have not ended, whether or not they have started."""
        query = select(func.count()).where(_r.job_id == job_id, _r.claimed_by.is_not(None), ~_final)
        (count,) = await self._scalars(query)
        return int(count)


def _queue_group(connection: Connection, job_id: str, group: NewGroup, now: float, owned: bool) -> None:
    group_id = new_id("group")
    connection.execute(
        insert(schema.groups).values(
            group_id=group_id,
            job_id=job_id,
            task_id=group.task_id,
            rollout_count=len(group.rollouts),
            group_size=group.group_size,
            config=group.config,
            created_at=now,
            delivery="open" if group.for_training else None,
            max_staleness=group.max_staleness,
        )
    )
    host, pid = (socket.gethostname(), os.getpid()) if owned else (None, None)
    common = {"group_id": group_id, "job_id": job_id, "task_id": group.task_id, "status": "queued", "created_at": now}
    for index, rollout in enumerate(group.rollouts):
        rollout_id = new_id("roll")
        values = {"rollout_id": rollout_id, "group_index": index, "owner_host": host, "owner_pid": pid, **common}
        connection.execute(insert(schema.rollouts).values(**values, **asdict(rollout)))
        insert_status_event(connection, rollout_id, now, None, "queued")


def _cancel_idle_groups(connection: Connection, job_id: str, now: float) -> None:
    """Cancel the groups of a cancelled job that have no claimed rollout."""
    busy = select(_r.group_id).where(_r.job_id == job_id, ~_final)
    idle = select(_g.group_id).where(_g.job_id == job_id, _g.status == "open", _g.group_id.not_in(busy))
    reason = "the job was cancelled"
    for group_id in list(connection.scalars(idle)):
        delivery = case((_g.delivery.is_(None), None), else_="dropped")
        values = {"status": "cancelled", "reason": reason, "ended_at": now, "delivery": delivery}
        update_groups(connection, _g.group_id == group_id, **values)
        insert_job_event(connection, job_id, group_id, now, "group", {"status": "cancelled", "reason": reason})
