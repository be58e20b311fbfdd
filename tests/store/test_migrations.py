"""Upgrades: a database with data gets a new revision and keeps its data. Revision 0002 exists only in the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_proxy.errors import StoreError
from polar_proxy.store import migrate, open_store
from tests.factories import assert_same, call_record, joined_trace, new_rollout, new_session

pytestmark = pytest.mark.usefixtures("created_databases")


@pytest.fixture
def newer_polar(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Turn the code into a Polar whose newest revision is 0002. `undo` returns to this Polar."""
    monkeypatch.setattr(migrate, "HEAD", "0002")
    monkeypatch.setattr(
        migrate, "VERSION_LOCATIONS", (*migrate.VERSION_LOCATIONS, str(Path(__file__).parent / "migrations"))
    )
    return monkeypatch


async def test_upgrade_keeps_all_data(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async with open_store(url, artifacts=tmp_path / "artifacts") as store:
        assert await store.schema_revision() == "0001"
        session_id = await new_session(store)
        rollout_id = await new_rollout(store, session_id)
        call = call_record(session_id)
        await store.calls.commit(call)
        trace = joined_trace([call], rollout_id=rollout_id)
        await store.traces.put([trace], {}, "merged", session_id, rollout_id)
        rollout = await store.rollouts.get(rollout_id)
    request.getfixturevalue("newer_polar")
    async with open_store(url, artifacts=tmp_path / "artifacts") as store:
        assert await store.schema_revision() == "0002"
        assert_same(await store.calls.of_session(session_id), [call])
        assert_same(await store.traces.find(session_id=session_id), [trace])
        assert await store.rollouts.get(rollout_id) == rollout
        assert await store.maintenance.verify() == []
        async with store.database.reading() as connection:
            upgraded = await connection.exec_driver_sql("SELECT session_id, example FROM sessions")
            assert [tuple(row) for row in upgraded] == [(session_id, session_id)]


async def test_reader_refuses_an_older_schema(url: str, request: pytest.FixtureRequest) -> None:
    async with open_store(url):
        pass
    request.getfixturevalue("newer_polar")
    with pytest.raises(StoreError, match=r"has the older schema 0001\. Run `polar db upgrade`"):
        async with open_store(url, create=False):
            pass


async def test_older_polar_refuses_an_upgraded_database(url: str, newer_polar: pytest.MonkeyPatch) -> None:
    async with open_store(url):
        pass
    newer_polar.undo()
    with pytest.raises(StoreError, match=r"newer Polar \(schema 0002, this one reads up to 0001\): update Polar"):
        async with open_store(url):
            pass
