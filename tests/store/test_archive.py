"""Archives: the same rows in another database, no keys, and nothing overwritten."""

from __future__ import annotations

import os
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import Store, open_store, schema
from polar_proxy.store.maintenance.archive import CLEARED_COLUMNS, NOT_EXPORTED
from polar_proxy.store.schema import VERSION_TABLE
from tests.factories import assert_same, call_record, joined_trace, new_rollout, new_session

pytestmark = pytest.mark.slow

_KEY = bytes(range(32))


async def _filled(store: Store, label: str, reward: float = 1.0) -> tuple[str, str]:
    session_id = await new_session(store, label=label, key_hash=os.urandom(32))
    rollout_id = await new_rollout(store, session_id)
    call = call_record(session_id, messages=(b"shared", label.encode()), params={"label": label})
    await store.calls.commit(call)
    later = call_record(session_id, messages=(b"", b"", b""), started_at=call.started_at + 1, choices=())
    await store.calls.commit(later)
    trace = joined_trace([call], rollout_id=rollout_id)
    await store.traces.put([trace], {later.call_id: "no_tokens"}, "merged", session_id, rollout_id)
    await store.rewards.add(rollout_id, reward, "tests", {"passed": 1})
    await store.artifacts.add(rollout_id, "patch.diff", label.encode())
    await store.rollouts.update(rollout_id, status="done")
    return rollout_id, session_id


async def _content(store: Store) -> dict[str, list[Any]]:
    """Return all rows that archives carry over."""
    found: dict[str, list[Any]] = {}
    async with store.database.reading() as connection:
        for table in schema.metadata.sorted_tables:
            if table.name in NOT_EXPORTED:
                continue
            left_out = {"event_id", *CLEARED_COLUMNS.get(table.name, {})}
            columns = [column for column in table.columns if column.name not in left_out]
            rows = [tuple(row) for row in await connection.execute(select(*columns))]
            found[table.name] = sorted(rows, key=repr)
    return found


@pytest.fixture
def other_url(tmp_path: Path) -> str:
    return str(tmp_path / "other" / "polar.db")


async def test_round_trip_and_repeated_import(store: Store, other_url: str, tmp_path: Path) -> None:
    for label in ("one", "two"):
        await _filled(store, label)
    file, again = tmp_path / "all.polar", tmp_path / "again.polar"
    moved = await store.archive.export_archive(file)
    assert (moved.rows["calls"], moved.files) == (4, 2)
    async with open_store(other_url) as other:
        imported = await other.archive.import_archive(file)
        assert (imported.rows, imported.files, imported.known) == (moved.rows, 2, 0)
        assert await _content(other) == await _content(store)
        assert await other.maintenance.verify() == []
        for session in await store.sessions.recent():
            assert_same(
                await other.calls.of_session(session.session_id), await store.calls.of_session(session.session_id)
            )
            assert_same(
                await other.traces.find(session_id=session.session_id),
                await store.traces.find(session_id=session.session_id),
            )
        once_more = await other.archive.import_archive(file)
        assert once_more.rows == {}
        assert once_more.known == sum(moved.rows.values())
        await other.archive.export_archive(again)
    # Into the database that it came from (on PostgreSQL: from an SQLite file into the server).
    assert (await store.archive.import_archive(again)).rows == {}


async def test_import_into_an_empty_database_of_the_other_kind(url: str, other_url: str, tmp_path: Path) -> None:
    file = tmp_path / "file.polar"
    async with open_store(other_url) as made:
        rollout_id, session_id = await _filled(made, "one")
        await made.archive.export_archive(file)
        async with open_store(url, artifacts=tmp_path / "artifacts") as store:
            await store.archive.import_archive(file)
            assert await _content(store) == await _content(made)
            assert await store.maintenance.verify() == []
            assert_same(await store.calls.of_session(session_id), await made.calls.of_session(session_id))
            (artifact,) = await store.artifacts.of_rollout(rollout_id)
            assert artifact.path.read_bytes() == b"one"


async def test_selection_contains_exactly_what_it_refers_to(store: Store, other_url: str, tmp_path: Path) -> None:
    good, good_session = await _filled(store, "good", 1.0)
    bad, bad_session = await _filled(store, "bad", 0.0)
    alone = await new_session(store)
    await store.calls.commit(call_record(alone))
    await store.archive.export_archive(tmp_path / "good.polar", where="reward>=1")
    async with open_store(other_url) as other:
        await other.archive.import_archive(tmp_path / "good.polar")
        assert [row.rollout_id for row in await other.rollouts.find()] == [good]
        assert [row.session_id for row in await other.sessions.recent()] == [good_session]
        assert await other.maintenance.verify() == []
        await store.archive.export_archive(tmp_path / "more.polar", sessions=[bad_session, alone])
        await other.archive.import_archive(tmp_path / "more.polar")
        assert {row.rollout_id for row in await other.rollouts.find()} == {good, bad}
        assert await _content(other) == await _content(store)
    with pytest.raises(UsageError, match="no session"):
        await store.archive.export_archive(tmp_path / "none.polar", sessions=["sess_unknown"])
    with pytest.raises(UsageError, match="exists already"):
        await store.archive.export_archive(tmp_path / "more.polar")


async def test_import_into_a_folder_whose_name_has_special_characters(store: Store, tmp_path: Path) -> None:
    rollout_id, _ = await _filled(store, "one")
    await store.archive.export_archive(tmp_path / "file.polar")
    async with open_store(str(tmp_path / "C# 50%41" / "polar.db")) as other:
        await other.archive.import_archive(tmp_path / "file.polar")
        assert [row.rollout_id for row in await other.rollouts.find()] == [rollout_id]


async def test_archive_contains_no_keys(store: Store, tmp_path: Path) -> None:
    session_id = await new_session(store, key_hash=_KEY)
    await store.calls.commit(call_record(session_id))
    file = tmp_path / "all.polar"
    await store.archive.export_archive(file)
    with zipfile.ZipFile(file) as archive:
        archive.extract("polar.db", tmp_path / "out")
    assert _KEY not in (tmp_path / "out" / "polar.db").read_bytes()
    assert file.stat().st_mode & 0o077 == 0
    found = await store.sessions.by_key(_KEY)
    assert found is not None
    await store.archive.import_archive(file)  # the stored key stays
    assert await store.sessions.by_key(_KEY) == found


async def test_different_rows_are_not_overwritten(store: Store, other_url: str, tmp_path: Path) -> None:
    await _filled(store, "one")
    file = tmp_path / "all.polar"
    await store.archive.export_archive(file)
    async with open_store(other_url) as other:
        await other.archive.import_archive(file)
        async with other.database.writing() as connection:
            await connection.execute(update(schema.rewards).values(value=0.25))
        await _filled(store, "two")
        await store.archive.export_archive(file, overwrite=True)
        before = await _content(other)
        with pytest.raises(
            StoreError, match=r"Nothing was imported: rewards rew_\w+ is stored already with another value"
        ):
            await other.archive.import_archive(file)
        assert await _content(other) == before


async def test_refuses_newer_schemas_and_other_files(store: Store, other_url: str, tmp_path: Path) -> None:
    await _filled(store, "one")
    file = tmp_path / "all.polar"
    await store.archive.export_archive(file)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "out")
    with sqlite3.connect(tmp_path / "out" / "polar.db") as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    newer = tmp_path / "newer.polar"
    with zipfile.ZipFile(newer, "w") as archive:
        archive.write(tmp_path / "out" / "polar.db", "polar.db")
    async with open_store(other_url) as other:
        with pytest.raises(StoreError, match="newer Polar"):
            await other.archive.import_archive(newer)
        with pytest.raises(UsageError, match="no file"):
            await other.archive.import_archive(tmp_path / "none.polar")
        (tmp_path / "text.polar").write_text("not a zip")
        with pytest.raises(StoreError, match="cannot be read as an archive"):
            await other.archive.import_archive(tmp_path / "text.polar")
        assert (await other.maintenance.stats())["rows"]["sessions"] == 0


async def test_refuses_damaged_archives_before_writing(store: Store, other_url: str, tmp_path: Path) -> None:
    await _filled(store, "one")
    file, lacking, changed = tmp_path / "all.polar", tmp_path / "lacking.polar", tmp_path / "changed.polar"
    await store.archive.export_archive(file)
    with zipfile.ZipFile(file) as archive:
        (artifact,) = (name for name in archive.namelist() if name != "polar.db")
        database = archive.read("polar.db")
    for damaged, content in ((lacking, None), (changed, b"another")):
        with zipfile.ZipFile(damaged, "w") as archive:
            archive.writestr("polar.db", database)
            if content is not None:
                archive.writestr(artifact, content)
    async with open_store(other_url) as other:
        for damaged, match in ((lacking, "is missing from it"), (changed, "does not match its name")):
            with pytest.raises(StoreError, match=match):
                await other.archive.import_archive(damaged)
        assert (await other.maintenance.stats())["rows"]["sessions"] == 0
