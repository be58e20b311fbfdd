"""Several gateways on one database: any of them serves any session.

Two real gateways, each with its own connection. They run on SQLite and, in
`full` runs, on PostgreSQL too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from polar_proxy.errors import StoreError
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.store.repositories.calls import CallRepository
from polar_proxy.store.repositories.sessions import SessionRepository
from polar_proxy.traces.builders import build
from polar_proxy.traces.drift import drift_events
from polar_proxy.types import CallRecord
from tests.gateway.agents import new_session
from tests.gateway.shared_gateways import ask, run_gateway
from tests.store.conftest import postgres, postgres_template, url

pytestmark = pytest.mark.slow

__all__ = ["postgres", "postgres_template", "url"]

SYSTEM = "You are a careful assistant. " * 200


@contextlib.asynccontextmanager
async def two_gateways(url: str, **given: Any) -> AsyncIterator[tuple[tuple[Gateway, Gateway], Store]]:
    async with run_gateway(url, **given) as (first, store), run_gateway(url, **given) as (second, _):
        yield (first, second), store


async def talk(gateways: Sequence[Gateway], key: str, turns: int, about: str) -> None:
    """Send turn k to gateway k modulo their number. Answers are echoed without reasoning, as harnesses do."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": about}]
    for turn in range(turns):
        answer = await ask(gateways[turn % len(gateways)], key, messages)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if "reasoning" not in name})
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{about}: result {turn}"})


def assert_one_trace(calls: Sequence[CallRecord]) -> None:
    """Assert that every call continues the one before it, from exactly its tokens."""
    assert [call.edge for call in calls] == ["root", *["continues"] * (len(calls) - 1)]
    for before, call in pairwise(calls):
        assert (call.parent_call_id, call.base_call_id) == (before.call_id, before.call_id)
        assert (call.prompt_mode, call.prompt_reason, call.ambiguous) == ("continue", None, False)
    built = build(calls)
    assert len(built.traces) == 1
    assert not built.excluded
    assert drift_events(calls, built.excluded) == ()


async def test_turns_may_alternate_between_gateways(url: str) -> None:
    async with two_gateways(url) as (gateways, store):
        session_id = await new_session(store, "k")
        await talk(gateways, "k", 20, "the task")
        calls = await store.calls.of_session(session_id)
        assert len(calls) == 20
        assert_one_trace(calls)
        served = [one.metrics.calls.labels("openai_chat", "ok")._value.get() for one in gateways]
        assert served == [10, 10]


async def test_parallel_threads_of_one_session_use_both_gateways(url: str) -> None:
    """Sub-agents ask at the same time and alternate between gateways; no turn is confused with another's."""
    async with two_gateways(url) as (gateways, store):
        session_id = await new_session(store, "k")
        await asyncio.gather(*(talk(gateways[:: 1 - 2 * (n % 2)], "k", 8, f"thing number {n}") for n in range(4)))
        calls = await store.calls.of_session(session_id)
    assert Counter(call.edge for call in calls) == {"root": 4, "continues": 28}
    threads: dict[str, list[CallRecord]] = {}
    for call in calls:
        threads.setdefault(str(call.thread), []).append(call)
    assert sorted(map(len, threads.values())) == [8] * 4
    for thread in threads.values():
        assert_one_trace(thread)


async def test_gateways_write_the_same_prompt_at_the_same_time(url: str) -> None:
    """Both gateways write the shared prompt; every call is stored once."""
    async with two_gateways(url) as (gateways, store):
        ids = [await new_session(store, f"k{number}") for number in range(8)]
        await asyncio.gather(*(talk(gateways[:: 1 - 2 * (n % 2)], f"k{n}", 5, "the task") for n in range(8)))
        for session_id in ids:
            assert_one_trace(await store.calls.of_session(session_id))
        assert [gateway.sessions.lost(session_id) for gateway in gateways for session_id in ids] == [0] * 16


async def test_rejects_a_session_that_another_gateway_closed(url: str) -> None:
    async with two_gateways(url) as (gateways, store):
        session_id = await new_session(store, "k")
        await talk(gateways, "k", 2, "the task")
        await store.sessions.close(session_id)
        for one in gateways:
            answer = await ask(one, "k", [{"role": "user", "content": "more"}])
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "session_closed")
        assert len(await store.calls.of_session(session_id)) == 2


async def test_a_lost_call_does_not_hide_a_new_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call lost on one gateway and a call recorded on the other do not cancel out."""
    async with two_gateways(url) as (gateways, store):
        session_id = await new_session(store, "k")
        await talk(gateways, "k", 4, "the task")
        here = gateways[0]
        with monkeypatch.context() as patch:

            async def refuse(record: CallRecord, **options: bool) -> None:
                raise StoreError("no room")

            patch.setattr(store.calls, "commit", refuse)
            assert (await ask(here, "k", [{"role": "user", "content": "lost"}])).status_code == 200
        assert here.sessions.lost(session_id) == 1
        await talk(gateways[::-1], "k", 6, "another task")
        calls = await store.calls.of_session(session_id)
        assert len(calls) == 10
        assert_one_trace(calls[:4])
        assert_one_trace(calls[4:])
        assert here.sessions.lost(session_id) == 1


async def test_a_single_gateway_does_not_look_for_other_calls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    whole = SessionRepository.summary

    async def counted(self: SessionRepository, session_id: str) -> Any:
        asked.append(session_id)
        return await whole(self, session_id)

    monkeypatch.setattr(SessionRepository, "summary", counted)
    async with run_gateway(url, shared=False) as (alone, store):
        await new_session(store, "k")
        await talk([alone], "k", 4, "the task")
    assert asked == []
    read: list[int] = []
    lineages = CallRepository.lineages

    async def measured(self: CallRepository, session_id: str, **given: Any) -> Any:
        found = await lineages(self, session_id, **given)
        read.append(len(found))
        return found

    monkeypatch.setattr(CallRepository, "lineages", measured)
    async with run_gateway(url) as (gateway, store):
        await new_session(store, "k2")
        await talk([gateway], "k2", 4, "the task")
    assert len(asked) == 3  # except when it reads the session for the first time
    assert read == [0], "nothing of its own is read back"
