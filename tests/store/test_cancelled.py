"""What a writer that was cancelled leaves behind: nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import text

from polar_proxy.store import Store
from tests.until import until


async def test_a_cancelled_writer_holds_no_lock(store: Store) -> None:
    known: list[Any] = []  # as a traceback knows them
    sqlite = store.database.dialect == "sqlite"
    asked, runs, ends = asyncio.Event(), threading.Event(), threading.Event()

    def held() -> int:
        runs.set()
        return int(ends.wait(120))

    async def write() -> None:
        async with store.database.writing() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            known.append(await driver.execute("UPDATE settings SET value = value"))
            if sqlite:
                await driver.create_function("held", 0, held)
            asked.set()
            await connection.execute(text("SELECT held()" if sqlite else "SELECT pg_sleep(300)"))

    task = asyncio.create_task(write())
    await asked.wait()
    if sqlite:
        await until(runs.is_set)
    task.cancel()
    await asyncio.sleep(0)
    ends.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        assert await store.feed.depth() == {}
