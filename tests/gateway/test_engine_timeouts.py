"""An engine that hangs: its calls end with 504 and are recorded as failed, and /readyz says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.gateway import engine_timeouts, recording
from polar_proxy.store import Store
from polar_proxy.types import SampleEvent
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client, events_of
from tests.gateway.random_bodies import ROUTES

pytestmark = pytest.mark.slow

RECORDED = [name for name, route in ROUTES.items() if route.recorded]
QUICK = {"first_token_seconds": 0.5, "next_token_seconds": 0.2}


class HangingEngine(ScriptedEngine):
    """Sends the first `events` of each answer, then nothing more, while `hangs`."""

    events = 0
    hangs = True
    hangs_everywhere = False
    """It answers no other request either."""

    async def sample(self, *args: Any, **given: Any) -> AsyncGenerator[SampleEvent, None]:
        sent = 0
        async for event in super().sample(*args, **given):
            if self.hangs and sent >= self.events:
                await asyncio.Event().wait()
            sent += 1
            yield event

    async def weight_version(self) -> str | None:
        if self.hangs and self.hangs_everywhere:
            await asyncio.Event().wait()
        return await super().weight_version()


@pytest.mark.parametrize("name", RECORDED)
async def test_a_hanging_engine_is_an_error_504_in_the_dialects_form(serve: Serve, store: Store, name: str) -> None:
    route = ROUTES[name]
    body = {key: route.right[key] for key in route.plain}
    async with (
        serve(HangingEngine(), **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
    ):
        answer = await http.post(route.path, json=body)
    assert answer.status_code == 504
    assert route.is_error(answer.json(), 504)
    assert "sent nothing for 0.5 s" in answer.text
    (session,) = await store.sessions.recent()
    calls = await store.calls.of_session(session.session_id)
    assert {(call.status, call.http_status) for call in calls} == {("upstream_error", 504)}


async def test_a_stream_that_stops_ends_with_an_error_and_keeps_its_tokens(serve: Serve, store: Store) -> None:
    engine = HangingEngine(lambda request: "a long answer " * 20)
    engine.events = 4
    async with serve(engine, **QUICK) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={**CHAT, "stream": True})
    assert answer.status_code == 200
    assert "error" in events_of(answer.text)[-1]
    (session,) = await store.sessions.recent()
    (call,) = await store.calls.of_session(session.session_id)
    assert (call.status, call.http_status) == ("upstream_error", 504)
    assert 0 < len(call.choices[0].token_ids) == len(call.choices[0].logprobs) < 280
    assert "sent nothing for 0.2 s" in str(call.error)


async def test_readyz_says_that_the_engine_hangs_until_a_token_comes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HangingEngine()
    async with serve(engine, **QUICK) as gateway, client(gateway.url) as http:
        assert (await http.get(f"{gateway.url}/readyz")).status_code == 200
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 504
        answer = await http.get(f"{gateway.url}/readyz")
        assert answer.status_code == 503
        assert "sent nothing for 0.5 s" in answer.json()["sample"]["reason"]
        engine.hangs = False
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        assert (await http.get(f"{gateway.url}/readyz")).status_code == 200
        # Without calls, nothing else shows that the engine works again.
        engine.hangs = True
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 504
        monkeypatch.setattr(engine_timeouts, "REPORTED_SECONDS", 0.0)
        assert (await http.get(f"{gateway.url}/readyz")).status_code == 200


async def test_an_engine_that_answers_nothing_at_all(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy version is asked for before and after sampling; the token count by clients."""
    monkeypatch.setattr(recording, "_VERSION_SECONDS", 0.1)
    engine = HangingEngine()
    engine.hangs_everywhere = True

    async def count_tokens(request: object) -> int:
        await asyncio.Event().wait()
        return 0

    engine.count_tokens = count_tokens  # type: ignore[method-assign]
    async with serve(engine, **QUICK) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 504
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post("/v1/messages/count_tokens", json=body)).status_code == 504


async def test_a_slow_engine_and_a_slow_reader_are_no_time_out(serve: Serve) -> None:
    """Each token is in time, though the whole answer takes longer than either limit; so is a client's pause."""
    engine = ScriptedEngine(lambda request: ScriptedReply("x" * 600, pace=0.05))
    async with serve(engine, **QUICK) as gateway, client(gateway.url) as http:
        began = time.monotonic()
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        assert time.monotonic() - began > 1.5
    engine = ScriptedEngine(lambda request: "y" * 200_000)
    async with serve(engine, **QUICK) as gateway, client(gateway.url) as http:
        async with http.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as answer:
            await asyncio.sleep(2.0)
            text = (await answer.aread()).decode()
        assert "error" not in text
        assert text.rstrip().endswith("[DONE]")
