"""HTTP clients for tests of the gateway, and the calls that a store recorded of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from openai import AsyncOpenAI

from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, ChatRequest
from tests.conftest import Serve
from tests.until import GUARD_SECONDS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def client(url: str, key: str = "k1") -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url + "/v1", headers={"authorization": f"Bearer {key}"}, timeout=120)


@contextlib.asynccontextmanager
async def connected_sdk(serve: Serve, engine: Engine, **settings: Any) -> AsyncIterator[AsyncOpenAI]:
    """Serve the engine, and yield the official SDK's client of the gateway."""
    async with (
        serve(engine, **settings) as gateway,
        AsyncOpenAI(base_url=gateway.url + "/v1", api_key="sk-test", max_retries=0, timeout=120) as sdk,
    ):
        yield sdk


async def new_session(store: Store, key: str, policy: dict[str, object] | None = None) -> str:
    row = await store.sessions.create(key_hash=hash_key(key), label=None, policy=policy, origin="key")
    return row.session_id


async def recorded_calls(store: Store, count: int = 0) -> list[CallRecord]:
    """Return the calls of the store's only session, once there are at least `count`."""
    async with asyncio.timeout(120):
        while sum(row.calls for row in await store.sessions.recent()) < count:
            await asyncio.sleep(0.02)
    (session,) = await store.sessions.recent()
    return list(await store.calls.of_session(session.session_id))


async def until_ready(http: httpx.AsyncClient, gateway: Gateway, status: int = 200) -> dict[str, Any]:
    """Return the answer of the gateway's /readyz once it has this status."""
    async with asyncio.timeout(GUARD_SECONDS):
        while (answer := await http.get(f"{gateway.url}/readyz")).status_code != status:
            await asyncio.sleep(0.05)
    return dict(answer.json())


async def only_call(store: Store) -> CallRecord:
    """Return the only call of the store, once it is recorded."""
    (call,) = await recorded_calls(store, count=1)
    return call


def chat_request(engine: ScriptedEngine, number: int = -1) -> ChatRequest:
    """Return a conversation that reached the engine, by default the latest."""
    request = engine.requests[number]
    assert isinstance(request, ChatRequest)
    return request


def events_of(body: str) -> list[str]:
    """Return the data of the server-sent events in a body."""
    return [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
