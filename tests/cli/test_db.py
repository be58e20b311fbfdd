"""`polar db verify|prune|vacuum|export|import`: exit codes, JSON, and errors that a person can act on."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from polar_proxy.cli.app import app
from polar_proxy.cli.db import parse_age
from polar_proxy.errors import UsageError
from polar_proxy.store import open_store
from tests.factories import call_record, new_session

pytestmark = pytest.mark.usefixtures("polar_home")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with open_store(str(tmp_path / "polar.db")) as store:
            for number in range(2):
                session_id = await new_session(store)
                await store.calls.commit(call_record(session_id, messages=(b"%d" % number,), ended_at=5.0))
                await store.sessions.close(session_id)

    asyncio.run(fill())
    return tmp_path / "polar.db"


def _json(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["db", *arguments, "--json"])
    assert done.exit_code == code, done.output
    return orjson.loads(done.stdout)


def test_there_and_away_and_back(db: Path, tmp_path: Path) -> None:
    at, file = ("--db", str(db)), str(tmp_path / "all.polar")
    assert _json("verify", *at) == {"faults": []}
    assert _json("export", file, *at)["rows"]["calls"] == 2
    assert _json("prune", "--older-than", "30d", "--dry-run", *at)["calls"] == 2
    assert _json("stats", *at)["rows"]["calls"] == 2
    assert len(_json("prune", "--older-than", "30d", *at)["sessions"]) == 2
    assert _json("vacuum", *at)["nodes"] == 4
    assert _json("import", file, *at)["rows"]["calls"] == 2
    assert _json("import", file, *at)["rows"] == {}
    assert _json("verify", *at) == {"faults": []}


def test_a_fault_is_named_and_the_exit_code_is_1(db: Path) -> None:
    with sqlite3.connect(db) as connection:
        connection.execute("UPDATE sessions SET calls = 7")
    connection.close()
    found = _json("verify", "--db", str(db), code=1)["faults"]
    assert len(found) == 2
    assert found[0]["what"].startswith("sessions sess_")
    assert "calls says 7" in found[0]["problem"]


def test_ages() -> None:
    assert (parse_age("30d"), parse_age("1.5h"), parse_age("2w"), parse_age("0s")) == (2_592_000, 5400, 1_209_600, 0)
    for text in ("30", "d", "-1d", "a week"):
        with pytest.raises(UsageError, match="not an age"):
            parse_age(text)
