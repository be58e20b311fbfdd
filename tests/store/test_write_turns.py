"""The SQLite writers of one process take turns."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import Connection, text

from polar_proxy.store import Store, open_store
from tests.until import until


async def test_many_short_writes_keep_no_long_one_waiting(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "polar.db")) as store:
        ended = 0

        async def write_again_and_again() -> None:
            nonlocal ended
            while True:
                await store.database.write(_change_nothing)
                ended += 1

        writers = [asyncio.create_task(write_again_and_again()) for _ in range(4)]
        await until(lambda: ended > 20)
        async with asyncio.timeout(60), store.database.writing() as connection:
            before = ended
            await connection.execute(text("UPDATE settings SET value = value"))
            await asyncio.sleep(0.05)
            assert ended == before
        await until(lambda: ended > before)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        await assert_writable(store)


async def test_a_cancelled_write_leaves_the_turn_to_others(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "polar.db")) as store:
        async with store.database.writing():
            waiting = [asyncio.create_task(store.database.write(_change_nothing)) for _ in range(3)]
            waiting.append(asyncio.create_task(store.database.run_exclusive(lambda: None)))
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await assert_writable(store)


def _change_nothing(connection: Connection) -> None:
    connection.execute(text("UPDATE settings SET value = value"))


async def assert_writable(store: Store) -> None:
    async with asyncio.timeout(60):
        await store.database.write(_change_nothing)
        await store.database.run_exclusive(lambda: None)
