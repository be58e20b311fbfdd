"""What the callback URLs of jobs are still to be told.

Promises, for any number of processes on one database:

* a callback is written down in the transaction that ends the group or the job: what ended is told, whatever is killed;
* one process at a time sends it; a sender that is killed has lost it when its time is over, and another sends it;
* it is sent until the receiver takes it, or so many attempts have failed: at least once, with the same id and body.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.store import json_codec, schema
from polar_proxy.store.base import Repository
from polar_proxy.store.secrets import without_secrets
from polar_proxy.types import new_id

CallbackKind = Literal["group.finished", "group.cancelled", "job.ended"]

_b = schema.callbacks.c
_j = schema.jobs.c


@dataclass(frozen=True, slots=True)
class CallbackRow:
    """`attempts`: those that have been begun. `next_attempt_at` None: it was delivered, or given up."""

    callback_id: str
    job_id: str
    group_id: str | None
    kind: CallbackKind
    body: str | None
    attempts: int
    created_at: float
    next_attempt_at: float | None
    delivered_at: float | None
    error: str | None
    url: str


class CallbackRepository(Repository):
    async def claim(self, limit: int, seconds: float) -> list[CallbackRow]:
        """Those that are due, to be sent by the caller alone within `seconds`; each has begun one more attempt."""
        now = time.time()
        async with self._database.reading() as connection:  # which hinders nobody, and mostly there is none
            first = select(_b.callback_id).where(_b.next_attempt_at <= now).limit(1)
            if (await connection.execute(first)).scalar_one_or_none() is None:
                return []
        async with self._database.writing() as connection:
            due = (
                select(_b.callback_id)
                .where(_b.next_attempt_at <= now)
                .order_by(_b.next_attempt_at, _b.callback_id)
                .limit(limit)
            )
            ids = list((await connection.execute(due.with_for_update(skip_locked=True))).scalars())
            if not ids:
                return []
            mine = _b.callback_id.in_(ids)
            await connection.execute(
                update(schema.callbacks).where(mine).values(attempts=_b.attempts + 1, next_attempt_at=now + seconds)
            )
            return [CallbackRow(*row) for row in await connection.execute(_callbacks.where(mine))]

    async def fix_body(self, callback_id: str, body: str) -> str:
        """What is sent, now and at every later attempt: this, unless an earlier attempt had another, which is
        returned."""
        mine = _b.callback_id == callback_id
        async with self._database.writing() as connection:
            await connection.execute(update(schema.callbacks).where(mine, _b.body.is_(None)).values(body=body))
            return str((await connection.execute(select(_b.body).where(mine))).scalar_one())

    async def mark_delivered(self, callback_id: str) -> None:
        values = {"next_attempt_at": None, "delivered_at": time.time(), "error": None}
        async with self._database.writing() as connection:
            await connection.execute(update(schema.callbacks).where(_b.callback_id == callback_id).values(**values))

    async def mark_failed(self, callback_id: str, error: str, again_after: float | None) -> None:
        """Not taken: to be sent again after so many seconds, or (None) never again."""
        next_attempt_at = None if again_after is None else time.time() + again_after
        told = json_codec.clean_text(without_secrets(error))
        async with self._database.writing() as connection:
            await connection.execute(
                update(schema.callbacks)
                .where(_b.callback_id == callback_id, _b.delivered_at.is_(None))
                .values(next_attempt_at=next_attempt_at, error=told)
            )

    async def of_job(self, job_id: str) -> list[CallbackRow]:
        """Of a job, oldest first."""
        async with self._database.reading() as connection:
            rows = await connection.execute(_callbacks.where(_b.job_id == job_id))
            return [CallbackRow(*row) for row in rows]


_callbacks = (
    select(
        *(_b.callback_id, _b.job_id, _b.group_id, _b.kind, _b.body, _b.attempts, _b.created_at, _b.next_attempt_at),
        *(_b.delivered_at, _b.error, _j.callback_url),
    )
    .join(schema.jobs, _j.job_id == _b.job_id)
    .order_by(_b.callback_id)
)


async def queue_callback(
    connection: AsyncConnection, job_id: str, kind: CallbackKind, group_id: str | None, now: float
) -> None:
    """If somebody wants to be told."""
    url = (await connection.execute(select(_j.callback_url).where(_j.job_id == job_id))).scalar_one_or_none()
    if url is not None:
        await connection.execute(
            insert(schema.callbacks).values(
                callback_id=new_id("msg"),
                job_id=job_id,
                group_id=group_id,
                kind=kind,
                attempts=0,
                created_at=now,
                next_attempt_at=now,
            )
        )
