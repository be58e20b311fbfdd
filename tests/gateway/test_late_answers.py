"""A rollout that ends while the engine is slow: the client of a call in flight gets a 409, not the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.agents import only_call
from tests.until import until

pytestmark = pytest.mark.slow

USER: Any = [{"role": "user", "content": "hi"}]
GOOGLE: Any = {"contents": [{"parts": [{"text": "hi"}]}]}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": USER}, "invalid_request_error"),
        ("/v1/responses", {"model": "m", "input": "hi"}, "invalid_request_error"),
        ("/v1/messages", {"model": "m", "messages": USER, "max_tokens": 99}, "invalid_request_error"),
        ("/v1beta/models/m:generateContent", GOOGLE, "ABORTED"),
    ],
)
async def test_a_call_in_flight_when_its_rollout_ends_is_answered_409(
    serve: Serve, store: Store, path: str, body: Any, kind: str
) -> None:
    engine = ScriptedEngine(lambda request: "hello", pace=0.2, tokens_per_event=1)
    async with serve(engine) as gateway, httpx.AsyncClient(timeout=120) as http:
        asking = asyncio.create_task(http.post(gateway.url + path, json=body))
        await until(lambda: engine.sampled)
        (session,) = await store.sessions.recent()
        gateway.end_session(session.session_id)
        late = await gateway.forget_session(session.session_id, 0.01)
        answer = await asking
    assert late == "a call was still being answered when its rollout ended"
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert "ended before this call was answered" in error["message"]
    assert kind in (error.get("type"), error.get("status"))
    call = await only_call(store)
    assert (call.status, call.http_status) == ("client_gone", 409)
    assert call.choices[0].token_ids.size


async def test_a_call_that_ends_within_the_time_its_rollout_waits_is_answered(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(lambda request: "hello", pace=0.05, tokens_per_event=1)
    async with serve(engine) as gateway, httpx.AsyncClient(timeout=120) as http:
        asking = asyncio.create_task(
            http.post(gateway.url + "/v1/chat/completions", json={"model": "m", "messages": USER})
        )
        await until(lambda: engine.sampled)
        (session,) = await store.sessions.recent()
        gateway.end_session(session.session_id)
        assert await gateway.forget_session(session.session_id, 60) is None
        assert (await asking).status_code == 200
