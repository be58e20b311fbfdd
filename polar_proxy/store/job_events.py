"""What happens to jobs, in an order that can be followed: stages of rollouts, ends of groups and jobs, deliveries.

Promise: who reads from a cursor to the end, and later from the cursor that came with the last row, sees every
happening once and in its order, whichever process it asks. On PostgreSQL, where a later number can be visible before an
earlier one, a row behind a missing number waits for it as long as `_GAP_SECONDS`.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from sqlalchemy import Column, Row, Select, exists, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import UsageError
from polar_proxy.store import schema
from polar_proxy.store.base import Repository
from polar_proxy.types import Json

_GAP_SECONDS = 10.0
"""A number that is missing for longer belongs to a transaction that was rolled back."""

_e, _r, _je = schema.events.c, schema.rollouts.c, schema.job_events.c


@dataclass(frozen=True, slots=True)
class EventCursor:
    """How far somebody has read: in `events`, and in `job_events`."""

    stage: int = 0
    job: int = 0

    def __str__(self) -> str:
        return f"{self.stage}-{self.job}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises UsageError for what is no cursor."""
        match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text)
        if match is None:
            raise UsageError(f"{text!r} is no place in the events: give the id of one.")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class JobEventRow:
    """`cursor`: where to go on after it."""

    cursor: EventCursor
    kind: Literal["stage", "group", "job", "feed"]
    at: float
    data: Json
    """stage: job_id, group_id, rollout_id, from, to (and cause, of a retry); else job_id, group_id, status, ..."""


class JobEventRepository(Repository):
    async def start(self, job_id: str | None = None) -> EventCursor:
        """Just before the first happening of a job; without one, behind the last that there is."""
        async with self._database.reading() as connection:
            if job_id is None:
                last = select(func.max(_e.event_id)), select(func.max(_je.job_event_id))
                return EventCursor(*[int(await connection.scalar(query) or 0) for query in last])
            first = select(func.min(_e.event_id)).join(schema.rollouts, _r.rollout_id == _e.rollout_id)
            stage = int(await connection.scalar(first.where(_r.job_id == job_id)) or 1)
            job = int(await connection.scalar(select(func.min(_je.job_event_id)).where(_je.job_id == job_id)) or 1)
            return EventCursor(stage - 1, job - 1)

    async def end(self, job_id: str) -> EventCursor:
        """Behind the last happening of a job so far."""
        async with self._database.reading() as connection:
            last = select(func.max(_e.event_id)).join(schema.rollouts, _r.rollout_id == _e.rollout_id)
            stage = int(await connection.scalar(last.where(_r.job_id == job_id)) or 0)
            job = int(await connection.scalar(select(func.max(_je.job_event_id)).where(_je.job_id == job_id)) or 0)
            return EventCursor(stage, job)

    async def is_over(self, job_id: str) -> bool:
        """Whether nothing more can happen to a job: it has ended, and so have its rollouts."""
        ended = select(schema.jobs.c.status).where(schema.jobs.c.job_id == job_id)
        left = exists().where(_r.job_id == job_id, ~schema.rollout_is_final)
        async with self._database.reading() as connection:
            if (await connection.execute(ended)).scalar_one_or_none() in ("open", "paused"):
                return False
            return not (await connection.execute(select(left))).scalar_one()

    async def read(
        self, after: EventCursor, *, job_id: str | None = None, limit: int = 500
    ) -> tuple[list[JobEventRow], EventCursor]:
        """What came after a cursor, of one job or of all, and the cursor behind all that was looked at.

        Where that cursor is `after` itself there is nothing more for now."""
        stages = (
            select(_e.event_id, _e.at, _e.rollout_id, _e.kind, _e.data, _r.job_id, _r.group_id)
            .join(schema.rollouts, _r.rollout_id == _e.rollout_id)
            .where(_e.event_id > after.stage)
        )
        jobs = select(_je.job_event_id, _je.at, _je.job_id, _je.group_id, _je.kind, _je.data)
        jobs = jobs.where(_je.job_event_id > after.job)
        async with self._database.reading() as connection:
            rollout_rows = await self._page(connection, stages, _e.event_id, after.stage, limit)
            job_rows = await self._page(connection, jobs, _je.job_event_id, after.job, limit)
        seen = after
        found: list[JobEventRow] = []
        for row in _merged(*rollout_rows, *job_rows):
            if hasattr(row, "event_id"):
                seen = EventCursor(row.event_id, seen.job)
                told = _stage(seen, row)
            else:
                seen = EventCursor(seen.stage, row.job_event_id)
                data = {"job_id": row.job_id, "group_id": row.group_id, **row.data}
                told = JobEventRow(seen, row.kind, row.at, data)
            if told is not None and (job_id is None or row.job_id == job_id):
                found.append(told)
        return found, seen

    async def _page(
        self, connection: AsyncConnection, query: Select[Any], number: Column[Any], after: int, limit: int
    ) -> tuple[Sequence[Row[Any]], bool]:
        """Rows in the order of their numbers, and whether there may be more that cannot be given yet."""
        rows: Sequence[Row[Any]] = (await connection.execute(query.order_by(number).limit(limit))).all()
        if self._database.dialect == "postgresql":
            expected, now = after + 1, time.time()
            for place, row in enumerate(rows):
                if row[0] != expected and row.at > now - _GAP_SECONDS:
                    return rows[:place], True
                expected = row[0] + 1
        return rows, len(rows) == limit


def _merged(
    stages: Sequence[Row[Any]], more_stages: bool, jobs: Sequence[Row[Any]], more_jobs: bool
) -> Iterator[Row[Any]]:
    """By time, each sequence in its own order, as far as that is known. Of one moment, rollouts come before the end
    that they bring about, and behind the opening of their job."""
    of_rollouts, of_jobs = deque(stages), deque(jobs)
    while of_rollouts and of_jobs:
        job = of_jobs[0]
        first = (job.at, job.data.get("status") != "open") < (of_rollouts[0].at, True)
        yield (of_jobs if first else of_rollouts).popleft()
    if not (more_stages if of_jobs else more_jobs):
        yield from of_rollouts or of_jobs


def _stage(cursor: EventCursor, row: Row[Any]) -> JobEventRow | None:
    if row.kind != "status":
        return None
    of = {"job_id": row.job_id, "group_id": row.group_id, "rollout_id": row.rollout_id}
    return JobEventRow(cursor, "stage", row.at, {**of, **row.data})


async def insert_job_event(
    connection: AsyncConnection, job_id: str | None, group_id: str | None, at: float, kind: str, data: Json
) -> None:
    """Of a group that belongs to no job nothing is told: nobody submitted it."""
    if job_id is not None:
        values = {"job_id": job_id, "group_id": group_id, "at": at, "kind": kind, "data": data}
        await connection.execute(insert(schema.job_events).values(**values))
