"""Job events: a stream that clients follow, and the requests to callback URLs.

Promises, for any number of processes on one database:

* A client that reads from a cursor to the end, and later from the cursor of the last row, sees every event once and in
  order, whichever process answers. On PostgreSQL a later number can become visible before an earlier one; a row after a
  missing number is therefore held back, for at most `_GAP_SECONDS`.
* A callback is queued in the transaction that ends the group or the job, so it is sent even if a process is killed.
* One process at a time sends a callback. If the sender is killed, another process sends it after the sender's claim has
  expired.
* A callback is sent until the receiver accepts it or all attempts have failed: at least once, always with the same id
  and body.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from sqlalchemy import Column, Connection, Row, Select, exists, func, insert, select, update

from polar_proxy.errors import UsageError
from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.secrets import storable_text
from polar_proxy.types import Json, new_id

CallbackKind = Literal["group.finished", "group.cancelled", "job.ended"]

_GAP_SECONDS = 10.0
"""If an event number is missing for longer than this, the transaction that took the number was rolled back."""

_e, _r, _je = schema.rollout_events.c, schema.rollouts.c, schema.job_events.c
_b, _j = schema.callbacks.c, schema.jobs.c


@dataclass(frozen=True, slots=True)
class EventCursor:
    """A position in the stream: the numbers of the last rollout event and of the last job event that were read."""

    rollout_event: int = 0
    job_event: int = 0

    def __str__(self) -> str:
        return f"{self.rollout_event}-{self.job_event}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a cursor. Raises UsageError for other text."""
        match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text)
        if match is None:
            raise UsageError(f"{text!r} is not a position in the event stream: give the id of an event.")
        return cls(int(match[1]), int(match[2]))


class _Page(NamedTuple):
    """Rows of one table, ordered by their numbers."""

    rows: Sequence[Row[Any]]
    may_have_more: bool
    """Whether the table may have more rows than were read."""


@dataclass(frozen=True, slots=True)
class JobEventRow:
    """An event of a job. `cursor`: the position after the event."""

    cursor: EventCursor
    kind: Literal["stage", "group", "job", "feed"]
    at: float
    data: Json
    """For kind `stage`: job_id, group_id, rollout_id, from, to (and cause, for a retry). For other kinds: job_id,
    group_id, status."""


@dataclass(frozen=True, slots=True)
class CallbackRow:
    """A request to a callback URL."""

    callback_id: str
    job_id: str
    group_id: str | None
    kind: CallbackKind
    body: str | None
    attempts: int
    """Number of attempts that were started."""
    created_at: float
    next_attempt_at: float | None
    """When the next attempt is due; None once the callback is delivered or given up."""
    delivered_at: float | None
    error: str | None
    url: str


_select_callbacks = (
    select(*row_columns(CallbackRow, schema.callbacks, url=_j.callback_url))
    .join(schema.jobs, _j.job_id == _b.job_id)
    .order_by(_b.callback_id)
)


class JobEventRepository(Repository):
    """Events of jobs, groups and rollouts in one stream."""

    async def start(self, job_id: str | None = None) -> EventCursor:
        """Return the position before the first event of the job. Without `job_id`, return the position after the last
        event so far."""
        if job_id is None:
            return await self._position(func.max, None)
        first = await self._position(func.min, job_id)
        return EventCursor(max(first.rollout_event - 1, 0), max(first.job_event - 1, 0))

    async def end(self, job_id: str) -> EventCursor:
        """Return the position after the last event of a job so far."""
        return await self._position(func.max, job_id)

    async def _position(self, pick: Callable[..., Any], job_id: str | None) -> EventCursor:
        """Return a cursor with the number of one rollout event and of one job event.

        `pick`: min for the first event of each kind, max for the last. Only the events of this job count; if `job_id`
        is None, the events of all jobs. A number is 0 if there is no such event.
        """
        rollout_query, job_query = select(pick(_e.event_id)), select(pick(_je.job_event_id))
        if job_id is not None:
            joined = rollout_query.join(schema.rollouts, _r.rollout_id == _e.rollout_id)
            rollout_query, job_query = joined.where(_r.job_id == job_id), job_query.where(_je.job_id == job_id)

        def read(connection: Connection) -> EventCursor:
            return EventCursor(connection.scalar(rollout_query) or 0, connection.scalar(job_query) or 0)

        return await self._database.read(read)

    async def is_over(self, job_id: str) -> bool:
        """Return whether the job can have no more events: it has ended, and so have its rollouts."""
        status = select(_j.status).where(_j.job_id == job_id)
        still_open = exists().where(_r.job_id == job_id, ~schema.rollout_is_final)

        def read(connection: Connection) -> bool:
            if connection.scalar(status) in ("open", "paused"):
                return False
            return not connection.scalar(select(still_open))

        return await self._database.read(read)

    async def read(
        self, after: EventCursor, *, job_id: str | None = None, limit: int = 500
    ) -> tuple[list[JobEventRow], EventCursor]:
        """Return the events of one job, or of all jobs, after a cursor. Also return the position up to which events
        were read.

        If this position equals `after`, there are no more events for now.
        """
        rollout_query = (
            select(_e.event_id, _e.at, _e.rollout_id, _e.kind, _e.data, _r.job_id, _r.group_id)
            .join(schema.rollouts, _r.rollout_id == _e.rollout_id)
            .where(_e.event_id > after.rollout_event)
        )
        job_query = select(_je.job_event_id, _je.at, _je.job_id, _je.group_id, _je.kind, _je.data)
        job_query = job_query.where(_je.job_event_id > after.job_event)

        def read(connection: Connection) -> tuple[_Page, _Page]:
            rollout_page = self._page(connection, rollout_query, _e.event_id, after.rollout_event, limit)
            return rollout_page, self._page(connection, job_query, _je.job_event_id, after.job_event, limit)

        rollout_page, job_page = await self._database.read(read)
        position = after
        found: list[JobEventRow] = []
        for row in _merge(rollout_page, job_page):
            ids = {"job_id": row.job_id, "group_id": row.group_id}
            kind = row.kind
            if hasattr(row, "event_id"):  # an event of a rollout
                position = EventCursor(row.event_id, position.job_event)
                if kind != "status":
                    continue
                ids["rollout_id"], kind = row.rollout_id, "stage"
            else:
                position = EventCursor(position.rollout_event, row.job_event_id)
            if job_id is None or row.job_id == job_id:
                found.append(JobEventRow(position, kind, row.at, {**ids, **row.data}))
        return found, position

    def _page(self, connection: Connection, query: Select[Any], number: Column[Any], after: int, limit: int) -> _Page:
        """Return the next rows. On PostgreSQL, stop before a row that follows a missing number (see the module)."""
        rows: Sequence[Row[Any]] = connection.execute(query.order_by(number).limit(limit)).all()
        if self._database.dialect == "postgresql":
            expected, now = after + 1, time.time()
            for index, row in enumerate(rows):
                if row[0] != expected and row.at > now - _GAP_SECONDS:
                    return _Page(rows[:index], True)
                expected = row[0] + 1
        return _Page(rows, len(rows) == limit)


class CallbackRepository(Repository):
    """Requests to the callback URLs of jobs."""

    async def claim(self, limit: int, seconds: float) -> list[CallbackRow]:
        """Return callbacks that are due, and count an attempt for each. No other caller gets them for `seconds`."""
        now = time.time()
        due = select(_b.callback_id).where(_b.next_attempt_at <= now).order_by(_b.next_attempt_at, _b.callback_id)
        due = due.limit(limit)
        if not await self._scalars(due):
            return []  # without a lock, because usually nothing is due

        def write(connection: Connection) -> list[CallbackRow]:
            ids = list(connection.scalars(due.with_for_update(skip_locked=True)))
            mine = _b.callback_id.in_(ids)
            values = {"attempts": _b.attempts + 1, "next_attempt_at": now + seconds}
            connection.execute(update(schema.callbacks).where(mine).values(**values))
            return [CallbackRow(*row) for row in connection.execute(_select_callbacks.where(mine))]

        return await self._database.write(write)

    async def fix_body(self, callback_id: str, body: str) -> str:
        """Return the body that all attempts send: the body of an earlier attempt, else `body`, which is now stored."""
        mine = _b.callback_id == callback_id

        def write(connection: Connection) -> str:
            connection.execute(update(schema.callbacks).where(mine, _b.body.is_(None)).values(body=body))
            return str(connection.execute(select(_b.body).where(mine)).scalar_one())

        return await self._database.write(write)

    async def mark_delivered(self, callback_id: str) -> None:
        values = {"next_attempt_at": None, "delivered_at": time.time(), "error": None}
        await self._write(update(schema.callbacks).where(_b.callback_id == callback_id).values(**values))

    async def mark_failed(self, callback_id: str, error: str, retry_after: float | None) -> None:
        """Record a failed attempt. `retry_after`: seconds until the next attempt; None: give up."""
        values = {
            "next_attempt_at": None if retry_after is None else time.time() + retry_after,
            "error": storable_text(error),
        }
        undelivered = (_b.callback_id == callback_id, _b.delivered_at.is_(None))
        await self._write(update(schema.callbacks).where(*undelivered).values(**values))

    async def of_job(self, job_id: str) -> list[CallbackRow]:
        """Return the callbacks of a job, oldest first."""
        return await self._rows(CallbackRow, _select_callbacks.where(_b.job_id == job_id))


def _merge(rollout_page: _Page, job_page: _Page) -> Iterator[Row[Any]]:
    """Merge the rows of two pages by time.

    When one page is used up, its table may have more rows. They could be earlier than the rest of the other page, so
    the merge stops there and leaves that rest out. At equal times, rollout events come after the opening of the job.
    They come before the end of the job, because they cause it.
    """
    of_rollouts, of_jobs = deque(rollout_page.rows), deque(job_page.rows)
    while of_rollouts and of_jobs:
        job = of_jobs[0]
        job_first = (job.at, job.data.get("status") != "open") < (of_rollouts[0].at, True)
        yield (of_jobs if job_first else of_rollouts).popleft()
    exhausted = rollout_page if of_jobs else job_page
    if not exhausted.may_have_more:
        yield from of_rollouts or of_jobs


def insert_job_event(
    connection: Connection, job_id: str | None, group_id: str | None, at: float, kind: str, data: Json
) -> None:
    """Record an event of a job or of one of its groups. Do nothing if `job_id` is None."""
    if job_id is not None:
        values = {"job_id": job_id, "group_id": group_id, "at": at, "kind": kind, "data": data}
        connection.execute(insert(schema.job_events).values(**values))


def queue_callback(connection: Connection, job_id: str, kind: CallbackKind, group_id: str | None, now: float) -> None:
    """Queue a callback, if the job has a callback URL."""
    if connection.scalar(select(_j.callback_url).where(_j.job_id == job_id)) is not None:
        new = insert(schema.callbacks).values(callback_id=new_id("msg"), job_id=job_id, group_id=group_id, kind=kind)
        connection.execute(new.values(created_at=now, next_attempt_at=now))
