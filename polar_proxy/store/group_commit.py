"""The two writers of the hot path: the commit of calls, and the announcement of calls to other gateways.

Both collect records that arrive during a transaction and write them in the next one.

Promises of the commit:

* `GroupCommit.commit` returns after the transaction that holds the call is committed.
* A record that cannot be stored fails alone.
* A record that was handed over is written even if its caller is cancelled (the agent may have disconnected).
* If the connection breaks during a commit, the database is asked whether the commit happened, so that no stored call is
  reported as lost and none is written twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from sqlalchemy import Connection, Insert, bindparam, case, delete, func, insert, select, update
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.database import Database, is_unavailable
from polar_proxy.store.encoding.serializer import CallSerializer, SerializedCalls
from polar_proxy.types import CallRecord

_MAX_BATCH = 256
_DEFAULT_BUILDER = "merged"
"""The builder whose traces are made when a rollout ends."""
LATE_CALL = "a call of another gateway was recorded after the end of the rollout; the rollout must not be trained on"

_PendingCommit = tuple[CallRecord, "asyncio.Future[None]"]

_log = logging.getLogger(__name__)

_o = schema.open_calls.c
_s = schema.sessions.c
_c = schema.calls.c
_r = schema.rollouts.c
_add_to_session = (
    update(schema.sessions)
    .where(_s.session_id == bindparam("of_session"))
    .values(
        calls=_s.calls + bindparam("more_calls"),
        failed_calls=_s.failed_calls + bindparam("more_failed"),
        prompt_tokens=_s.prompt_tokens + bindparam("more_prompt"),
        completion_tokens=_s.completion_tokens + bindparam("more_completion"),
        last_call_at=case(
            (_s.last_call_at > bindparam("last"), _s.last_call_at),
            else_=bindparam("last"),
        ),
    )
)
_insert_calls = insert(schema.calls)
_insert_completions = insert(schema.completions)
_insert_open_calls = insert(schema.open_calls)


class GroupCommit:
    """The writer of calls. `stop` writes what is still waiting."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._serializer = CallSerializer()
        self._waiting: list[_PendingCommit] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.shared = False
        """Several gateways share the database: the commit of a call also deletes its row of `open_calls`."""
        self._insert_exclusions = database.insert_new(schema.exclusions)
        self._insert_nodes = database.insert_new(schema.nodes)
        self._insert_engines = database.insert_new(schema.engines)
        self._insert_settings = database.insert_new(schema.settings)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="polar-store-writer")

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task

    async def commit(self, record: CallRecord) -> None:
        if self._stopping or self._task is None:
            raise StoreError(f"The call {record.call_id} was not recorded: the store is already closed")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, future))
        self._wake.set()
        await future

    async def _run(self) -> None:
        while not (self._stopping and not self._waiting):
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._waiting[:_MAX_BATCH]
                del self._waiting[:_MAX_BATCH]
                await self._commit_batch(batch)

    async def _commit_batch(self, batch: Sequence[_PendingCommit], *, retry: bool = True, unsure: bool = False) -> None:
        """Commit the batch and resolve every future of it, whatever happens.

        `unsure`: the batch was tried before and may have been committed.
        """
        try:
            await self._commit_together(batch)
        except Exception as error:  # noqa: BLE001 (passed on to each caller)
            # Nothing of the batch is stored. Shared rows that were known to be stored may be gone: insert all of them.
            self._serializer.forget()
            if not retry:
                stored = await self._stored_ids(batch) if unsure else set()
                for record, future in batch:
                    if record.call_id not in stored:
                        _fail(future, record, error)
                    elif not future.done():
                        future.set_result(None)
            elif len(batch) == 1 or _concerns_any_record(error):
                await self._commit_batch(batch, retry=False, unsure=is_unavailable(error.__cause__))
            else:
                for pending in batch:  # so that only the record that cannot be stored fails
                    await self._commit_batch([pending])

    async def _stored_ids(self, batch: Sequence[_PendingCommit]) -> set[str]:
        """Return the ids of the batch's calls that are stored although their commit was not confirmed."""
        ids = [record.call_id for record, _ in batch]
        try:
            async with self._database.reading() as connection:
                found = await connection.execute(select(_c.call_id).where(_c.call_id.in_(ids)))
                return {str(call_id) for call_id in found.scalars()}
        except StoreError:
            return set()

    async def _commit_together(self, batch: Sequence[_PendingCommit]) -> None:
        records = [record for record, _ in batch]
        rows, refused = await self._database.write_in_thread(lambda: self._serializer.serialize(records), self._write)
        self._serializer.mark_stored(rows)
        for position, (record, future) in enumerate(batch):
            if position in refused:
                _fail(future, record, refused[position])
            elif not future.done():
                future.set_result(None)

    def _write(self, connection: Connection, serialized: SerializedCalls) -> None:
        rows, _ = serialized
        for statement, values in (
            (self._insert_engines, [rows.engines[key] for key in sorted(rows.engines)]),
            (self._insert_settings, [rows.settings[key] for key in sorted(rows.settings)]),
            (self._insert_nodes, rows.node_rows()),
            (_insert_calls, rows.calls),
            (_insert_completions, rows.completions),
            (_add_to_session, rows.session_rows()),
        ):
            if values:
                connection.execute(statement, values)
        if self.shared and rows.calls:
            _settle_open_calls(connection, [str(row["call_id"]) for row in rows.calls], self._insert_exclusions)


def _concerns_any_record(error: Exception) -> bool:
    """Return whether any other record would fail in the same way: database locked, full or unreachable."""
    cause = error.__cause__
    return isinstance(cause, OperationalError | PoolTimeout | OSError) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )


def _fail(future: asyncio.Future[None], record: CallRecord, error: Exception) -> None:
    if future.done():
        _log.error("the call %s was not stored, and its caller was cancelled: %s", record.call_id, error)
        return
    reason = StoreError(f"The call {record.call_id} was not stored. {error}")
    reason.__cause__ = error
    future.set_exception(reason)


def _settle_open_calls(connection: Connection, call_ids: Sequence[str], insert_exclusions: Insert) -> None:
    """Delete the announcements of committed calls, in the transaction of the commit.

    A call whose announcement is already gone is committed after the end of its session. If its rollout has ended, the
    call is excluded and the rollout becomes incomplete.
    """
    deleted = delete(schema.open_calls).where(_o.call_id.in_(call_ids)).returning(_o.call_id)
    late = set(call_ids) - set(connection.execute(deleted).scalars())
    if not late:
        return
    reason = case((_r.session_id == _c.session_id, "incomplete"), else_="superseded_attempt")
    found = connection.execute(
        select(_c.call_id, _c.session_id, _r.rollout_id, reason.label("reason"))
        .join(schema.sessions, _s.session_id == _c.session_id)
        .join(schema.rollouts, _r.rollout_id == _s.rollout_id)
        .where(_c.call_id.in_(sorted(late)), schema.rollout_is_final)
    ).all()
    if not found:
        return
    values = [
        {"session_id": row.session_id, "builder": _DEFAULT_BUILDER, "call_id": row.call_id, "reason": row.reason}
        for row in found
    ]
    connection.execute(insert_exclusions, values)
    incomplete = {row.rollout_id for row in found if row.reason == "incomplete"}
    connection.execute(
        update(schema.rollouts)
        .where(_r.rollout_id.in_(sorted(incomplete)))
        .values(incomplete=True, error=func.coalesce(_r.error, LATE_CALL))
    )


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call in progress, or one that its gateway lost. Times in seconds since the epoch."""

    call_id: str
    session_id: str
    gateway: str
    started_at: float
    lease_expires_at: float


@dataclass(slots=True)
class _AnnouncementBatch:
    calls: Sequence[OpenCall]
    open_sessions: set[str] = field(default_factory=set)
    """The sessions of the calls that are not closed. Set by the transaction."""


class CallAnnouncer:
    """The writer of announcements: all waiting announcements are written in one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[OpenCall, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def announce(self, calls: Sequence[OpenCall]) -> bool:
        """Write the calls of one session. Returns False, and writes nothing, if the session is closed."""
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
            waiting = self._waiting[:_MAX_BATCH]
            del self._waiting[:_MAX_BATCH]
            batch = _AnnouncementBatch([call for call, _ in waiting])
            error: StoreError | None = None
            try:
                await self._database.write_in_thread(lambda batch=batch: batch, _write_announcements)  # type: ignore[misc]
            except StoreError as refusal:
                error = refusal
            for call, future in waiting:
                if future.done():
                    continue
                if error is None:
                    future.set_result(call.session_id in batch.open_sessions)
                else:
                    future.set_exception(error)


def _write_announcements(connection: Connection, batch: _AnnouncementBatch) -> None:
    ids = sorted({call.session_id for call in batch.calls})
    # Rows are locked in the same order as by commits. This transaction and the closing of a session wait for each
    # other.
    query = select(_s.session_id).where(_s.session_id.in_(ids), _s.closed_at.is_(None)).order_by(_s.session_id)
    batch.open_sessions.update(connection.execute(query.with_for_update(read=True)).scalars())
    rows = [asdict(call) for call in batch.calls if call.session_id in batch.open_sessions]
    if rows:
        connection.execute(_insert_open_calls, rows)
