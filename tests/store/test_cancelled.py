"""What a writer that was cancelled leaves behind: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from polar_proxy.store import Store

_SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) SELECT count(*) FROM n"


async def test_a_cancelled_writer_holds_no_lock(store: Store) -> None:
    known: list[Any] = []  # as a traceback knows them
    slow = asyncio.Event()

    async def write() -> None:
        async with store._database.writing() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            known.append(await driver.execute("UPDATE settings SET value = value"))
            slow.set()
            await connection.execute(text(_SLOW))

    task = asyncio.create_task(write())
    await slow.wait()
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        assert await store.feed_depth() == {}
