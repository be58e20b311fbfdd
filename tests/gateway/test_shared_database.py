"""Any gateway serves any session: two real gateways, each with its own connection to one database.

On SQLite, and on a real PostgreSQL server when `full` tests are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import Reply, ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.sessions import hash_key
from polar_proxy.store import Store, open_store
from polar_proxy.store.calls import CallRepository
from polar_proxy.store.sessions import SessionRepository
from polar_proxy.traces import BUILDERS
from polar_proxy.traces.drift import drift_events
from polar_proxy.types import CallRecord, ChatRequest, EngineRequest, ToolCall
from tests.store.conftest import postgres, url

__all__ = ["postgres", "url"]

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SYSTEM = "You are a careful assistant. " * 200


def script(request: EngineRequest) -> Reply:
    assert isinstance(request, ChatRequest)
    said = sum(message.role == "assistant" for message in request.messages)
    return Reply(f"Step {said}.", f"Thought {said}.", (ToolCall(f"call_{said}", "look", '{"n":1,  "deep": false}'),))


@contextlib.asynccontextmanager
async def gateway(url: str, **given: Any) -> AsyncIterator[tuple[Gateway, Store]]:
    settings = GatewaySettings.model_validate({"port": 0, "require_known_keys": True, "shared": True, **given})
    async with open_store(url) as store, ScriptedEngine(script) as engine, Gateway(engine, store, settings) as running:
        yield running, store


@contextlib.asynccontextmanager
async def two(url: str, **given: Any) -> AsyncIterator[tuple[tuple[Gateway, Gateway], Store]]:
    async with gateway(url, **given) as (first, store), gateway(url, **given) as (second, _):
        yield (first, second), store


async def opened(store: Store, key: str) -> str:
    row = await store.sessions.create(key_hash=hash_key(key), label=None, policy=None, origin="key")
    return row.session_id


async def ask(gateway: Gateway, key: str, messages: Sequence[Any]) -> httpx.Response:
    body = {"model": "m", "messages": messages, "tools": [TOOL]}
    async with httpx.AsyncClient(timeout=120) as http:
        return await http.post(
            f"{gateway.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )


async def talk(gateways: Sequence[Gateway], key: str, turns: int, about: str) -> None:
    """Turn k goes to gateway k modulo their number. Echoed as harnesses do it: without reasoning."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": about}]
    for turn in range(turns):
        answer = await ask(gateways[turn % len(gateways)], key, messages)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if "reasoning" not in name})
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{about}: result {turn}"})


def one_line(calls: Sequence[CallRecord]) -> None:
    """Every call goes on with the one before it, from exactly its tokens."""
    assert [call.edge for call in calls] == ["root", *["continues"] * (len(calls) - 1)]
    for before, call in pairwise(calls):
        assert (call.parent_call_id, call.base_call_id) == (before.call_id, before.call_id)
        assert (call.prompt_mode, call.prompt_reason, call.ambiguous) == ("continue", None, False)
    built = BUILDERS["merged"](calls)
    assert len(built.traces) == 1
    assert not built.excluded
    assert drift_events(calls, built.excluded) == ()


async def test_turns_alternate(url: str) -> None:
    async with two(url) as (gateways, store):
        session_id = await opened(store, "k")
        await talk(gateways, "k", 20, "the task")
        calls = await store.calls.of_session(session_id)
        assert len(calls) == 20
        one_line(calls)
        served = [one.metrics.calls.labels("openai_chat", "ok")._value.get() for one in gateways]
        assert served == [10, 10]


async def test_threads_of_one_session_cross(url: str) -> None:
    """Sub-agents that ask at the same time, each now here, now there: nobody's turn is taken for another's."""
    async with two(url) as (gateways, store):
        session_id = await opened(store, "k")
        await asyncio.gather(*(talk(gateways[:: 1 - 2 * (n % 2)], "k", 8, f"thing number {n}") for n in range(4)))
        calls = await store.calls.of_session(session_id)
    assert Counter(call.edge for call in calls) == {"root": 4, "continues": 28}
    threads: dict[str, list[CallRecord]] = {}
    for call in calls:
        threads.setdefault(str(call.thread), []).append(call)
    assert sorted(map(len, threads.values())) == [8] * 4
    for thread in threads.values():
        one_line(thread)


async def test_many_sessions_with_one_prompt(url: str) -> None:
    """What all share is written by both gateways at the same time; every call is there once."""
    async with two(url) as (gateways, store):
        ids = [await opened(store, f"k{number}") for number in range(8)]
        await asyncio.gather(*(talk(gateways[:: 1 - 2 * (n % 2)], f"k{n}", 5, "the task") for n in range(8)))
        for session_id in ids:
            one_line(await store.calls.of_session(session_id))
        assert [gateway.sessions.lost(session_id) for gateway in gateways for session_id in ids] == [0] * 16


async def test_a_session_that_is_closed_elsewhere_is_refused(url: str) -> None:
    async with two(url) as (gateways, store):
        session_id = await opened(store, "k")
        await talk(gateways, "k", 2, "the task")
        await store.sessions.close(session_id)
        for one in gateways:
            answer = await ask(one, "k", [{"role": "user", "content": "more"}])
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "session_closed")
        assert len(await store.calls.of_session(session_id)) == 2


async def test_what_was_lost_is_not_taken_for_what_is_new(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that could not be recorded here and one that was recorded there do not cancel out."""
    async with two(url) as (gateways, store):
        session_id = await opened(store, "k")
        await talk(gateways, "k", 4, "the task")
        here = gateways[0]
        with monkeypatch.context() as patch:

            async def refuse(record: CallRecord) -> None:
                raise OSError("no room")

            patch.setattr(store.calls, "commit", refuse)
            patch.setattr("logging.Logger.exception", lambda *args: None)
            assert (await ask(here, "k", [{"role": "user", "content": "lost"}])).status_code == 200
        assert here.sessions.lost(session_id) == 1
        await talk(gateways[::-1], "k", 6, "another task")
        calls = await store.calls.of_session(session_id)
        assert len(calls) == 10
        one_line(calls[:4])
        one_line(calls[4:])
        assert here.sessions.lost(session_id) == 1


async def test_a_gateway_that_is_alone_asks_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    whole = SessionRepository.summary

    async def counted(self: SessionRepository, session_id: str) -> Any:
        asked.append(session_id)
        return await whole(self, session_id)

    monkeypatch.setattr(SessionRepository, "summary", counted)
    async with gateway(url, shared=False) as (alone, store):
        await opened(store, "k")
        await talk([alone], "k", 4, "the task")
    assert asked == []
    read: list[int] = []
    places = CallRepository.lineages

    async def measured(self: CallRepository, session_id: str, **given: Any) -> Any:
        found = await places(self, session_id, **given)
        read.append(len(found))
        return found

    monkeypatch.setattr(CallRepository, "lineages", measured)
    async with gateway(url) as (told, store):
        await opened(store, "k2")
        await talk([told], "k2", 4, "the task")
    assert len(asked) == 3  # not when it reads the session for the first time
    assert read == [0], "nothing of its own is read back"
