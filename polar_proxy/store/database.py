"""Connections to one database: a writer, readers, transactions, and driver errors as StoreError."""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Executable, Select, Table, create_engine
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec
from polar_proxy.store.checkpoints import Checkpointer
from polar_proxy.store.sqlite_file import (
    BUSY_MS,
    PROBE,
    RollbackOnClose,
    check_free_space,
    is_locked,
    name_lock_holder,
    probe_file,
    set_up_connections,
    write_lock_holders,
)
from polar_proxy.store.urls import display_url, sqlite_path

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

P = TypeVar("P")
T = TypeVar("T")

_RECONNECT_SECONDS = 45.0
"""Default of `patience`: seconds to wait for a PostgreSQL server that was reached before and may be restarting."""
_CONNECT_SECONDS = 3.0
_PROBE_SECONDS = 1.2
_RECENT_SECONDS = 1.0
"""A write that ended at most this long ago shows that the database can be written."""
_READERS = 8
"""Maximum number of SQLite reads of `Database.read` that run at once."""
_JSON: dict[str, Any] = {"json_serializer": json_codec.dumps_text, "json_deserializer": json_codec.loads}
_STUCK_SECONDS = 10.0
"""Time after which a SQLite write of this process counts as stuck, not as slow."""
_DISK_FULL = "The disk is full: nothing can be recorded until space is freed"
_UNAVAILABLE_STATES = {"57P01", "57P02", "57P03"}
"""SQLSTATEs which mean that the server is shutting down or starting: admin_shutdown, crash_shutdown and
cannot_connect_now. See https://www.postgresql.org/docs/current/errcodes-appendix.html"""


class StoreUnreachableError(StoreError):
    """No connection was made, so nothing was read or written."""


class StoreUncertainError(StoreError):
    """It is unknown whether an operation took effect: the connection broke, or no answer came in time."""


class UnstorableValueError(StoreError):
    """A value does not fit into its column: an integer is too large, or the database does not accept a text."""


class _WriteLock:
    """Lets the SQLite writers of this process take turns: either the worker thread writes, or one other writer.

    The transactions of the worker thread wait here only for other writers that came first. They do not wait for each
    other, because the thread runs them one after the other anyway. If they waited here, each would begin only when the
    event loop notices the end of the previous one. A busy event loop needs much longer for this than a transaction
    takes.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        """Start of the write that is running now, by the monotonic clock; None if no write is running."""
        self._in_worker = 0
        """Number of transactions that the worker thread runs or will run."""
        self._other_runs = False
        self._others_wait = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        """Wait until a transaction of the worker thread may run. Keep other writers out until the block ends."""
        await self._until(lambda: not (self._other_runs or self._others_wait))
        self._in_worker += 1
        try:
            yield
        finally:
            self._in_worker -= 1
            self._changed.set()

    @asynccontextmanager
    async def other(self) -> AsyncIterator[None]:
        """Wait until neither the worker thread nor another writer writes. Keep both out until the block ends."""
        self._others_wait += 1
        try:
            await self._until(lambda: not (self._other_runs or self._in_worker))
        finally:
            self._others_wait -= 1
            self._changed.set()
        self._other_runs, self.since = True, time.monotonic()
        try:
            yield
        finally:
            self._other_runs, self.since = False, None
            self._changed.set()

    async def _until(self, is_free: Callable[[], bool]) -> None:
        while not is_free():
            self._changed.clear()
            await self._changed.wait()


class Database:
    """The connection pools of one database.

    SQLite transactions begin explicitly. A writer takes the lock at once (BEGIN IMMEDIATE), so that it waits in the
    busy handler instead of failing half-way; a reader sees one snapshot and cannot write. The writers of this process
    also take turns (see `_WriteLock`). So the next writer begins as soon as the previous one has ended, whereas the
    busy handler sleeps between its attempts.

    If a PostgreSQL server was reached before and is now unavailable, a new transaction waits for it. A transaction that
    the server broke off raises an error, because only its caller knows whether it may be repeated.
    """

    def __init__(self, url: str) -> None:
        """`url`: as `normalise_url` returns it."""
        self.url = url
        self.path = sqlite_path(url)
        self.dialect: Literal["sqlite", "postgresql"] = "postgresql" if self.path is None else "sqlite"
        self._write_lock = _WriteLock()
        self._was_reached = False
        self._written_at = -math.inf
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="polar-store")
        self._worker_engine: Engine | None = None
        self._reader_threads = ThreadPoolExecutor(_READERS, thread_name_prefix="polar-read")
        self._reader_engine: Engine | None = None
        self._checkpointer: Checkpointer | None = None
        self._async_engines: list[AsyncEngine] = []
        """The engines that `_writer` and `_reader` have made so far."""
        if self.path is not None:
            # aiosqlite changes threads three times per statement. `read` and `write` therefore use separate connections
            # in separate threads, where a whole transaction takes one change of threads.
            blocking = make_url(url).set(drivername="sqlite")
            # Used in one thread, closed in another.
            own = {"connect_args": {"check_same_thread": False, "factory": RollbackOnClose}, "max_overflow": 0}
            self._worker_engine = create_engine(blocking, pool_size=1, **own, **_JSON)
            self._reader_engine = create_engine(blocking, pool_size=_READERS, **own, **_JSON)
            self._checkpointer = Checkpointer(self.path)
            set_up_connections(self._worker_engine, writes=True)
            set_up_connections(self._reader_engine, writes=False)

    @cached_property
    def _writer(self) -> AsyncEngine:
        """The SQLAlchemy engine of `writing`. For PostgreSQL, the engine of all transactions."""
        if self.path is None:
            # pre_ping: the server may have been restarted since the connection was pooled. No overflow: under load
            # its connections would be made and closed again and again.
            connect = {"timeout": _CONNECT_SECONDS}
            return self._make_async_engine(pool_size=8, max_overflow=0, pool_pre_ping=True, connect_args=connect)
        own = {"factory": RollbackOnClose}
        engine = self._make_async_engine(pool_size=1, max_overflow=0, pool_timeout=120, connect_args=own)
        set_up_connections(engine.sync_engine, writes=True)
        return engine

    @cached_property
    def _reader(self) -> AsyncEngine:
        """The SQLAlchemy engine of `reading`."""
        if self.path is None:
            return self._writer
        own = {"factory": RollbackOnClose}
        engine = self._make_async_engine(pool_size=4, max_overflow=4, connect_args=own)
        set_up_connections(engine.sync_engine, writes=False)
        return engine

    def _make_async_engine(self, **options: Any) -> AsyncEngine:
        from sqlalchemy.ext.asyncio import create_async_engine  # imports SQLAlchemy's ORM, which short commands save

        try:
            engine = create_async_engine(self.url, **options, **_JSON)
        except ModuleNotFoundError as error:
            raise StoreError("PostgreSQL needs the driver asyncpg: pip install 'polar-proxy[postgres]'") from error
        self._async_engines.append(engine)
        return engine

    def insert_new(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """Return an INSERT that leaves existing rows unchanged."""
        if self.dialect == "sqlite":
            return sqlite.insert(table).on_conflict_do_nothing()
        from sqlalchemy.dialects import postgresql  # imported only for PostgreSQL

        return postgresql.insert(table).on_conflict_do_nothing()

    @asynccontextmanager
    async def writing(self, patience: float | None = None) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that is committed when the block ends without an error.

        `patience`: seconds to wait for a server that is unavailable, before StoreUnreachableError is raised.
        """
        with self.translated():
            async with self._turn():
                async with self._connected(self._writer, patience) as connection, connection.begin():
                    yield connection
                self._written_at = time.monotonic()
                if self._checkpointer is not None:
                    await asyncio.to_thread(self._checkpointer.after_commit)

    async def write_in_thread(
        self, prepare: Callable[[], P], write: Callable[[Connection, P], T], patience: float | None = None
    ) -> T:
        """Run `prepare` in the worker thread, then `write` with its result in a transaction (see `writing`)."""
        loop = asyncio.get_running_loop()
        engine, checkpointer = self._worker_engine, self._checkpointer
        if engine is None or checkpointer is None:
            prepared = await loop.run_in_executor(self._worker, prepare)
            async with self.writing(patience) as connection:
                return await connection.run_sync(write, prepared)

        def work() -> T:
            self._write_lock.since = time.monotonic()
            try:
                prepared = prepare()
                with engine.begin() as connection:
                    result = write(connection, prepared)
            finally:
                self._write_lock.since = None
            self._written_at = time.monotonic()
            checkpointer.after_commit()
            return result

        with self.translated():
            async with self._write_lock.worker():
                return await loop.run_in_executor(self._worker, work)

    async def write(self, work: Callable[[Connection], T], patience: float | None = None) -> T:
        """Run `work` in a transaction (see `writing`). For SQLite, it runs in a thread. If the caller is cancelled, the
        transaction may still be committed."""
        if self._worker_engine is None:
            async with self.writing(patience) as connection:
                return await connection.run_sync(work)
        return await self.write_in_thread(lambda: None, lambda connection, _: work(connection), patience)

    async def run_exclusive(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread. No other writer of this process runs meanwhile.

        Use this for `work` that writes on its own connection.
        """
        async with self._write_lock.other():
            return await asyncio.to_thread(work)

    def _turn(self) -> AbstractAsyncContextManager[None]:
        """Wait until no other SQLite writer of this process runs. Keep other writers out until the block ends.
        PostgreSQL needs no turns."""
        return nullcontext() if self.path is None else self._write_lock.other()

    @asynccontextmanager
    async def reading(self, patience: float | None = None) -> AsyncIterator[AsyncConnection]:
        """Open a connection that sees one snapshot (SQLite) or a snapshot per statement (PostgreSQL)."""
        with self.translated():
            async with self._connected(self._reader, patience) as connection:
                yield connection

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on a connection like that of `reading`: for SQLite in a thread, for PostgreSQL in the event loop.

        So `work` may build rows, but must not unpack texts and tokens, which would block the event loop.
        """
        engine = self._reader_engine
        if engine is None:
            async with self.reading() as connection:
                return await connection.run_sync(work)

        def read() -> T:
            with engine.connect() as connection:
                return work(connection)

        with self.translated():
            return await asyncio.get_running_loop().run_in_executor(self._reader_threads, read)

    async def probe(self) -> None:
        """Write a row and commit, on a separate connection. Raises StoreError if nothing can be stored now.

        If a write of this process ended in the last second, nothing is written (for SQLite, only the free space is
        checked). Under load, the probe may time out or not get SQLite's lock, because this process's own writes hold
        the lock most of the time. This is no error if a write of this process ended during the probe or is running,
        unless that write is stuck.
        """
        began = time.monotonic()
        try:
            if self.path is not None:
                is_recent = self._written_at > began - _RECENT_SECONDS
                await asyncio.to_thread(check_free_space if is_recent else probe_file, self.path)
            elif self._written_at <= began - _RECENT_SECONDS:
                # In a separate event loop: in a busy one, the few round trips would exceed their time limit.
                await asyncio.to_thread(asyncio.run, self._probe_server())
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            may_be_load = isinstance(error, TimeoutError) or (is_locked(error) and self._may_have_lock())
            if not (may_be_load and (self._written_at > began or self._write_lock.since is not None)):
                raise StoreError(self._describe(error)) from error

    def _may_have_lock(self) -> bool:
        """Return whether a write of this process may hold SQLite's lock. Raises StoreError if that write is stuck."""
        assert self.path is not None
        holders = write_lock_holders(self.path)
        if holders and os.getpid() not in holders:
            return False
        since = self._write_lock.since
        seconds = 0.0 if since is None else time.monotonic() - since
        if seconds > _STUCK_SECONDS:
            raise StoreError(f"A write of this process has been running for {seconds:.0f} s, and others wait for it")
        return True

    async def _probe_server(self) -> None:
        import asyncpg

        _, address = self._writer.dialect.create_connect_args(make_url(self.url))
        limits = {"timeout": _PROBE_SECONDS, "command_timeout": _PROBE_SECONDS}
        try:
            connection = await asyncpg.connect(**{**address, **limits})
            try:
                await connection.execute(PROBE)
            finally:
                connection.terminate()  # does not wait for a server that hangs
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise StoreError(f"The database refused the operation: {error}") from error

    @asynccontextmanager
    async def _connected(self, engine: AsyncEngine, patience: float | None) -> AsyncIterator[AsyncConnection]:
        may_restart = self._was_reached and self.path is None
        patience = _RECONNECT_SECONDS if patience is None else patience
        deadline = time.monotonic() + (patience if may_restart else 0.0)
        async with AsyncExitStack() as stack:
            while True:
                try:
                    connection = await stack.enter_async_context(engine.connect())
                    break
                except (SQLAlchemyError, OSError) as error:
                    if not is_unavailable(error):
                        raise
                    if time.monotonic() >= deadline:
                        raise StoreUnreachableError(f"{self._describe(error)} ({display_url(self.url)})") from error
                await asyncio.sleep(0.2)
            self._was_reached = True
            yield connection

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn each driver error in the block into a StoreError."""
        try:
            yield
        except OverflowError as error:  # sqlite3 raises it for an integer beyond 64 bits
            raise UnstorableValueError(f"A value does not fit into its column: {error}") from error
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            described = f"{self._describe(error)} ({display_url(self.url)})"
            raise (UnstorableValueError if _is_data_error(error) else StoreError)(described) from error

    def _describe(self, error: SQLAlchemyError | sqlite3.Error | OSError) -> str:
        if self.path is not None and is_locked(error):
            return f"{name_lock_holder(self.path)} holds the database's lock for too long"
        return _describe(error)

    async def close(self) -> None:
        # Shielded: a cancelled shutdown must still end the drivers' threads, or the process never exits.
        await asyncio.shield(self._dispose())

    async def _dispose(self) -> None:
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self._reader_threads.shutdown)
        if self._checkpointer is not None:
            await asyncio.to_thread(self._checkpointer.close)
        for engine in (self._worker_engine, self._reader_engine):
            if engine is not None:
                engine.dispose()
        for made in self._async_engines:
            await made.dispose()


class Repository:
    """The queries on a few related tables.

    Rows are returned as dataclasses. Their fields are the selected columns, in the same order (see `row_columns`).
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _rows(self, row: Callable[..., T], query: Select[Any]) -> list[T]:
        return await self._database.read(lambda connection: [row(*values) for values in connection.execute(query)])

    async def _row(self, row: Callable[..., T], query: Select[Any]) -> T | None:
        found = await self._rows(row, query)
        return found[0] if found else None

    async def _scalars(self, query: Select[Any]) -> list[Any]:
        """Return the first column of the query's rows."""
        return await self._database.read(lambda connection: list(connection.scalars(query)))

    async def _write(self, statement: Executable) -> None:
        await self._database.write(lambda connection: connection.execute(statement))


def row_columns(row: type[Any], table: Table, **computed: ColumnElement[Any]) -> list[ColumnElement[Any]]:
    """Return a column for each field of a dataclass: from `computed` if the field is there, else from the table."""
    return [computed[name] if name in computed else table.c[name] for name in (field.name for field in fields(row))]


_REASONS = (
    ("not a database", "This file is not a Polar database (not even an SQLite file)"),
    ("malformed", "The database file is damaged. Restore it from a copy, or name another file with --db"),
    ("disk is full", _DISK_FULL),
    ("no space left", _DISK_FULL),
    ("disk quota exceeded", _DISK_FULL),
)
"""Pairs (part of a driver's error text in lower case, what the error means)."""


def _describe(error: SQLAlchemyError | sqlite3.Error | OSError) -> str:
    """Return what the error means, without the statement and its parameters, which may hold a conversation."""
    if isinstance(error, PoolTimeout):
        return "The database is too busy: no connection became free in time"
    if isinstance(error, DBAPIError) and error.orig is not None:
        reason = str(error.orig).splitlines()[0]
    elif isinstance(error, SQLAlchemyError):
        return f"The database refused the operation: {type(error).__name__}"
    else:
        reason = str(error) or type(error).__name__
    lower = reason.lower()
    for part, meaning in _REASONS:
        if part in lower:
            return meaning
    if isinstance(error, OSError):
        return f"The database cannot be reached: {reason}"
    if "unable to open database file" in lower or "readonly database" in lower:
        return f"The database file cannot be opened for writing: {reason}"
    if isinstance(error, IntegrityError):
        return f"A row contradicts the stored rows (it names an unknown id, or its id is taken): {reason}"
    return f"The database refused the operation: {reason}"


def _is_data_error(error: BaseException | None) -> bool:
    """Return whether PostgreSQL, or its driver, refused a value."""
    # The driver is optional, so its class is recognised by its name.
    return any(
        type(cause).__name__ == "DataError" or str(getattr(cause, "sqlstate", "")).startswith("22")
        for cause in _causes(error)
    )


def is_unavailable(error: BaseException | None) -> bool:
    """Return whether the error means that the server cannot be reached, or that the connection to it was lost."""
    return any(
        (isinstance(cause, DBAPIError) and cause.connection_invalidated)
        or isinstance(cause, OSError)
        or getattr(cause, "sqlstate", None) in _UNAVAILABLE_STATES
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause's own cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def create_file(database: Database) -> None:
    """Create the SQLite file, readable only by its owner because it holds whole conversations."""
    if database.path is None:
        return
    try:
        database.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(database.path, os.O_RDWR | os.O_CREAT, 0o600))
        empty = database.path.stat().st_size == 0
    except OSError as error:
        raise StoreError(f"The database file {database.path} cannot be created: {error.strerror}") from error
    if empty:
        with closing(sqlite3.connect(database.path, timeout=BUSY_MS / 1000)) as connection, database.translated():
            # Has an effect only on an empty file; `polar db vacuum` can then return space in small steps.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")
