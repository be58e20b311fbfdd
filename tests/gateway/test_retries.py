"""Joining of retries: one generation, one call, the same bytes, and only with evidence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway import Gateway
from polar_proxy.gateway.recording import RequestContext
from polar_proxy.gateway.retries import ResponseBuffer, RetryCache
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client, recorded_calls
from tests.until import until

pytestmark = pytest.mark.slow

RETRY = {"x-stainless-retry-count": "1"}
KEPT: dict[str, Any] = {"retry_window_seconds": 600}


def slow_engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: "x" * 20, pace=0.05, tokens_per_event=1)


async def disconnecting_request(gateway: Gateway, body: Mapping[str, object], engine: ScriptedEngine) -> None:
    """Disconnect once the first token is sampled. Returns when the gateway has noticed."""
    noticed = asyncio.Event()
    abandoned = ResponseBuffer.abandoned

    async def notice(buffer: ResponseBuffer) -> None:
        noticed.set()
        await abandoned(buffer)

    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k1\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResponseBuffer, "abandoned", notice)
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + data)
        await until(lambda: engine.sampled)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(noticed.wait(), 120)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_takes_over_from_a_lost_client(serve: Serve, store: Store, stream: bool) -> None:
    engine = slow_engine()
    async with serve(engine, retry_grace_seconds=600) as gateway, client(gateway.url) as http:
        body = {**CHAT, "stream": stream, "metadata": {"attempt": "1"}}
        await disconnecting_request(gateway, body, engine)
        answer = await http.post("/chat/completions", json={**body, "metadata": {"attempt": "2"}})
    assert answer.text.count("x") >= 20
    (call,) = await recorded_calls(store)
    assert (call.status, call.edge, len(engine.requests)) == ("ok", "root", 1)
    assert answer.headers["x-polar-call-id"] == call.call_id


async def test_a_retry_after_the_grace_period_is_a_new_call(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(
        lambda request: "x" * (10_000 if len(engine.requests) == 1 else 3), pace=0.01, tokens_per_event=1
    )
    async with serve(engine, retry_grace_seconds=0.1, **KEPT) as gateway, client(gateway.url) as http:
        await disconnecting_request(gateway, CHAT, engine)
        (first,) = await recorded_calls(store, 1)
        assert (first.status, engine.aborted) == ("client_gone", 1)
        await http.post("/chat/completions", json=CHAT)
    again = (await recorded_calls(store))[1]
    assert (again.edge, again.parent_call_id, again.rule) == ("retries", first.call_id, "asked_again_after_failure")
    assert (again.status, again.thread) == ("ok", first.thread)


@pytest.mark.parametrize("ended", ["before the client goes", "after the client went"])
async def test_the_end_of_a_session_ends_the_grace_period(serve: Serve, store: Store, ended: str) -> None:
    engine = ScriptedEngine(lambda request: "x" * 10_000, pace=0.01, tokens_per_event=1)
    async with serve(engine, retry_grace_seconds=600) as gateway, client(gateway.url) as http:
        if ended == "after the client went":
            await disconnecting_request(gateway, CHAT, engine)
            gateway.end_session((await store.sessions.recent())[0].session_id)
        else:
            asking = asyncio.create_task(http.post("/chat/completions", json={**CHAT, "stream": True}))
            await until(lambda: engine.sampled)
            gateway.end_session("session_another")
            gateway.end_session((await store.sessions.recent())[0].session_id)
            await asyncio.sleep(0.1)
            assert engine.aborted == 0  # a connected client still gets its answer
            asking.cancel()
        (call,) = await recorded_calls(store, 1)
    assert (call.status, engine.aborted) == ("client_gone", 1)


async def test_a_complete_answer_without_a_listener_is_client_gone(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(lambda request: "xxxx", pace=0.1, tokens_per_event=1)
    async with serve(engine, retry_grace_seconds=600) as gateway:
        await disconnecting_request(gateway, CHAT, engine)
        await until(lambda: engine.finished)
        assert (await store.sessions.recent())[0].calls == 0  # its retry may still come
        gateway.end_session((await store.sessions.recent())[0].session_id)
        (call,) = await recorded_calls(store, 1)
    assert (call.status, call.choices[0].finish_reason) == ("client_gone", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_retry_header_joins_a_call_in_flight(serve: Serve, store: Store, stream: bool) -> None:
    engine = slow_engine()
    body = {**CHAT, "stream": stream}
    async with serve(engine, **KEPT) as gateway, client(gateway.url) as http:
        first = asyncio.create_task(http.post("/chat/completions", json=body))
        await until(lambda: engine.sampled)
        second = await http.post("/chat/completions", json=body, headers=RETRY)
        assert (await first).content == second.content
        late = await http.post("/chat/completions", json=body, headers=RETRY)
        assert late.content == second.content
        assert "polar_joined_retries_total 2.0" in (await http.get(gateway.url + "/metrics")).text
    assert len(await recorded_calls(store)) == len(engine.requests) == 1


async def test_equal_requests_without_evidence_are_two_calls(serve: Serve, store: Store) -> None:
    """Two runs of one task under one key begin with the same bytes, and so does best-of-n sampling by a client."""
    engine = slow_engine()
    async with serve(engine, **KEPT) as gateway, client(gateway.url) as http:
        await asyncio.gather(*(http.post("/chat/completions", json=CHAT) for _ in range(2)))
        await http.post("/chat/completions", json=CHAT)
    calls = await recorded_calls(store)
    assert [call.edge for call in calls] == ["root"] * 3
    assert [call.ambiguous for call in calls] == [False, True, True]
    assert len(engine.requests) == 3


async def test_does_not_replay_an_error(serve: Serve, store: Store) -> None:
    replies: list[str | Exception] = [EngineError("busy", status=503), "hello"]
    engine = ScriptedEngine(lambda request: replies.pop(0))
    async with serve(engine, **KEPT) as gateway, client(gateway.url) as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 503
        assert (await http.post("/chat/completions", json=CHAT, headers=RETRY)).status_code == 200
    first, second = await recorded_calls(store)
    assert (second.edge, second.parent_call_id, second.rule) == ("retries", first.call_id, "sdk_retry_header")


async def test_does_not_join_another_request(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        await http.post("/chat/completions", json=CHAT)
        for changes in ({"temperature": 0.5}, {"stream": True}, {"messages": [{"role": "user", "content": "ho"}]}):
            await http.post("/chat/completions", json={**CHAT, **changes}, headers=RETRY)
    assert len(await recorded_calls(store)) == 4


@pytest.mark.parametrize(("policy", "generations"), [("always", 1), ("never", 2)])
async def test_join_policies(serve: Serve, store: Store, policy: str, generations: int) -> None:
    engine = slow_engine()
    async with serve(engine, join_retries=policy, **KEPT) as gateway, client(gateway.url) as http:
        first = asyncio.create_task(http.post("/chat/completions", json=CHAT))
        await until(lambda: engine.sampled)
        headers = RETRY if policy == "never" else {}
        second = await http.post("/chat/completions", json=CHAT, headers=headers)
        assert (second.content == (await first).content) == (policy == "always")
    assert len(engine.requests) == len(await recorded_calls(store)) == generations


async def test_lineage_survives_a_restart_of_the_gateway(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        answer = (await http.post("/chat/completions", json=CHAT)).json()["choices"][0]["message"]
    messages = [*CHAT["messages"], answer, {"role": "user", "content": "more"}]
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        await http.post("/chat/completions", json={**CHAT, "messages": messages})
    first, second = await recorded_calls(store)
    assert (second.edge, second.parent_call_id, second.thread) == ("continues", first.call_id, first.thread)


async def test_a_later_equal_attempt_supersedes_an_answer_that_is_kept(serve: Serve, store: Store) -> None:
    """The retries of an attempt that failed never get the answer to an earlier one, even if one of them is refused."""
    replies: list[str | Exception] = ["old", EngineError("busy", status=503), "new"]
    engine = ScriptedEngine(lambda request: replies.pop(0))
    async with serve(engine, **KEPT) as gateway, client(gateway.url) as http:
        await http.post("/chat/completions", json=CHAT)
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 503
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RetryCache, "open", _refuse_to_open)
            assert (await http.post("/chat/completions", json=CHAT, headers=RETRY)).status_code == 503
        answer = await http.post("/chat/completions", json=CHAT, headers=RETRY)
    assert answer.json()["choices"][0]["message"]["content"] == "new"
    assert len(await recorded_calls(store)) == 3


def _refuse_to_open(cache: RetryCache, request: RequestContext) -> ResponseBuffer:
    raise RequestError("not now", status=503)
