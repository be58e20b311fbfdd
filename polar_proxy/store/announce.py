"""The two transactions of an open call (`open_calls`): its announcement, and its commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, Insert, case, delete, func, insert, select, update

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.database import Database

_LARGEST_BATCH = 256
_BUILDER = "merged"
"""Whose traces a rollout's end makes."""
TOO_LATE = "a call that another gateway answered was recorded after the rollout's end; not to be trained on"

_o = schema.open_calls.c
_s = schema.sessions.c
_c = schema.calls.c
_r = schema.rollouts.c
_final = schema.rollout_is_final
_insert = insert(schema.open_calls)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that a gateway is answering, or died of. Times in seconds since the epoch."""

    call_id: str
    session_id: str
    gateway: str
    started_at: float
    lease_expires_at: float


@dataclass(slots=True)
class _AnnouncementBatch:
    calls: Sequence[OpenCall]
    open: set[str] = field(default_factory=set)
    """The sessions among theirs that are not closed."""


class CallAnnouncer:
    """Writes what is announced at the same time in one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[OpenCall, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def announce(self, calls: Sequence[OpenCall]) -> bool:
        """Whether their session is open; if not, nothing is written. All of one session."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in calls]
        self._waiting += zip(calls, futures, strict=True)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="polar-store-announcer")
        return all(await asyncio.gather(*futures))

    async def stop(self) -> None:
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while self._waiting:
            waiting = self._waiting[:_LARGEST_BATCH]
            del self._waiting[:_LARGEST_BATCH]
            batch = _AnnouncementBatch([call for call, _ in waiting])
            error: StoreError | None = None
            try:
                await self._database.write_packed(lambda batch=batch: batch, _announce)  # type: ignore[misc]
            except StoreError as refusal:
                error = refusal
            for call, future in waiting:
                if future.done():
                    continue
                if error is None:
                    future.set_result(call.session_id in batch.open)
                else:
                    future.set_exception(error)


def _announce(connection: Connection, batch: _AnnouncementBatch) -> None:
    ids = sorted({call.session_id for call in batch.calls})
    # Locked in one order, as by those that commit: who closes a session waits for this transaction, or this for him.
    query = select(_s.session_id).where(_s.session_id.in_(ids), _s.closed_at.is_(None)).order_by(_s.session_id)
    batch.open.update(connection.execute(query.with_for_update(read=True)).scalars())
    rows = [
        {
            "call_id": call.call_id,
            "session_id": call.session_id,
            "gateway": call.gateway,
            "started_at": call.started_at,
            "lease_expires_at": call.lease_expires_at,
        }
        for call in batch.calls
        if call.session_id in batch.open
    ]
    if rows:
        connection.execute(_insert, rows)


def settle_open_calls(connection: Connection, call_ids: Sequence[str], insert_exclusions: Insert) -> None:
    """In the transaction that commits these calls: their rows go. Those whose row is gone already are excluded where
    their rollout has ended. `insert_exclusions` leaves rows that exist as they are."""
    returned = delete(schema.open_calls).where(_o.call_id.in_(call_ids)).returning(_o.call_id)
    late = set(call_ids) - set(connection.execute(returned).scalars())
    if not late:
        return
    reason = case((_r.session_id == _c.session_id, "incomplete"), else_="superseded_attempt")
    found = connection.execute(
        select(_c.call_id, _c.session_id, _r.rollout_id, reason.label("reason"))
        .join(schema.sessions, _s.session_id == _c.session_id)
        .join(schema.rollouts, _r.rollout_id == _s.rollout_id)
        .where(_c.call_id.in_(sorted(late)), _final)
    ).all()
    if not found:
        return
    values = [
        {"session_id": row.session_id, "builder": _BUILDER, "call_id": row.call_id, "reason": row.reason}
        for row in found
    ]
    connection.execute(insert_exclusions, values)
    mine = {row.rollout_id for row in found if row.reason == "incomplete"}
    connection.execute(
        update(schema.rollouts)
        .where(_r.rollout_id.in_(sorted(mine)))
        .values(incomplete=True, error=func.coalesce(_r.error, TOO_LATE))
    )
