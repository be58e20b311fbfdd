"""A cancelled writer keeps no lock and no transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import Any

import pytest
from sqlalchemy import text

from polar_proxy.store import Store
from polar_proxy.store.sqlite_file import RollbackOnClose
from tests.until import until


async def test_a_cancelled_writer_holds_no_lock(store: Store) -> None:
    references: list[Any] = []  # keeps references to statements, as a traceback does
    sqlite = store.database.dialect == "sqlite"
    started, running, ends = asyncio.Event(), threading.Event(), threading.Event()

    def held() -> int:
        running.set()
        return int(ends.wait(120))

    async def write() -> None:
        async with store.database.writing() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            references.append(await driver.execute("UPDATE settings SET value = value"))
            if sqlite:
                await driver.create_function("held", 0, held)
            started.set()
            await connection.execute(text("SELECT held()" if sqlite else "SELECT pg_sleep(300)"))

    task = asyncio.create_task(write())
    await started.wait()
    if sqlite:
        await until(running.is_set)
    task.cancel()
    await asyncio.sleep(0)
    ends.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        assert await store.feed.depth() == {}


def test_a_connection_may_be_closed_again() -> None:
    """When a close is cancelled, the pool closes again; an error then would leave the connection's thread running."""
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=RollbackOnClose)
    connection.execute("BEGIN")
    connection.close()
    connection.close()
