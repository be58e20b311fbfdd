"""Opening and refusing databases; the migrations create the tables of the schema."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from polar_proxy.errors import StoreError
from polar_proxy.store import Store, migrate, open_store, upgrade
from polar_proxy.store.schema import VERSION_TABLE, metadata
from tests.factories import new_session

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("created_databases")]


async def test_migrations_create_the_tables_of_the_schema(store: Store) -> None:
    def differences(connection: Connection) -> Any:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True, "version_table": VERSION_TABLE}
        )
        return compare_metadata(context, metadata)

    async with store.database.reading() as connection:
        assert await connection.run_sync(differences) == []


def test_head_is_the_newest_migration() -> None:
    folder = Path(migrate.__file__).parent / "migrations"
    assert ScriptDirectory(str(folder)).get_heads() == [migrate.HEAD]


async def test_reopening_keeps_the_data(url: str) -> None:
    async with open_store(url) as store:
        session_id = await new_session(store)
    assert await upgrade(url) == migrate.HEAD
    async with open_store(url) as store:
        assert await store.schema_revision() == migrate.HEAD
        assert await store.sessions.get(session_id) is not None


async def test_concurrent_creation_of_one_database(url: str) -> None:
    async def create() -> str:
        async with open_store(url) as store:
            return await store.schema_revision()

    assert await asyncio.gather(*(create() for _ in range(4))) == [migrate.HEAD] * 4


async def _create(file: Path) -> str:
    async with open_store(str(file)) as store:
        return await store.schema_revision()


async def test_concurrent_creation_in_one_process(tmp_path: Path) -> None:
    found = await asyncio.gather(*(_create(tmp_path / f"{number}.db") for number in range(4)))
    assert found == [migrate.HEAD] * 4


async def test_concurrent_creation_in_threads(tmp_path: Path) -> None:
    """Each thread has its own event loop."""
    runs = (asyncio.to_thread(asyncio.run, _create(tmp_path / f"{number}.db")) for number in range(3))
    assert await asyncio.gather(*runs) == [migrate.HEAD] * 3


async def test_concurrent_creation_by_several_processes(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\nfrom polar_proxy.store import upgrade\nsys.stdin.read(1)\n"
        "print(asyncio.run(upgrade(sys.argv[1])))"
    )
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", script, str(tmp_path / "polar.db"))
    started = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(3)]
    results = await asyncio.gather(*(process.communicate(b"x") for process in started))
    assert [out.decode().strip() for out, _ in results] == [migrate.HEAD] * 3, [error.decode() for _, error in results]


@pytest.mark.parametrize("reader", [True, False])
async def test_refuses_a_newer_schema(url: str, reader: bool) -> None:
    async with open_store(url) as store, store.database.writing() as connection:
        await connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(StoreError, match=r"newer Polar \(schema 9999.*update Polar"):
        async with open_store(url, create=not reader):
            pass


async def test_refuses_a_database_of_another_program(url: str) -> None:
    async with open_store(url) as store, store.database.writing() as connection:
        await connection.exec_driver_sql(f"DROP TABLE {VERSION_TABLE}")
    with pytest.raises(StoreError, match="not a Polar database"):
        async with open_store(url):
            pass


async def test_refuses_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are my notes, and quite a few of them\n" * 100)
    with pytest.raises(StoreError, match="not a Polar database"):
        async with open_store(str(file)):
            pass
    assert file.read_text().startswith("these are my notes")


async def test_reader_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no database at"):
        async with open_store(str(tmp_path / "none.db"), create=False):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_reader_refuses_an_empty_database(tmp_path: Path) -> None:
    file = tmp_path / "empty.db"
    sqlite3.connect(file).close()
    file.touch()
    with pytest.raises(StoreError, match="polar db upgrade"):
        async with open_store(str(file), create=False):
            pass


async def test_error_for_an_unreachable_server_hides_the_password() -> None:
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        async with open_store("postgresql://me:hidden@127.0.0.1:1/polar"):
            pass
    assert "hidden" not in str(caught.value)


async def test_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "home" / "polar.db"
    async with open_store(str(file)):
        pass
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_writers_set_pragmas(tmp_path: Path) -> None:
    opened = open_store(str(tmp_path / "polar.db"))
    async with opened as store, store.database.writing() as connection:
        for pragma, value in (("synchronous", 1), ("journal_mode", "wal"), ("foreign_keys", 1)):
            assert (await connection.exec_driver_sql(f"PRAGMA {pragma}")).scalar() == value
