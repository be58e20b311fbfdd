"""Schema revisions: made by Alembic from `migrations/`, checked at every opening.

Revisions are four digits that count up, so that a newer one is told from a damaged one.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store.database import Database, make_file
from polar_proxy.store.schema import VERSION_TABLE
from polar_proxy.store.urls import normalise_url

HEAD = "0008"
"""The newest revision. Stands here too so that opening a database need not load the migrations."""

_POSTGRES_LOCK = 0x706F6C6172  # any number that only Polar uses
_LOOK_AGAIN = 0.02
_migrating = threading.Lock()
"""Alembic's `op` and `context` are of the whole process, so one database is migrated at a time."""


async def upgrade(url: str) -> str:
    """Create the database or bring it to the newest revision; returns that. A no-op where it is there already."""
    database = Database(normalise_url(url))
    try:
        make_file(database)
        await ensure_newest(database)
    finally:
        await database.close()
    return HEAD


async def ensure_newest(database: Database) -> None:
    """Upgrade an empty or older database in one transaction; two processes that try at once take turns."""
    async with database.reading() as connection:
        if await revision(connection) == HEAD:
            return
    # On SQLite the transaction alone shuts out the writers of other processes.
    async with _one_at_a_time(), database.writing() as connection:
        if database.dialect == "postgresql":
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRES_LOCK})"))
        if await revision(connection) != HEAD:
            await connection.run_sync(_run_migrations)


@asynccontextmanager
async def _one_at_a_time() -> AsyncIterator[None]:
    # Looked at again and again, because who holds it may be another task of this loop or run in another thread's.
    while not _migrating.acquire(blocking=False):  # noqa: ASYNC110 (an event is of one loop)
        await asyncio.sleep(_LOOK_AGAIN)
    try:
        yield
    finally:
        _migrating.release()


async def require_newest(database: Database) -> None:
    """For readers: refuse a database that is missing or older as well as one that is newer. Changes nothing."""
    if database.path is not None and not database.path.exists():
        raise StoreError(f"There is no database at {database.path}: run something with Polar first, or name another")
    async with database.reading() as connection:
        found = await revision(connection)
    if found != HEAD:
        what = f"has the older schema {found}" if found else "is empty"
        raise StoreError(f"The database {what}: `polar db upgrade` brings it to {HEAD}")


async def revision(connection: AsyncConnection) -> str | None:
    """The revision of the database, None when it is empty. Raises StoreError for a newer or a foreign one."""
    return await connection.run_sync(_revision)


def _revision(connection: Connection) -> str | None:
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if tables:
            raise StoreError("This is not a Polar database: it has other tables. Give Polar a database of its own")
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()
    if found is None or found == HEAD:
        return found
    if not re.fullmatch(r"\d{4}", str(found)):
        raise StoreError(f"The schema revision {found!r} is not one of Polar's")
    if str(found) > HEAD:
        raise StoreError(
            f"The database was written by a newer Polar (schema {found}, this one reads up to {HEAD}): update Polar"
        )
    return str(found)


def _run_migrations(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", "polar_proxy.store:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
