"""`polar sql` reads, unpacks texts and tokens, and changes nothing."""

from __future__ import annotations

import asyncio
import csv
import io
import sqlite3
from pathlib import Path

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.reading.sql import QueryResult, run_query
from polar_proxy.store import open_store
from tests.cli.runner import polar, polar_error, polar_json, polar_ok
from tests.factories import new_session
from tests.reading.conftest import Recorded

WRITES = (
    "DELETE FROM calls",
    "WITH x AS (SELECT 1) DELETE FROM calls",
    "UPDATE rollouts SET reward = 1",
    "INSERT INTO fleet (fleet_id) VALUES (2)",
    "CREATE TABLE t (a)",
    "DROP VIEW v_calls",
    "ATTACH DATABASE '/tmp/other.db' AS other",
    "PRAGMA journal_mode = DELETE",
    "VACUUM INTO '/tmp/copy.db'",
    "SELECT 1; DELETE FROM calls",
    "SELECT load_extension('x')",
    "/* SELECT */ DELETE FROM calls",
)


def query(recorded: Recorded, sql: str, *, limit: int = 1000, seconds: float = 30) -> QueryResult:
    async def run() -> QueryResult:
        async with open_store(recorded.url, create=False) as store:
            return await run_query(store, sql, limit=limit, seconds=seconds)

    return asyncio.run(run())


def test_views_unpack_messages_answers_and_tokens(recorded: Recorded) -> None:
    first, second = recorded.calls[:2]
    rows = query(recorded, f"SELECT role, text, is_new FROM v_messages WHERE call_id = '{second.call_id}'").rows
    assert [row[:2] for row in rows] == [("user", "turn 0"), ("assistant", "11 2"), ("user", "turn 2")]
    text = query(recorded, f"SELECT text, tokens FROM v_answers WHERE call_id = '{first.call_id}'").rows
    assert text == [("11 2", 2)]
    tokens = query(recorded, f"SELECT token_id, logprob FROM v_tokens WHERE call_id = '{second.call_id}'").rows
    answer = second.choices[0]
    assert [row[0] for row in tokens] == answer.token_ids.tolist()
    assert [row[1] for row in tokens] == pytest.approx(answer.logprobs.tolist())
    (ids,) = query(recorded, f"SELECT prompt_ids('{first.call_id}'), messages('call_none')").rows
    assert first.prompt_ids is not None
    assert ids == (str(first.prompt_ids.tolist()), None)


@pytest.mark.parametrize("statement", WRITES)
def test_refuses_everything_but_reading(recorded: Recorded, statement: str) -> None:
    path = Path(recorded.url.removeprefix("sqlite:///"))
    with pytest.raises(UsageError, match=r"only reads|refused the query"):
        query(recorded, statement)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM calls").fetchone() == (12,)


def test_a_long_query_is_stopped(recorded: Recorded) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    with pytest.raises(UsageError, match=r"longer than 0\.2 s"):
        query(recorded, endless, seconds=0.2)


def test_rows_beyond_the_limit_are_counted_as_more(recorded: Recorded) -> None:
    found = query(recorded, "SELECT call_id FROM calls", limit=5)
    assert (len(found.rows), found.more) == (5, True)


def test_formats_and_errors_of_the_command(polar_home: Path) -> None:
    polar_home.mkdir()

    async def make() -> None:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            await new_session(store, label="a,b \x1b[2J")

    asyncio.run(make())
    statement = "SELECT label, calls, key_hash FROM sessions"
    assert polar_json("sql", statement) == [{"label": "a,b \x1b[2J", "calls": 0, "key_hash": None}]
    rows = list(csv.reader(io.StringIO(polar_ok("sql", statement, "--format", "csv"))))
    assert rows == [["label", "calls", "key_hash"], ["a,b \\x1b[2J", "0", ""]]
    shown = polar_ok("sql", statement)
    assert "a,b \\x1b[2J" in shown
    assert "\x1b" not in shown
    assert "only reads" in polar_error("sql", "DROP TABLE calls")
    assert "no such table: no_such" in polar_error("sql", "SELECT * FROM no_such")
    assert "no format 'xml'" in polar_error("sql", "SELECT 1", "--format", "xml")
    assert "first 1 rows" in polar("sql", "VALUES (1), (2)", "--limit", "1").stderr
