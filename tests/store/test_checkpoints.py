"""Checkpoints of SQLite's write-ahead log beside the commits."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from polar_proxy.store import open_store
from polar_proxy.store.checkpoints import Checkpointer
from polar_proxy.store.database import Database
from tests.until import until

LOG_BYTES = 400_000
ROWS = 100
"""Rows of a transaction, about 100 kB."""


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """A database whose log is copied as soon as it is longer than `LOG_BYTES`."""
    async with open_store(str(tmp_path / "polar.db")) as store:
        await store.database.write(lambda connection: connection.execute(text("CREATE TABLE rows (text TEXT)")))
        assert store.database.path is not None
        store.database._checkpointer = Checkpointer(store.database.path, log_bytes=LOG_BYTES, pause=0)
        yield store.database


def insert_rows(connection: Connection) -> None:
    connection.execute(text("INSERT INTO rows VALUES (:text)"), [{"text": "x" * 1_000}] * ROWS)


def log_bytes(database: Database) -> int:
    return Path(f"{database.path}-wal").stat().st_size


async def test_the_log_is_shortened_again_and_again_while_commits_go_on(database: Database) -> None:
    lengths = [log_bytes(database)]
    while sum(later < earlier for earlier, later in pairwise(lengths)) < 3:
        await database.write(insert_rows)
        lengths.append(log_bytes(database))
        assert len(lengths) < 1_000
    assert max(lengths) > LOG_BYTES
    count = await database.read(lambda connection: connection.scalar(text("SELECT count(*) FROM rows")))
    assert count == ROWS * (len(lengths) - 1)


async def test_a_reader_keeps_the_log_and_its_end_lets_it_go(database: Database) -> None:
    async with database.reading() as reader:
        await reader.execute(text("SELECT * FROM rows"))
        while log_bytes(database) < 6 * LOG_BYTES:
            await database.write(insert_rows)
        assert (await reader.execute(text("SELECT count(*) FROM rows"))).scalar() == 0
    for _ in range(1_000):
        await database.write(insert_rows)
        if log_bytes(database) < LOG_BYTES:
            return
    pytest.fail("the log was never shortened after the reader's end")


async def test_a_transaction_of_the_event_loop_shortens_the_log_too(database: Database) -> None:
    for _ in range(1_000):
        before = log_bytes(database)
        async with database.writing() as connection:
            await connection.run_sync(insert_rows)
        if log_bytes(database) < before:
            return
    pytest.fail("the log was never shortened")


async def test_commits_go_on_when_the_log_cannot_be_copied(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("polar_proxy.store.checkpoints.sqlite3.connect", refuse)
    while log_bytes(database) < 2 * LOG_BYTES:
        await database.write(insert_rows)
    await until(lambda: "was not copied into the file: database or disk is full" in caplog.text)
    await database.write(insert_rows)
