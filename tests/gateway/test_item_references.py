"""Sessions in which each turn refers to all earlier answers by the ids of their items."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.traces.grades import excluded_calls
from polar_proxy.types import CallRecord, Json
from tests.gateway.agents import recorded_calls
from tests.gateway.test_passthrough import KEY, Provider
from tests.gateway.test_passthrough_history import json_provider, reference
from tests.gateway.test_passthrough_routes import mixed, post, responses_answer, texts

pytestmark = pytest.mark.slow


@dataclass
class ReferringAgent:
    """An agent that repeats no answer, and refers to all of them."""

    url: str
    provider: Provider | None = None
    items: list[Json] = field(default_factory=list)
    turns: int = 0

    async def take_turn(self) -> int:
        """Ask once, and return the status of the response."""
        if self.provider is not None:
            self.provider.body = responses_answer(self.turns, f"answer {self.turns}")
        asked = [*self.items, {"role": "user", "content": f"question {self.turns}"}]
        response = await post(self.url, "/v1/responses", {"model": "m", "input": asked})
        if response.status_code == 200:
            self.items = [*asked, *(reference(item["id"]) for item in response.json()["output"])]
            self.turns += 1
        return response.status_code


@contextlib.asynccontextmanager
async def answering(store: Store) -> AsyncIterator[ReferringAgent]:
    """Serve an agent by an engine that answers."""
    engine = ScriptedEngine(lambda request: f"answer {agent.turns}")
    async with Gateway(engine, store, GatewaySettings(port=0)) as gateway:
        agent = ReferringAgent(gateway.url)
        yield agent


@contextlib.asynccontextmanager
async def passing_on(store: Store) -> AsyncIterator[ReferringAgent]:
    """Serve an agent by its provider."""
    provider = json_provider()
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        yield ReferringAgent(gateway.url, provider)


ServeAgent = Callable[[Store], AbstractAsyncContextManager[ReferringAgent]]


@pytest.mark.parametrize("serve_agent", [answering, passing_on])
async def test_each_answer_is_read_at_most_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, serve_agent: ServeAgent
) -> None:
    read: list[int] = []
    get_many = store.calls.get_many

    async def counted(session_id: str, call_ids: Collection[str]) -> list[CallRecord]:
        read.append(len(call_ids))
        return await get_many(session_id, call_ids)

    monkeypatch.setattr(store.calls, "get_many", counted)
    async with serve_agent(store) as agent:
        for _ in range(6):
            assert await agent.take_turn() == 200
    assert sum(read) == 1, "only the first request that refers to an answer reads it"
    calls = await recorded_calls(store, 6)
    assert [call.edge for call in calls] == ["root", *["continues"] * 5]
    spoken = [text for number in range(5) for text in (f"question {number}", f"answer {number}")]
    assert texts(calls[-1]) == [*spoken, "question 5"]
    assert "missing_history" not in excluded_calls(calls).values()


@pytest.mark.parametrize("serve_agent", [answering, passing_on])
async def test_answers_are_found_after_a_restart(store: Store, serve_agent: ServeAgent) -> None:
    async with serve_agent(store) as agent:
        for _ in range(3):
            assert await agent.take_turn() == 200
    async with serve_agent(store) as again:
        again.items, again.turns = agent.items, agent.turns
        for _ in range(2):
            assert await again.take_turn() == 200
    calls = await recorded_calls(store, 5)
    assert texts(calls[-1])[1::2] == [f"answer {number}" for number in range(4)]
    assert "missing_history" not in excluded_calls(calls).values()


async def test_a_response_that_was_deleted_cannot_be_referred_to(store: Store) -> None:
    async with answering(store) as agent:
        for _ in range(3):
            assert await agent.take_turn() == 200
        first, *_ = await recorded_calls(store, 3)
        await store.calls.mark_deleted(first.call_id)  # as by another gateway
        assert await agent.take_turn() == 404


async def test_an_item_of_another_session_cannot_be_referred_to(store: Store) -> None:
    async with answering(store) as agent:
        for _ in range(3):
            assert await agent.take_turn() == 200
        body: Json = {"model": "m", "input": [*agent.items, {"role": "user", "content": "again"}]}
        assert (await post(agent.url, "/v1/responses", body, KEY)).status_code == 200
        assert (await post(agent.url, "/v1/responses", body, "sk-of-another-agent")).status_code == 404
