"""The stream of changes that an open page follows, on each database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar_proxy.api import ApiContext
from polar_proxy.config import Settings
from polar_proxy.errors import ApiError
from polar_proxy.store import Store
from polar_proxy.store.repositories.changes import ChangeRepository, Followed
from polar_proxy.view import changes
from polar_proxy.view.changes import MOST_STREAMS, ChangeStreams
from tests.factories import call_record, new_session

CHANGE = b"event: change\ndata: .\n\n"


@pytest.fixture(autouse=True)
def quick_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "READ_SECONDS", 0.02)


@pytest.fixture
def api(store: Store, tmp_path: Path) -> ApiContext:
    return ApiContext(store, Settings(home=tmp_path))


def follow(api: ApiContext, followed: Followed, record_id: str = "", streams: ChangeStreams | None = None) -> Any:
    return aiter((streams or ChangeStreams()).respond(api, followed, record_id).body_iterator)


async def next_change(stream: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(60):
        return await anext(stream)


async def test_a_page_gets_an_event_at_once_and_after_each_change(store: Store, api: ApiContext) -> None:
    session_id = await new_session(store)
    stream = follow(api, "session", session_id)
    assert await next_change(stream) == CHANGE
    for _ in range(2):
        await store.calls.commit(call_record(session_id))
        assert await next_change(stream) == CHANGE


async def test_pages_of_the_same_records_share_a_reading(
    store: Store, api: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = 0
    read = ChangeRepository.state

    async def counted(self: ChangeRepository, followed: Followed, record_id: str) -> int:
        nonlocal readings
        readings += 1
        return await read(self, followed, record_id)

    monkeypatch.setattr(ChangeRepository, "state", counted)
    streams = ChangeStreams()
    pages = [follow(api, "lists", streams=streams) for _ in range(50)]
    started = time.monotonic()
    await asyncio.gather(*map(next_change, pages))
    await new_session(store)
    await asyncio.gather(*map(next_change, pages))
    assert readings <= 2 + (time.monotonic() - started) / changes.READ_SECONDS * 2


async def test_a_page_that_closes_leaves_the_others_following(store: Store, api: ApiContext) -> None:
    streams = ChangeStreams()
    first, second = (follow(api, "lists", streams=streams) for _ in range(2))
    await asyncio.gather(next_change(first), next_change(second))
    leaving, staying = (asyncio.create_task(next_change(page)) for page in (first, second))
    await asyncio.sleep(0)
    leaving.cancel()
    await new_session(store)
    assert await staying == CHANGE


async def test_further_streams_are_refused_until_one_ends(api: ApiContext, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_STREAMS > 50
    monkeypatch.setattr(changes, "MOST_STREAMS", 1)
    streams = ChangeStreams()
    first = follow(api, "lists", streams=streams)
    await next_change(first)
    with pytest.raises(ApiError, match="asks for changes every few seconds") as refused:
        follow(api, "lists", streams=streams)
    assert refused.value.status == 503
    await first.aclose()
    await next_change(follow(api, "lists", streams=streams))


async def test_an_idle_stream_sends_comments(api: ApiContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "HEARTBEAT_SECONDS", 0.0)
    stream = follow(api, "lists")
    await next_change(stream)
    assert await next_change(stream) == b":\n\n"


async def test_streams_end_when_the_server_stops(api: ApiContext) -> None:
    stream = follow(api, "lists")
    await next_change(stream)
    api.closing.set()
    with pytest.raises(StopAsyncIteration):
        await next_change(stream)


async def test_unknown_records_are_refused(pages: httpx.AsyncClient) -> None:
    assert (await pages.get("/view/changes/secrets")).status_code == 422
