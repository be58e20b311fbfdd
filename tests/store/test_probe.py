"""The probe tells an outage from a process that is busy writing, and names the process that has the lock."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from polar_proxy.errors import StoreError
from polar_proxy.gateway.health import HealthCheck
from polar_proxy.store import database, open_store

pytestmark = pytest.mark.slow


async def test_a_write_that_just_ended_shows_that_the_database_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load the writers of this process hold the lock, and the probe would report an outage."""
    file = tmp_path / "polar.db"
    async with open_store(str(file)) as store:
        await store.sessions.create(key_hash=None, label=None, origin="open")
        with closing(sqlite3.connect(file, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            await store.database.probe()
            monkeypatch.setattr(database, "_RECENT_SECONDS", 0.0)
            with pytest.raises(StoreError, match="lock"):
                await store.database.probe()
            holder.execute("ROLLBACK")


async def test_a_running_transaction_shows_that_the_database_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine one transaction takes longer than the probe waits. One that does not end is an outage."""
    monkeypatch.setattr(database, "_RECENT_SECONDS", 0.0)
    async with open_store(str(tmp_path / "polar.db")) as store, store.database.writing():
        await store.database.probe()
        monkeypatch.setattr(database, "_STUCK_SECONDS", 0.0)
        with pytest.raises(StoreError, match="has been running for"):
            await store.database.probe()


async def test_a_write_that_ends_during_the_probe_shows_that_the_database_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_RECENT_SECONDS", 0.0)
    async with open_store(str(tmp_path / "polar.db")) as store:

        def locked(*_: object) -> None:
            store.database._written_at = time.monotonic()  # by another thread
            raise sqlite3.OperationalError("database is locked")

        monkeypatch.setattr(database, "probe_file", locked)
        await store.database.probe()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the holders of locks")
async def test_names_the_process_that_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_RECENT_SECONDS", 0.0)
    file = tmp_path / "polar.db"
    async with open_store(str(file)) as store:
        program = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        program += "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.read()"
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, str(file)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert holder.stdout is not None
            await holder.stdout.readline()
            with pytest.raises(StoreError, match=rf"Process {holder.pid} \(python.*holds the database's lock"):
                await store.database.probe()
        finally:
            holder.kill()
            await holder.wait()
        await store.database.probe()


async def test_a_busy_event_loop_is_no_hanging_database() -> None:
    """While the loop is busy, the answers of a check wait too."""

    async def check() -> None:
        for _ in range(3):
            await asyncio.to_thread(time.sleep, 0.01)

    health = HealthCheck("The database", check)
    asyncio.get_running_loop().call_later(0.01, time.sleep, 2.0)
    assert await health.result() is None
