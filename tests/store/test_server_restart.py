"""A PostgreSQL server that is killed and started again: what waited is recorded, what was committed is not doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks._stacks.kill_targets import Postgres
from benchmarks._stacks.stacks import StackError
from polar_proxy.errors import StoreError
from polar_proxy.store import Store, open_store
from polar_proxy.store import database as database_module
from tests.factories import assert_same, call_record, new_session

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    try:
        made = Postgres()
    except StackError as error:
        pytest.skip(str(error))
    yield made
    made.stop()


@pytest.fixture
async def store(server: Postgres, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(server.url, artifacts=tmp_path / "artifacts") as opened:
        yield opened


async def test_calls_wait_for_the_server(server: Postgres, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in the middle of a commit and those that come while it is away, with all that reads and writes besides."""
    monkeypatch.setattr(database_module, "_AWAY_SECONDS", 240.0)
    session_id = await new_session(store)
    calls = [call_record(session_id, messages=(b"%d" % number,), started_at=float(number)) for number in range(60)]

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.02)
        await store.calls.commit(calls[number])

    telling = [asyncio.create_task(one(number)) for number in range(len(calls))]
    await asyncio.sleep(0.3)
    server.kill()
    reading = asyncio.create_task(store.sessions.get(session_id))
    opening = asyncio.create_task(new_session(store))
    await asyncio.sleep(1.0)
    assert not reading.done()
    assert not opening.done()
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(240):
        await asyncio.gather(*telling)
        assert await reading is not None
        assert await opening != session_id
    assert_same(await store.calls.of_session(session_id), calls)
    summary = await store.sessions.summary(session_id)
    assert summary is not None
    assert summary.calls == len(calls)


async def test_a_commit_whose_end_was_not_heard(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server commits and its connection breaks before it says so: the call is there once, and not called lost."""
    session_id = await new_session(store)
    call = call_record(session_id)
    writing = store.database.writing
    cut = [True]

    @asynccontextmanager
    async def deaf() -> AsyncIterator[AsyncConnection]:
        async with writing() as connection:
            yield connection
        if cut.pop() if cut else False:
            broken = DBAPIError("COMMIT", None, Exception("the connection was closed"), connection_invalidated=True)
            raise StoreError("the database refused") from broken

    monkeypatch.setattr(store.database, "writing", deaf)
    await asyncio.wait_for(store.calls.commit(call), 120)
    assert cut == []
    assert_same(await store.calls.of_session(session_id), [call])


async def test_a_server_that_stays_away_is_said_to_be(
    server: Postgres, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await new_session(store)
    server.kill()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(database_module, "_AWAY_SECONDS", 0.5)
            with pytest.raises(StoreError, match="cannot be reached"):
                await asyncio.wait_for(store.calls.commit(call_record(session_id)), 120)
    finally:
        await asyncio.to_thread(server.start)
    after = call_record(session_id)
    await store.calls.commit(after)  # the writer is as before
    assert_same(await store.calls.of_session(session_id), [after])
