"""What a run says of itself stands in the store, and at the server of its feed, as it does in its file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar_proxy.api import create_api, new_api_key
from polar_proxy.client import AsyncClient
from polar_proxy.config import Settings
from polar_proxy.sessions import hash_key
from polar_proxy.store import Store, open_store
from polar_proxy.training import metrics
from polar_proxy.training.metrics import MetricsLog, StoreSink
from polar_proxy.training.remote import HttpSink
from tests.training.bandit import CONFIG, opened, trainer
from tests.training.test_resume import Killed, killer

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = CONFIG.model_copy(update={"samples": 2, "steps": 3})


@pytest.mark.parametrize("point", ["leased", "trained", "saved", "synced"])
async def test_the_store_has_the_lines_of_the_file(tmp_path: Path, model: Path, point: str) -> None:
    """Killed in its second step, and taken up: of what the kill took back nothing is left."""
    async with opened(tmp_path, model) as (store, engine):
        published = StoreSink(store, "run_1", "run", SMALL.to_json())
        with pytest.raises(Killed):
            await trainer(tmp_path, model, store, engine, SMALL, on_point=killer(point, 2), sink=published).train()
        before = await store.training.lines("run_1")
        assert [one["kind"] for one in before[:2]] == ["start", "sync"]
        await trainer(tmp_path, model, store, engine, SMALL, sink=published).train()
        lines = await store.training.lines("run_1")
        assert lines == list(metrics.read_lines(tmp_path / "run"))
        assert [one["step"] for one in lines if one["kind"] == "step"] == [1, 2, 3]
        (run,) = await store.training.runs()
        assert (run.step, run.config["samples"]) == (3, 2)


class Flaky(httpx.AsyncBaseTransport):
    """The way to a server, which may be cut."""

    def __init__(self, application: Any) -> None:
        self._inner = httpx.ASGITransport(application)
        self.cut = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.cut:
            raise httpx.ConnectError("away", request=request)
        return await self._inner.handle_async_request(request)


@asynccontextmanager
async def reached(store: Store) -> AsyncIterator[tuple[Flaky, AsyncClient]]:
    key = new_api_key("trainer")
    await store.api_keys.add(hash_key(key), "trainer")
    way = Flaky(create_api(store, settings=Settings()))
    async with AsyncClient("http://server", key, tries=1, transport=way) as client:
        yield way, client


async def test_a_server_that_was_away_gets_what_it_missed(tmp_path: Path) -> None:
    said: list[str] = []
    async with open_store(f"sqlite:///{tmp_path}/polar.db") as store, reached(store) as (way, client):
        with MetricsLog(tmp_path / "run", HttpSink(client, "run_1", "run", {}, said.append)) as written:
            for step in range(8):
                way.cut = step in (0, 3, 4)
                if step == 6:  # another database stands behind the server
                    await store.training.put_run("run_1", "other", {}, [])
                written.write("step", step, {"reward": float("nan")})
                written.write("sync", step, {"largest": 1e-6 * step})
                await written.publish()
                await written.publish()
                if not way.cut and step != 6:
                    assert await store.training.lines("run_1") == list(metrics.read_lines(tmp_path / "run"))
        assert await store.training.lines("run_1") == list(metrics.read_lines(tmp_path / "run"))
    assert said == []


async def test_a_server_that_is_too_old_is_told_of_once(tmp_path: Path) -> None:
    said: list[str] = []

    def older(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"error": {"code": "not_found", "message": "no", "detail": None}})

    async with AsyncClient("http://server", "key", tries=1, transport=httpx.MockTransport(older)) as client:
        with MetricsLog(tmp_path / "run", HttpSink(client, "run_1", "run", {}, said.append)) as written:
            for step in range(3):
                written.write("step", step, {})
                await written.publish()
    assert said == ["the server does not store training runs: their curves are in the run's folder only"]
    assert len(list(metrics.read_lines(tmp_path / "run"))) == 3
