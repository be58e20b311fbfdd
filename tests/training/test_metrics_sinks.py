"""The metrics of a run are in the store, or at the server of its feed, exactly as in its file."""

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
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store, open_store
from polar_proxy.training import metrics
from polar_proxy.training.feed import HttpSink
from polar_proxy.training.metrics import MetricsLog, StoreSink
from tests.training.bandit import CONFIG, opened, trainer
from tests.training.test_resume import Killed, kill_at

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SMALL = CONFIG.model_copy(update={"samples": 2, "steps": 3})


@pytest.mark.parametrize("point", ["leased", "trained", "saved", "synced"])
async def test_store_has_the_lines_of_the_file_after_a_kill(tmp_path: Path, model: Path, point: str) -> None:
    """The run is killed in its second step and resumed; the lines of the lost step disappear."""
    async with opened(tmp_path, model) as (store, engine):
        sink = StoreSink(store, "run_1", "run", SMALL.to_json())
        with pytest.raises(Killed):
            await trainer(tmp_path, model, store, engine, SMALL, on_point=kill_at(point, 2), sink=sink).train()
        before = await store.training.lines("run_1")
        assert [one["kind"] for one in before[:2]] == ["start", "sync"]
        await trainer(tmp_path, model, store, engine, SMALL, sink=sink).train()
        lines = await store.training.lines("run_1")
        assert lines == list(metrics.read_lines(tmp_path / "run"))
        assert [one["step"] for one in lines if one["kind"] == "step"] == [1, 2, 3]
        (run,) = await store.training.runs()
        assert (run.step, run.config["samples"]) == (3, 2)


class FlakyTransport(httpx.AsyncBaseTransport):
    """A connection to a server that can be cut."""

    def __init__(self, application: Any) -> None:
        self._inner = httpx.ASGITransport(application)
        self.cut = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.cut:
            raise httpx.ConnectError("cut", request=request)
        return await self._inner.handle_async_request(request)


@asynccontextmanager
async def connected(store: Store) -> AsyncIterator[tuple[FlakyTransport, AsyncClient]]:
    key = new_api_key("trainer")
    await store.api_keys.add(hash_key(key), "trainer")
    transport = FlakyTransport(create_api(store, settings=Settings()))
    async with AsyncClient("http://server", key, tries=1, transport=transport) as client:
        yield transport, client


async def test_server_gets_missed_lines_after_an_outage(tmp_path: Path) -> None:
    reported: list[str] = []
    async with open_store(f"sqlite:///{tmp_path}/polar.db") as store, connected(store) as (transport, client):
        with MetricsLog(tmp_path / "run", HttpSink(client, "run_1", "run", {}, reported.append)) as log:
            for step in range(8):
                transport.cut = step in (0, 3, 4)
                if step == 6:  # the server now has another database
                    await store.training.put_run("run_1", "other", {}, [])
                log.write("step", step, {"reward": float("nan")})
                log.write("sync", step, {"largest": 1e-6 * step})
                await log.publish()
                await log.publish()
                if not transport.cut and step != 6:
                    assert await store.training.lines("run_1") == list(metrics.read_lines(tmp_path / "run"))
        assert await store.training.lines("run_1") == list(metrics.read_lines(tmp_path / "run"))
    assert reported == []


async def test_unsupported_server_is_reported_once(tmp_path: Path) -> None:
    reported: list[str] = []

    def older(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"error": {"code": "not_found", "message": "no", "detail": None}})

    async with AsyncClient("http://server", "key", tries=1, transport=httpx.MockTransport(older)) as client:
        with MetricsLog(tmp_path / "run", HttpSink(client, "run_1", "run", {}, reported.append)) as log:
            for step in range(3):
                log.write("step", step, {})
                await log.publish()
    assert reported == ["the server does not store training runs: their curves are in the run's folder only"]
    assert len(list(metrics.read_lines(tmp_path / "run"))) == 3
