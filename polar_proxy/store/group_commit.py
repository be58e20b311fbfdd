"""The writer of calls: calls that arrive during a transaction are committed together in the next one.

Promises:

* The future of `GroupCommit.add` is resolved after the transaction that holds the call is committed.
* A record that cannot be stored fails alone.
* A record that was handed over is written even if its caller is cancelled (the agent may have disconnected).
* If the connection breaks during a commit, the database is asked whether the commit happened, so that no stored call is
  reported as lost and none is written twice. If the database cannot be asked, the error is a StoreUncertainError.
* While the database server is unreachable, a commit fails after a few seconds.
* Other calls do not wait while the rows of a large call are made. They wait only while these rows are written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from sqlalchemy import (
    BindParameter,
    ColumnClause,
    Connection,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)

from polar_proxy.errors import StoreError
from polar_proxy.offload import OffloadThread
from polar_proxy.store import schema
from polar_proxy.store.batch_writer import BatchWriter, concerns_any_record
from polar_proxy.store.database import Database, StoreUncertainError, StoreUnreachableError, is_unavailable
from polar_proxy.store.encoding.serializer import CallSerializer, RowBatch
from polar_proxy.store.prepared import PreparedStatement
from polar_proxy.store.repositories.conversations import append_items
from polar_proxy.types import CallRecord

PATIENCE_SECONDS = 3.0
"""Seconds that a commit, or the announcement of a call, waits for a database server that is unavailable."""
_DEFAULT_BUILDER = "merged"
"""The builder whose traces are made when a rollout ends."""
LATE_CALL = "a call of another gateway was recorded after the end of the rollout; the rollout must not be trained on"

_Commits = Sequence[tuple[CallRecord, "asyncio.Future[None]"]]

_log = logging.getLogger(__name__)

_o = schema.open_calls.c
_s = schema.sessions.c
_c = schema.calls.c
_r = schema.rollouts.c
_last_call_at: BindParameter[float] = bindparam("more_last_call_at")
_zero: ColumnClause[float] = literal_column("0.0")
_price: BindParameter[float | None] = bindparam("more_price_usd", type_=_s.price_usd.type)
_counted = (_s.calls, _s.failed_calls, _s.prompt_tokens, _s.completion_tokens)
_add_to_session = (
    update(schema.sessions)
    .where(_s.session_id == bindparam("of_session"))
    .values({column: column + bindparam(f"more_{column.name}") for column in _counted})
    .values(price_usd=case((_price.is_(None), _s.price_usd), else_=func.coalesce(_s.price_usd, _zero) + _price))
    .values(last_call_at=case((_s.last_call_at > _last_call_at, _s.last_call_at), else_=_last_call_at))
)


class _Lane:
    """A queue of calls, whose batches are serialized and written one after the other."""

    def __init__(
        self, commit: Callable[[_Lane, _Commits], Awaitable[None]], thread: OffloadThread | None = None
    ) -> None:
        """`thread` serializes the calls. If it is None, the thread that writes them to the database serializes them."""
        self.serializer = CallSerializer()
        self.thread = thread
        self.writer = BatchWriter(partial(commit, self))


class GroupCommit:
    """Commits calls in groups: those that arrive during a transaction are written together in the next one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = OffloadThread("polar-large-calls")
        self._lane = _Lane(self._commit_batch)
        self._large_lane = _Lane(self._commit_batch, self._thread)
        self._stopped = False
        self.shared = False
        """True if several gateways share the database. The commit of a call then deletes the call's row in
        `open_calls`."""
        self._insert_exclusions = database.insert_new(schema.exclusions)
        self._insert_engines = PreparedStatement(database.insert_new(schema.engines))
        self._insert_settings = PreparedStatement(database.insert_new(schema.settings))
        self._insert_nodes = PreparedStatement(database.insert_new(schema.nodes))
        self._insert_calls = PreparedStatement(insert(schema.calls))
        self._insert_completions = PreparedStatement(insert(schema.completions))
        self._insert_provider_ids = PreparedStatement(insert(schema.provider_ids))
        self._add_to_session = PreparedStatement(_add_to_session)

    def set_cache(self, size: int) -> None:
        """Set the size in bytes of the cache of the sessions' last requests (see `CallSerializer`).

        Call it before the first `add`, because it empties the cache.
        """
        for lane in (self._lane, self._large_lane):
            lane.serializer = CallSerializer(size // 2)

    async def stop(self) -> None:
        """Write the calls that still wait, and refuse further calls."""
        self._stopped = True
        for lane in (self._lane, self._large_lane):
            await lane.writer.stop()
        self._thread.close()

    def add(self, record: CallRecord, *, large: bool = False) -> asyncio.Future[None]:
        """Queue a record, and return a future that is resolved after the commit.

        `large`: make the rows in a separate thread. Raises StoreError after `stop`.
        """
        if self._stopped:
            raise StoreError(f"The call {record.call_id} was not recorded: the store is already closed")
        return (self._large_lane if large else self._lane).writer.add(record)

    async def _commit_batch(self, lane: _Lane, batch: _Commits, *, retry: bool = True, unsure: bool = False) -> None:
        """Commit the batch and resolve every future of it, whatever happens.

        `unsure`: the batch was tried before and may have been committed.
        """
        try:
            await self._commit_together(lane, batch)
        except Exception as error:  # noqa: BLE001 (passed on to each caller)
            # Another process may have deleted nodes, settings or engines that were stored: insert all of them again.
            lane.serializer.forget()
            if not retry or isinstance(error, StoreUnreachableError):
                await self._fail(lane, batch, error, unsure=unsure)
            elif len(batch) == 1 or concerns_any_record(error):
                await self._commit_batch(lane, batch, retry=False, unsure=is_unavailable(error.__cause__))
            else:
                for pending in batch:  # so that only the record that cannot be stored fails
                    await self._commit_batch(lane, [pending])

    async def _fail(self, lane: _Lane, batch: _Commits, error: Exception, *, unsure: bool) -> None:
        """Resolve the futures of a batch that failed. `unsure`: an earlier try may have been committed."""
        stored: set[str] = set()
        if isinstance(error, StoreUnreachableError):  # calls that arrived meanwhile need not wait for the server too
            for record, future in lane.writer.take_waiting():
                _resolve(future, record, error)
        if unsure:
            query = select(_c.call_id).where(_c.call_id.in_([record.call_id for record, _ in batch]))
            try:
                async with self._database.reading(PATIENCE_SECONDS) as connection:
                    stored = set(await connection.scalars(query))
            except StoreError as unknown:
                error = StoreUncertainError(f"The connection broke during the commit. {unknown}")
        for record, future in batch:
            _resolve(future, record, None if record.call_id in stored else error)

    async def _commit_together(self, lane: _Lane, batch: _Commits) -> None:
        serialize = partial(lane.serializer.serialize, [record for record, _ in batch])
        if lane.thread is None:
            rows = await self._database.write_in_thread(serialize, self._write, PATIENCE_SECONDS)
            lane.serializer.mark_stored(rows)
        else:
            rows = await lane.thread.run(True, serialize)
            await self._database.write(lambda connection: self._write(connection, rows), PATIENCE_SECONDS)
            await lane.thread.run(True, lane.serializer.mark_stored, rows)
        for position, (record, future) in enumerate(batch):
            _resolve(future, record, rows.refused.get(position))

    def _write(self, connection: Connection, rows: RowBatch) -> RowBatch:
        """Insert the rows. Return them, because the caller of `Database.write_in_thread` gets only this result."""
        for statement, values in (
            (self._insert_engines, [rows.engines[key] for key in sorted(rows.engines)]),
            (self._insert_settings, [rows.settings[key] for key in sorted(rows.settings)]),
            (self._insert_nodes, rows.node_rows()),
            (self._insert_calls, rows.calls),
            (self._insert_completions, rows.completions),
            (self._insert_provider_ids, rows.provider_ids),
            (self._add_to_session, rows.session_rows()),
        ):
            if values:
                statement.execute(connection, values)
        append_items(connection, rows.conversation_items)
        if self.shared and rows.calls:
            self._settle_open_calls(connection, {str(row["call_id"]) for row in rows.calls})
        return rows

    def _settle_open_calls(self, connection: Connection, call_ids: set[str]) -> None:
        """Delete the announcements (rows of `open_calls`) of committed calls, in the transaction of the commit.

        The end of a session removes the announcements that the session still has. So a call without an announcement is
        late: its session has ended. If the rollout of a late call has ended, too, the call is excluded from the traces.
        If the call also belongs to the rollout's last attempt, the rollout becomes incomplete.
        """
        deleted = delete(schema.open_calls).where(_o.call_id.in_(call_ids)).returning(_o.call_id)
        late = call_ids - set(connection.scalars(deleted))
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
        connection.execute(self._insert_exclusions, values)
        incomplete = sorted({row.rollout_id for row in found if row.reason == "incomplete"})
        changes = {"incomplete": True, "error": func.coalesce(_r.error, LATE_CALL)}
        connection.execute(update(schema.rollouts).where(_r.rollout_id.in_(incomplete)).values(changes))


def _resolve(future: asyncio.Future[None], record: CallRecord, error: Exception | None) -> None:
    if future.done():
        if error is not None:
            _log.error("the call %s was not stored, and its caller was cancelled: %s", record.call_id, error)
    elif error is None:
        future.set_result(None)
    else:
        uncertain = isinstance(error, StoreUncertainError)
        kind, outcome = (StoreUncertainError, "may not be") if uncertain else (StoreError, "was not")
        reason = kind(f"The call {record.call_id} {outcome} stored. {error}")
        reason.__cause__ = error
        future.set_exception(reason)
