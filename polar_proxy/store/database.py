"""Connections: one engine that writes, one that reads, and the translation of driver errors to StoreError."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec
from polar_proxy.store.urls import display_url, sqlite_path

T = TypeVar("T")

Durability = Literal["process", "power"]
"""What a commit outlives: the death of every process (`process`), or the machine losing power as well (`power`).

`power` waits for the disk with each group commit. It is a matter of SQLite only: on PostgreSQL the server's own
`synchronous_commit` decides, because there `process` would also lose calls when the server dies.
"""

_BUSY_MS = 30_000
_CHECKPOINT_PAGES = 4_000
_AWAY_SECONDS = 45.0
"""For which a PostgreSQL server is waited for that was there and is not: it may be restarting. Shorter than the
gateway's patience with a commit, so that an agent hears of its answer from the store, not from a time limit."""
_AWAY_STATES = {"57P01", "57P02", "57P03"}
"""admin_shutdown, crash_shutdown, cannot_connect_now: https://www.postgresql.org/docs/current/errcodes-appendix.html"""


class Database:
    """The engines on one database, and who may write when.

    SQLite connections run with explicit BEGIN: a writer takes the lock at once (BEGIN IMMEDIATE), so that it waits in
    the busy handler instead of failing half-way; a reader sees one snapshot and cannot write. The writers of this
    process take turns by an asyncio lock, which is woken at once where the busy handler would sleep.

    A PostgreSQL server that was reached and is away is waited for before a transaction begins, never inside of one:
    what its end cut off is an error, and only its caller knows whether it may be said again.
    """

    def __init__(self, url: str, durability: Durability = "process") -> None:
        self.url = url
        self.path = sqlite_path(url)
        self.dialect: Literal["sqlite", "postgresql"] = "postgresql" if self.path is None else "sqlite"
        self._turn = asyncio.Lock()
        self._reached = False
        self._worker: ThreadPoolExecutor | None = None
        self._worker_engine: Engine | None = None
        common: dict[str, Any] = {"json_serializer": json_codec.dumps_text, "json_deserializer": json_codec.loads}
        try:
            if self.path is not None:
                own = {"connect_args": {"factory": _RollbackOnClose}}
                self._writer = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=120, **own, **common)
                self._reader = create_async_engine(url, pool_size=4, max_overflow=4, **own, **common)
                # aiosqlite crosses threads three times for every statement, so the hot path has a connection of its
                # own in the thread that packs the rows, where a whole transaction is one crossing.
                self._worker_engine = create_engine(
                    make_url(url).set(drivername="sqlite"),
                    pool_size=1,
                    max_overflow=0,
                    # Closed from another thread, used in one.
                    connect_args={"check_same_thread": False, "factory": _RollbackOnClose},
                    **common,
                )
                _sqlite_events(self._writer.sync_engine, durability, writes=True)
                _sqlite_events(self._reader.sync_engine, durability, writes=False)
                _sqlite_events(self._worker_engine, durability, writes=True)
            else:
                self._writer = create_async_engine(
                    url,
                    pool_size=4,
                    max_overflow=4,
                    pool_pre_ping=True,  # a server may have been restarted since
                    **common,
                )
                self._reader = self._writer
        except ModuleNotFoundError as error:
            raise StoreError("PostgreSQL needs its driver asyncpg: pip install 'polar-proxy[postgres]'") from error

    def insert_new(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """INSERT that leaves rows which exist as they are."""
        if self.dialect == "sqlite":
            return sqlite.insert(table).on_conflict_do_nothing()
        return postgresql.insert(table).on_conflict_do_nothing()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed when the block ends without an error."""
        with self.translated():
            async with (
                self._turn if self.path is not None else nullcontext(),
                self._connected(self._writer) as connection,
                connection.begin(),
            ):
                yield connection

    async def write_packed(self, pack: Callable[[], T], write: Callable[[Connection, T], None]) -> T:
        """The hot path: `pack` in the worker thread, then `write` in its own transaction; returns what was packed."""
        loop = asyncio.get_running_loop()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="polar-store")
        engine = self._worker_engine
        if engine is None:
            packed = await loop.run_in_executor(self._worker, pack)
            async with self.writing() as connection:
                await connection.run_sync(write, packed)
            return packed

        def work() -> T:
            packed = pack()
            with engine.begin() as connection:
                write(connection, packed)
            return packed

        with self.translated():
            async with self._turn:
                return await loop.run_in_executor(self._worker, work)

    async def in_turn(self, work: Callable[[], T]) -> T:
        """`work`, which writes by a connection of its own, in a thread, while no other writer of this process does."""
        async with self._turn:
            return await asyncio.to_thread(work)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection that sees one snapshot (SQLite) or each statement's own (PostgreSQL)."""
        with self.translated():
            async with self._connected(self._reader) as connection:
                yield connection

    @asynccontextmanager
    async def _connected(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        deadline = time.monotonic() + (_AWAY_SECONDS if self._reached and self.path is None else 0.0)
        async with AsyncExitStack() as stack:
            while True:
                try:
                    connection = await stack.enter_async_context(engine.connect())
                    break
                except (SQLAlchemyError, OSError) as error:
                    if not is_away(error) or time.monotonic() >= deadline:
                        raise
                await asyncio.sleep(0.2)
            self._reached = True
            yield connection

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Driver errors as one clear StoreError."""
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.describe(error)} ({display_url(self.url)})") from error

    def describe(self, error: SQLAlchemyError | sqlite3.Error | OSError) -> str:
        """What went wrong, without the statement and its parameters (they may hold a conversation)."""
        if isinstance(error, OSError):
            return f"The database cannot be reached: {error}"
        if isinstance(error, PoolTimeout):
            return "The database is too busy: no connection became free in time"
        if not isinstance(error, DBAPIError):
            return f"The database refused: {type(error).__name__}"
        reason = str(error.orig).splitlines()[0] if error.orig is not None else type(error).__name__
        low = reason.lower()
        if "not a database" in low:
            return "This file is not a Polar database (not even an SQLite file)"
        if "database is locked" in low:
            return f"Another process has held the database's lock for {_BUSY_MS // 1000} seconds"
        if "disk is full" in low or "no space left" in low:
            return "The disk is full: nothing more can be recorded until there is room"
        if "unable to open database file" in low or "readonly database" in low:
            return f"The database file cannot be opened for this: {reason}"
        if isinstance(error, IntegrityError):
            return f"A row does not fit what is stored (an id that is unknown, or one used twice): {reason}"
        return f"The database refused: {reason}"

    async def close(self) -> None:
        # Shielded: a cancelled shutdown must still end the drivers' threads, or the process never exits.
        await asyncio.shield(self._dispose())

    async def _dispose(self) -> None:
        if self._worker is not None:
            await asyncio.to_thread(self._worker.shutdown)
        if self._worker_engine is not None:
            self._worker_engine.dispose()
        await self._writer.dispose()
        if self._reader is not self._writer:
            await self._reader.dispose()


def is_away(error: BaseException | None) -> bool:
    """Whether the server is not there now, or was not to the end of what failed."""
    while error is not None:
        if isinstance(error, DBAPIError) and error.connection_invalidated:
            return True
        if isinstance(error, OSError) or getattr(error, "sqlstate", None) in _AWAY_STATES:
            return True
        error = error.__cause__
    return False


def make_file(database: Database) -> None:
    """The SQLite file, readable by its owner only: it holds whole conversations."""
    if database.path is None:
        return
    try:
        database.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(database.path, os.O_RDWR | os.O_CREAT, 0o600))
        empty = database.path.stat().st_size == 0
    except OSError as error:
        raise StoreError(f"The database file {database.path} cannot be made: {error.strerror}") from error
    if empty:
        with closing(sqlite3.connect(database.path, timeout=_BUSY_MS / 1000)) as connection, database.translated():
            # Only before anything is in it: `polar db vacuum` can then give space back piece by piece.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")


class _RollbackOnClose(sqlite3.Connection):
    """A connection whose transaction ends when it is closed.

    SQLite keeps a closed connection, with its transaction and its locks, for as long as a statement of it is known to
    anybody, and the traceback of a cancelled task knows one until the garbage collector comes.
    """

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()
        super().close()


def _sqlite_events(engine: Engine, durability: Durability, *, writes: bool) -> None:
    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    def on_connect(connection: Any, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # the driver must not begin by itself; see `on_begin`
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        if writes:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
            cursor.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
            cursor.execute("PRAGMA foreign_keys=ON")
        else:
            cursor.execute("PRAGMA query_only=ON")
        cursor.execute("PRAGMA cache_size=-32768")
        cursor.close()

    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
