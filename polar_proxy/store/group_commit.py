"""Group commit: one task writes, in one transaction, all calls that wait when it gets to them.

Promises: `commit` returns after the transaction that holds the call is committed; a record that cannot be stored
fails alone; what was handed over is written even if its caller is cancelled meanwhile (the agent may have gone).
A connection that ends in the middle of a commit does not tell whether it was made: that is asked of the database, so
that no call is reported lost that is there, and none is written twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, case, insert, select, update
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.announce import settle_open_calls
from polar_proxy.store.database import Database, is_away
from polar_proxy.store.serializer import CallSerializer, SerializedCalls
from polar_proxy.types import CallRecord

_LARGEST_BATCH = 256
_Waiting = tuple[CallRecord, "asyncio.Future[None]"]

_log = logging.getLogger(__name__)

_s = schema.sessions.c
_c = schema.calls.c
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


class GroupCommit:
    """The writer of calls. Used between `start` and `stop`; `stop` writes what still waits."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._packer = CallSerializer()
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.shared = False
        """Calls are announced first, to other gateways (`open_calls`): their rows go with the commit."""
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
            raise StoreError(f"The store is closed: the call {record.call_id} came too late to be recorded")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, future))
        self._wake.set()
        await future

    async def _run(self) -> None:
        while not (self._stopping and not self._waiting):
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._waiting[:_LARGEST_BATCH]
                del self._waiting[:_LARGEST_BATCH]
                await self._commit_batch(batch)

    async def _commit_batch(self, batch: Sequence[_Waiting], *, again: bool = True, unsure: bool = False) -> None:
        """Whatever happens, every future of the batch is resolved, and the writer lives on for the next one.

        `unsure`: it was tried before, and nobody knows whether that was committed."""
        try:
            await self._commit_together(batch)
        except Exception as error:  # noqa: BLE001 (each caller is told)
            # Nothing of the batch is stored. Rows that were known to exist may be gone: offer all of them again.
            self._packer.forget()
            if not again:
                there = await self._there(batch) if unsure else set()
                for record, future in batch:
                    if record.call_id not in there:
                        _fail(future, record, error)
                    elif not future.done():
                        future.set_result(None)
            elif len(batch) == 1 or _is_about_the_database(error):
                await self._commit_batch(batch, again=False, unsure=is_away(error.__cause__))
            else:
                for waiting in batch:  # one record spoils it, and it shall fail alone
                    await self._commit_batch([waiting])

    async def _there(self, batch: Sequence[_Waiting]) -> set[str]:
        """Those that are stored: their transaction was committed, and its end not heard of."""
        ids = [record.call_id for record, _ in batch]
        try:
            async with self._database.reading() as connection:
                found = await connection.execute(select(_c.call_id).where(_c.call_id.in_(ids)))
                return {str(call_id) for call_id in found.scalars()}
        except StoreError:
            return set()

    async def _commit_together(self, batch: Sequence[_Waiting]) -> None:
        records = [record for record, _ in batch]
        rows, refused = await self._database.write_packed(lambda: self._packer.pack(records), self._write)
        self._packer.stored(rows)
        for position, (record, future) in enumerate(batch):
            if position in refused:
                _fail(future, record, refused[position])
            elif not future.done():
                future.set_result(None)

    def _write(self, connection: Connection, packed: SerializedCalls) -> None:
        rows, _ = packed
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
            settle_open_calls(connection, [str(row["call_id"]) for row in rows.calls], self._insert_exclusions)


def _is_about_the_database(error: Exception) -> bool:
    """Whether it would meet any other record alike: locked, full, unreachable."""
    cause = error.__cause__
    return isinstance(cause, OperationalError | PoolTimeout | OSError) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )


def _fail(future: asyncio.Future[None], record: CallRecord, error: Exception) -> None:
    if future.done():
        _log.error("the call %s, whose caller is gone, was not stored: %s", record.call_id, error)
        return
    reason = StoreError(f"The call {record.call_id} was not stored. {error}")
    reason.__cause__ = error
    future.set_exception(reason)
