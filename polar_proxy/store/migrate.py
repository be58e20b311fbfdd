"""Schema revisions: created by Alembic from `migrations/`, checked whenever a database is opened.

A revision is a number of four digits. So a number above `HEAD` is a newer revision, and a text of another form is
invalid.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from polar_proxy.errors import StoreError
from polar_proxy.store.database import Database, create_file
from polar_proxy.store.schema import VERSION_TABLE
from polar_proxy.store.urls import normalise_url

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

HEAD = "0001"
"""The newest revision. Repeated here so that opening a database need not load the migrations."""
VERSION_LOCATIONS = ("polar_proxy.store:migrations/versions",)
"""The folders of the revisions."""

_POSTGRES_LOCK = 0x706F6C6172  # any number that only Polar uses
_LOCK_POLL_SECONDS = 0.02
_migration_lock = threading.Lock()
"""Alembic's `op` and `context` are global, so a process migrates one database at a time."""


@asynccontextmanager
async def open_database(url: str, *, create: bool = True) -> AsyncIterator[Database]:
    """Open a database. Create it first if it is missing or empty, or upgrade it if it has an older revision.

    Without `create`, a missing, empty or older database raises StoreError instead. A newer database always raises
    StoreError.
    """
    database = Database(normalise_url(url))
    try:
        if create:
            create_file(database)
            await _ensure_newest(database)
        else:
            await _require_newest(database)
        yield database
    finally:
        await database.close()


async def upgrade(url: str) -> str:
    """Create the database or upgrade it to the newest revision, and return that revision."""
    async with open_database(url):
        return HEAD


async def _ensure_newest(database: Database) -> None:
    """Upgrade an empty or older database in one transaction. Concurrent processes take turns."""
    async with database.reading() as connection:
        if await revision(connection) == HEAD:
            return
    # On SQLite the transaction alone excludes the writers of other processes.
    async with _one_at_a_time(), database.writing() as connection:
        if database.dialect == "postgresql":
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRES_LOCK})"))
        if await revision(connection) != HEAD:
            await connection.run_sync(_run_migrations)


@asynccontextmanager
async def _one_at_a_time() -> AsyncIterator[None]:
    # Polled, because the owner may be a task of this event loop or of a loop in another thread.
    while not _migration_lock.acquire(blocking=False):  # noqa: ASYNC110 (an asyncio.Event belongs to one loop)
        await asyncio.sleep(_LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        _migration_lock.release()


async def _require_newest(database: Database) -> None:
    """Raise StoreError unless the database exists and has the newest revision. Changes nothing."""
    if database.path is not None and not database.path.exists():
        raise StoreError(
            f"There is no database at {database.path}. Run something with Polar first, or name another file"
        )
    found = await database.read(_revision)
    if found != HEAD:
        problem = f"has the older schema {found}" if found else "is empty"
        raise StoreError(f"The database {problem}. Run `polar db upgrade` to bring it to schema {HEAD}")


async def revision(connection: AsyncConnection) -> str | None:
    """Return the revision of the database, None if it is empty. Raises StoreError for a newer or foreign database."""
    return await connection.run_sync(_revision)


def _revision(connection: Connection) -> str | None:
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if tables:
            raise StoreError("This is not a Polar database: it has other tables. Give Polar a separate database")
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()
    if found is None or found == HEAD:
        return found
    if not re.fullmatch(r"\d{4}", str(found)):
        raise StoreError(
            f"The database has the schema revision {found!r}, which is not a revision of Polar: use another database"
        )
    if str(found) > HEAD:
        raise StoreError(
            f"The database was written by a newer Polar (schema {found}, this one reads up to {HEAD}): update Polar"
        )
    return str(found)


def _run_migrations(connection: Connection) -> None:
    from alembic import command  # rarely needed, and takes as long to import as the rest of the store
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "polar_proxy.store:migrations")
    config.set_main_option("version_locations", " ".join(VERSION_LOCATIONS))
    config.set_main_option("path_separator", "space")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
