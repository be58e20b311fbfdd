"""While the store cannot be written: what agents get, what is marked, and that recording goes on afterwards."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import httpx
import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import EngineError, StoreError
from polar_proxy.export.exporter import export
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import SessionRow, Store
from polar_proxy.traces.operations import build_traces, find_targets, rebuild
from polar_proxy.types import CallRecord
from tests.conftest import Serve
from tests.fakes.store_faults import FULL, away, failing_writes, hanging
from tests.gateway.agents import CHAT, client, events_of, new_session, until_ready
from tests.gateway.random_bodies import ROUTES
from tests.until import GUARD_SECONDS, until

pytestmark = pytest.mark.slow

RECORDED = [name for name, route in ROUTES.items() if route.recorded]


async def new_rollout_session(store: Store, key: str) -> str:
    row = await store.sessions.create(key_hash=hash_key(key), label=None, rollout_id="rollout_1", origin="rollout")
    return row.session_id


async def until_marked(store: Store, session_id: str) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        while not await store.sessions.is_incomplete(session_id):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", RECORDED)
async def test_required_calls_are_refused_in_the_dialects_form(serve: Serve, store: Store, name: str) -> None:
    """The call that finds the disk full is not answered; later ones are not even sampled."""
    route, engine = ROUTES[name], ScriptedEngine()
    body = {key: route.right[key] for key in route.plain}
    session_id = await new_rollout_session(store, "own")
    async with serve(engine) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        headers = {"authorization": "Bearer own"}
        with failing_writes(store):
            first = await http.post(route.path, json=body, headers=headers)
            sampled = engine.sampled
            later = await http.post(route.path, json=body, headers=headers)
            assert engine.sampled == sampled
            assert later.status_code == 503
            assert later.headers["retry-after"] == "5"
            assert route.is_error(later.json(), 503)
            assert FULL in later.text
            assert gateway.refusal(session_id) is not None
            if "stream" not in name:
                assert first.status_code == 503
                assert route.key not in first.json()
        await until_ready(http, gateway)
        assert (await http.post(route.path, json=body, headers=headers)).status_code == 200
        assert gateway.refusal(session_id) is None


async def test_a_stream_that_cannot_be_recorded_ends_with_an_error(serve: Serve, store: Store) -> None:
    """The agent has seen a part of it, so the session is not trained on."""
    session_id = await new_rollout_session(store, "own")
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "own") as http:
        with failing_writes(store):
            answer = await http.post("/chat/completions", json={**CHAT, "stream": True})
        assert "error" in json.loads(events_of(answer.text)[-1])
        assert "[DONE]" not in answer.text
        await until_marked(store, session_id)
        assert gateway.sessions.lost(session_id) == 1


async def test_a_refused_call_leaves_the_session_complete(serve: Serve, store: Store) -> None:
    session_id = await new_rollout_session(store, "own")
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "own") as http:
        with failing_writes(store):
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 503
        await until_ready(http, gateway)
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        assert gateway.sessions.lost(session_id) == 0
    assert not await store.sessions.is_incomplete(session_id)
    (call,) = await store.calls.of_session(session_id)
    assert (call.edge, call.parent_call_id) == ("root", None)


@pytest.mark.parametrize("name", RECORDED)
async def test_best_effort_answers_and_marks_the_session(
    serve: Serve, store: Store, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two lines in the log, no call of the session is exported, and later calls are recorded again."""
    route = ROUTES[name]
    body = {key: route.right[key] for key in route.plain}
    session_id = await new_session(store, "own")
    caplog.set_level(logging.WARNING)
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        headers = {"authorization": "Bearer own"}
        with failing_writes(store):
            for _ in range(3):
                answer = await http.post(route.path, json=body, headers=headers)
                assert answer.status_code == 200
                assert route.key in answer.text
        await until_marked(store, session_id)
        await until_ready(http, gateway)
        assert (await http.post(route.path, json=body, headers=headers)).status_code == 200
    outage = [record for record in caplog.records if record.name.startswith("polar_proxy")]
    outage = [record for record in outage if record.levelno >= logging.WARNING]
    assert [record.exc_info for record in outage] == [None, None]
    assert FULL in outage[0].getMessage()
    calls = await store.calls.of_session(session_id)
    assert calls
    await assert_not_exported(store, session_id, calls)


async def assert_not_exported(store: Store, session_id: str, calls: list[CallRecord]) -> None:
    rows: list[bytes] = []
    report = await export(store, "tokens-jsonl", rows.append, session_ids=[session_id])
    assert rows == []
    assert report.left_out == {"incomplete": len(calls)}
    await build_traces(store, session_id, None, reward=None, incomplete=False)
    await rebuild(store, await find_targets(store, session_ids=[session_id]), builder="merged")
    assert await store.traces.find(session_id=session_id) == []


async def test_the_next_turn_is_not_joined_to_an_unrecorded_one(serve: Serve, store: Store) -> None:
    session_id = await new_session(store, "own")
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "own") as http:

        async def turn() -> str:
            answer = await http.post("/chat/completions", json={"model": "m", "messages": messages})
            messages.append(answer.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": f"more {len(messages)}"})
            return answer.headers["x-polar-call-id"]

        first = await turn()
        with failing_writes(store):
            unrecorded = [await turn(), await turn()]
        await until_ready(http, gateway)
        third = await turn()
    calls = {call.call_id: call for call in await store.calls.of_session(session_id)}
    assert list(calls) == [first, third]
    assert calls[third].parent_call_id == first
    assert calls[third].base_call_id not in unrecorded


@pytest.mark.parametrize("fault", [failing_writes, away])
async def test_an_unknown_key_is_answered_and_stored_later(serve: Serve, store: Store, fault: Any) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "new") as http:
        with fault(store):
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        await until_ready(http, gateway)
        answer = await http.post("/chat/completions", json=CHAT)
        assert answer.status_code == 200
    (session,) = await store.sessions.recent()
    assert session.session_id == answer.headers["x-polar-session-id"]
    assert (session.calls, session.incomplete) == (1, "unrecorded_calls")


async def test_a_call_is_recorded_if_only_its_session_could_not_be_found(
    serve: Serve, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails for a moment, so that the session of a new key is opened in memory; the call ends before the
    session is stored."""
    create = store.sessions.create

    async def fail(key_hash: bytes) -> None:
        raise StoreError("too slow")

    async def create_slowly(**row: Any) -> SessionRow:
        await asyncio.sleep(0.5)
        return await create(**row)

    with monkeypatch.context() as patch:
        patch.setattr(store.sessions, "by_key", fail)
        patch.setattr(store.sessions, "create", create_slowly)
        async with serve(ScriptedEngine()) as gateway, client(gateway.url, "new") as http:
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
    (session,) = await store.sessions.recent()
    assert (session.calls, session.incomplete) == (1, None)


async def test_a_known_key_keeps_its_session_after_an_outage(serve: Serve, store: Store) -> None:
    """The gateway cannot find the session of the key while the database is away; afterwards it is marked and used."""
    session_id = await new_session(store, "known")
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "known") as http:
        with away(store):
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        await until_ready(http, gateway)
        answer = await http.post("/chat/completions", json=CHAT)
        assert answer.headers["x-polar-session-id"] == session_id
    (session,) = await store.sessions.recent()
    assert (session.session_id, session.calls, session.incomplete) == (session_id, 1, "unrecorded_calls")


async def test_a_key_that_polar_issued_is_refused_while_the_database_is_away(serve: Serve, store: Store) -> None:
    """It may be a rollout's, whose calls must be recorded."""
    engine = ScriptedEngine()
    async with serve(engine) as gateway, client(gateway.url, "sk-polar-of-a-rollout") as http:
        with away(store):
            answer = await http.post("/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert engine.sampled == 0


@pytest.mark.parametrize(("record", "status"), [("required", 503), ("best_effort", 200)])
async def test_the_setting_replaces_the_default(serve: Serve, store: Store, record: str, status: int) -> None:
    await new_session(store, "plain")
    await new_rollout_session(store, "rollout")
    async with serve(ScriptedEngine(), record=record) as gateway, client(gateway.url) as http:
        with failing_writes(store):
            for key in ("plain", "rollout"):
                answer = await http.post("/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == status


async def test_an_unrecorded_response_can_be_continued_by_its_id(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        with failing_writes(store):
            first = (await http.post("/responses", json={"model": "m", "input": "hi"})).json()
            again = {"model": "m", "input": "more", "previous_response_id": first["id"]}
            assert (await http.post("/responses", json=again)).status_code == 200


async def test_a_hanging_store_delays_no_health_check(serve: Serve, store: Store) -> None:
    session_id = await new_rollout_session(store, "own")
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "own") as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        assert (await http.get(f"{gateway.url}/readyz")).json()["record"] == {"ok": True, "reason": None}
        await asyncio.sleep(1.0)
        with hanging(store):
            for _ in range(3):
                began = time.monotonic()
                answer = await http.get(f"{gateway.url}/readyz")
                assert time.monotonic() - began < 2.0
                assert answer.status_code == 503
                assert "has not answered for" in answer.json()["record"]["reason"]
                assert answer.json()["sample"] == {"ok": True, "reason": None}
                assert (await http.get(f"{gateway.url}/healthz")).json()["status"] == "ok"
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 503
        await until_ready(http, gateway)
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
    assert len(await store.calls.of_session(session_id)) == 2


async def test_a_call_whose_commit_hangs_is_not_trained(serve: Serve, store: Store) -> None:
    """It may be stored later although the agent got an error."""
    session_id = await new_rollout_session(store, "own")
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "own") as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        with hanging(store):
            began = time.monotonic()
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 503
            assert time.monotonic() - began < 8.0
        await until_marked(store, session_id)
        assert gateway.sessions.lost(session_id) == 1


async def test_a_lost_engine_shows_in_readyz_and_comes_back(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine()
    down: list[str] = []

    async def health() -> str | None:
        return down[0] if down else None

    engine.health = health  # type: ignore[method-assign]
    async with serve(engine) as gateway, client(gateway.url) as http:
        await until_ready(http, gateway)
        down.append("the engine is gone")
        body = await until_ready(http, gateway, 503)
        assert body["sample"] == {"ok": False, "reason": "the engine is gone"}
        assert body["record"]["ok"]
        down.clear()
        await until_ready(http, gateway)


@pytest.mark.parametrize("name", RECORDED)
async def test_a_lost_engine_is_an_error_in_the_dialects_form(serve: Serve, name: str) -> None:
    route = ROUTES[name]
    body = {key: route.right[key] for key in route.plain}
    engine = ScriptedEngine(lambda request: EngineError("The engine at http://x cannot be reached: refused."))
    async with serve(engine) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        answer = await http.post(route.path, json=body)
    assert answer.status_code == 502
    assert route.is_error(answer.json(), 502)


async def test_monitor_repeats_on_writable_if_more_becomes_due(store: Store) -> None:
    written = 0

    async def write() -> None:
        nonlocal written
        written += 1
        if written < 4:
            monitor.watch()

    monitor = StoreMonitor(store, write)
    monitor.watch()
    await until(lambda: written == 4, "the fourth call")
    await monitor.close()
