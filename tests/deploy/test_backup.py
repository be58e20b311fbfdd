"""The backup and restore commands of docs/guide/operations.md, run as they are printed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks._stacks.kill_targets import Postgres
from polar_proxy.errors import UsageError
from polar_proxy.reading.sql import run_query
from polar_proxy.store import Store, open_store
from tests.docs.blocks import COMMANDS
from tests.export.recorded_runs import rollout

PAGE = "docs/guide/operations.md"


@dataclass(frozen=True)
class RecordedRun:
    rollout_id: str
    calls: int


def commands(*starts: str) -> list[str]:
    """Return the commands of the page that begin with one of these."""
    found = [one.text for one in COMMANDS if one.page == PAGE and one.text.startswith(starts)]
    assert len(found) >= len(starts)
    return found


async def record(store: Store) -> RecordedRun:
    rollout_id, calls = await rollout(store, reward=1.0)
    await store.artifacts.add(rollout_id, "agent.log", b"a log")
    return RecordedRun(rollout_id, len(calls))


async def assert_has(store: Store, run: RecordedRun) -> None:
    assert await store.maintenance.verify() == []
    row = await store.rollouts.get(run.rollout_id)
    assert row is not None
    assert (row.reward, row.calls) == (1.0, run.calls)


def shell(text: str, **variables: str) -> None:
    env = {**os.environ, **variables, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="apt-get install sqlite3")
async def test_sqlite_is_backed_up_while_a_writer_is_open_and_restored(tmp_path: Path) -> None:
    home, backup = tmp_path / "polar", tmp_path / "backup"
    home.mkdir()
    backup.mkdir()
    async with open_store(f"sqlite:///{home}/polar.db") as store:
        run = await record(store)
        for command in commands("sqlite3 ", "cp -a "):
            text = command.replace("/var/lib/polar", str(home)).replace("/backup", str(backup))
            await asyncio.to_thread(shell, text)
        await rollout(store, reward=0.0)  # after the backup
    shutil.rmtree(home)
    shutil.copytree(backup, home)
    (verify,) = commands("polar db verify")
    await asyncio.to_thread(shell, verify, POLAR_HOME=str(home), POLAR_DB=str(home / "polar.db"))
    async with open_store(f"sqlite:///{home}/polar.db", create=False) as restored:
        await assert_has(restored, run)
        assert len(await restored.rollouts.find()) == 1
        assert (await restored.artifacts.of_rollout(run.rollout_id))[0].path.read_bytes() == b"a log"


@pytest.mark.full
async def test_postgresql_is_backed_up_restored_and_read_by_sql(postgres_process: Postgres, tmp_path: Path) -> None:
    async with open_store(postgres_process.url, artifacts=tmp_path / "artifacts") as store:
        run = await record(store)
        found = await run_query(store, "SELECT status, reward FROM v_rollouts", limit=9, seconds=9)
        assert found.rows == [("done", 1.0)]
        for statement, message in (
            ("DELETE FROM calls", "only reads"),
            ("WITH x AS (DELETE FROM traces RETURNING 1) SELECT * FROM x", "read-only transaction"),
            ("SELECT messages('call_1')", "cannot unpack"),
            ("SELECT * FROM v_tokens", "cannot unpack"),
            ("SELECT pg_sleep(5)", "statement timeout"),
        ):
            with pytest.raises(UsageError, match=message):
                await run_query(store, statement, limit=9, seconds=0.5)
    port = str(urlsplit(postgres_process.url).port)
    variables = {"PGHOST": "127.0.0.1", "PGPORT": port, "PGUSER": "postgres"}
    for command in commands("pg_dump ", "createdb ", "pg_restore "):
        await asyncio.to_thread(shell, command.replace("/backup", str(tmp_path)), **variables)
    url = re.sub(r"/polar$", "/restored", postgres_process.url)
    async with open_store(url, create=False, artifacts=tmp_path / "artifacts") as restored:
        await assert_has(restored, run)
