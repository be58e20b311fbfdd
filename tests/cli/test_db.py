"""`polar db`: path, upgrade, verify, prune, vacuum, export and import."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.cli.admin import parse_age
from polar_proxy.errors import UsageError
from polar_proxy.store import open_store
from tests.cli.runner import polar_json, polar_ok
from tests.export.recorded_runs import rollout
from tests.factories import call_record, new_session

pytestmark = pytest.mark.slow


@pytest.fixture
def database(polar_home: Path) -> Path:
    """A database with two sessions of one call each, which ended long ago."""

    async def fill() -> None:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            for number in range(2):
                session_id = await new_session(store)
                await store.calls.commit(call_record(session_id, messages=(b"%d" % number,), ended_at=5.0))
                await store.sessions.close(session_id)

    asyncio.run(fill())
    return polar_home / "polar.db"


def db(*arguments: str, exit_code: int = 0) -> Any:
    return polar_json("db", *arguments, exit_code=exit_code)


def test_upgrade_creates_the_database(polar_home: Path) -> None:
    path = db("path")["db"]
    assert path.endswith("/polar-home/polar.db")
    created = db("upgrade")
    assert created["db"] == path
    assert created["revision"]
    assert db("stats")
    assert polar_json("sessions") == {"sessions": []}


def test_pruned_data_comes_back_from_an_archive(database: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "all.polar")
    assert db("verify") == {"faults": []}
    assert db("export", file)["rows"]["calls"] == 2
    assert db("prune", "--older-than", "30d", "--dry-run")["calls"] == 2
    assert db("stats")["rows"]["calls"] == 2
    assert len(db("prune", "--older-than", "30d")["sessions"]) == 2
    assert db("vacuum")["nodes"] == 4
    assert db("import", file)["rows"]["calls"] == 2
    assert db("import", file)["rows"] == {}
    assert db("verify") == {"faults": []}


def test_unmatched_conditions_list_existing_values(polar_home: Path) -> None:
    async def fill() -> None:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            await rollout(store, reward=0.5)

    asyncio.run(fill())
    unknown = db("prune", "--older-than", "0s", "--where", "harness=codex")
    assert unknown["rollouts"] == []
    assert "Values of harness: mini-swe-agent (1)." in unknown["note"]
    young = db("prune", "--older-than", "30d", "--where", "reward>0", "--dry-run")
    assert (young["rollouts"], "none of them ended more than 30d ago" in young["note"]) == ([], True)
    assert "No rollout matches" in polar_ok("db", "prune", "--older-than", "0s", "--where", "reward>1")


def test_verify_names_a_wrong_counter(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE sessions SET calls = 7")
    connection.close()
    faults = db("verify", exit_code=1)["faults"]
    assert len(faults) == 2
    assert faults[0]["what"].startswith("sessions sess_")
    assert "calls is 7" in faults[0]["problem"]


def test_parses_ages() -> None:
    assert (parse_age("30d"), parse_age("1.5h"), parse_age("2w"), parse_age("0s")) == (2_592_000, 5400, 1_209_600, 0)
    for text in ("30", "d", "-1d", "a week"):
        with pytest.raises(UsageError, match="not an age"):
            parse_age(text)
