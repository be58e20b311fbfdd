"""A PostgreSQL server is killed and restarted: waiting calls are recorded, and committed calls are not doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks._stacks.kill_targets import Postgres
from polar_proxy.errors import StoreError
from polar_proxy.store import Store, group_commit, open_store
from polar_proxy.store import database as database_module
from tests.factories import assert_same, call_record, new_session

pytestmark = pytest.mark.full


@pytest.fixture
async def store(postgres_process: Postgres, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(postgres_process.url, artifacts=tmp_path / "artifacts") as opened:
        yield opened


async def test_calls_wait_for_the_server(
    postgres_process: Postgres, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls in the middle of a commit, and calls and queries that arrive while the server is down."""
    monkeypatch.setattr(database_module, "_RECONNECT_SECONDS", 240.0)
    monkeypatch.setattr(group_commit, "PATIENCE_SECONDS", 240.0)
    session_id = await new_session(store)
    calls = [call_record(session_id, messages=(b"%d" % number,), started_at=float(number)) for number in range(60)]

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.02)
        await store.calls.commit(calls[number])

    telling = [asyncio.create_task(one(number)) for number in range(len(calls))]
    await asyncio.sleep(0.3)
    postgres_process.kill()
    reading = asyncio.create_task(store.sessions.get(session_id))
    opening = asyncio.create_task(new_session(store))
    await asyncio.sleep(1.0)
    assert not reading.done()
    assert not opening.done()
    await asyncio.to_thread(postgres_process.start)
    async with asyncio.timeout(240):
        await asyncio.gather(*telling)
        assert await reading is not None
        assert await opening != session_id
    assert_same(await store.calls.of_session(session_id), calls)
    summary = await store.sessions.summary(session_id)
    assert summary is not None
    assert summary.calls == len(calls)


async def test_unconfirmed_commit_is_not_reported_as_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server commits and the connection breaks before the confirmation: the call is stored once and not lost."""
    session_id = await new_session(store)
    call = call_record(session_id)
    writing = store.database.writing
    cut = [True]

    @asynccontextmanager
    async def unconfirmed(*patience: float) -> AsyncIterator[AsyncConnection]:
        async with writing(*patience) as connection:
            yield connection
        if cut.pop() if cut else False:
            broken = DBAPIError("COMMIT", None, Exception("the connection was closed"), connection_invalidated=True)
            raise StoreError("the database refused") from broken

    monkeypatch.setattr(store.database, "writing", unconfirmed)
    await asyncio.wait_for(store.calls.commit(call), 120)
    assert cut == []
    assert_same(await store.calls.of_session(session_id), [call])


async def test_unavailable_server_is_reported(
    postgres_process: Postgres, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await new_session(store)
    postgres_process.kill()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(group_commit, "PATIENCE_SECONDS", 0.5)
            with pytest.raises(StoreError, match="cannot be reached"):
                await asyncio.wait_for(store.calls.commit(call_record(session_id)), 120)
    finally:
        await asyncio.to_thread(postgres_process.start)
    after = call_record(session_id)
    await store.calls.commit(after)  # the writer still works
    assert_same(await store.calls.of_session(session_id), [after])


async def test_a_server_that_is_away_costs_all_waiting_calls_seconds_together(
    postgres_process: Postgres, store: Store
) -> None:
    """Calls that arrive while another one waits for the server fail with it, and are known not to be stored."""
    session_id = await new_session(store)
    postgres_process.kill()
    try:
        first = store.calls.commit(call_record(session_id))
        await asyncio.sleep(1.0)
        later = [store.calls.commit(call_record(session_id)) for _ in range(300)]
        async with asyncio.timeout(8.0):
            results = await asyncio.gather(first, *later, return_exceptions=True)
    finally:
        await asyncio.to_thread(postgres_process.start)
    assert all(isinstance(result, StoreError) and "was not stored" in str(result) for result in results)
    assert await store.calls.of_session(session_id) == []
