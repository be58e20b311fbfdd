"""A PostgreSQL server is killed and restarted: waiting calls are recorded, and committed calls are not doubled."""

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
    """Calls in the middle of a commit, and calls and queries that arrive while the server is down."""
    monkeypatch.setattr(database_module, "_RECONNECT_SECONDS", 240.0)
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


async def test_unconfirmed_commit_is_not_reported_as_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server commits and the connection breaks before the confirmation: the call is stored once and not lost."""
    session_id = await new_session(store)
    call = call_record(session_id)
    writing = store.database.writing
    cut = [True]

    @asynccontextmanager
    async def unconfirmed() -> AsyncIterator[AsyncConnection]:
        async with writing() as connection:
            yield connection
        if cut.pop() if cut else False:
            broken = DBAPIError("COMMIT", None, Exception("the connection was closed"), connection_invalidated=True)
            raise StoreError("the database refused") from broken

    monkeypatch.setattr(store.database, "writing", unconfirmed)
    await asyncio.wait_for(store.calls.commit(call), 120)
    assert cut == []
    assert_same(await store.calls.of_session(session_id), [call])


async def test_unavailable_server_is_reported(server: Postgres, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = await new_session(store)
    server.kill()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(database_module, "_RECONNECT_SECONDS", 0.5)
            with pytest.raises(StoreError, match="cannot be reached"):
                await asyncio.wait_for(store.calls.commit(call_record(session_id)), 120)
    finally:
        await asyncio.to_thread(server.start)
    after = call_record(session_id)
    await store.calls.commit(after)  # the writer still works
    assert_same(await store.calls.of_session(session_id), [after])
