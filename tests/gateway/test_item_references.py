"""A session in which each turn refers to all earlier items by their ids: what is read from the store, and recorded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Collection

import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.traces.grades import excluded_calls
from polar_proxy.types import CallRecord, Json
from tests.gateway.agents import recorded_calls
from tests.gateway.test_passthrough_history import json_provider
from tests.gateway.test_passthrough_routes import mixed, post, responses_answer, texts

pytestmark = pytest.mark.slow

TURNS = 8


class ReferringAgent:
    """An agent that repeats no answer: it refers to all of them."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.turns = 0

    async def take_turn(self, gateway: Gateway) -> int:
        """Ask once, and return the status of the answer."""
        asked = [*self.items, {"role": "user", "content": f"question {self.turns}"}]
        answer = await post(gateway.url, "/v1/responses", {"model": "m", "input": asked})
        if answer.status_code == 200:
            self.turns += 1
            ids = [item["id"] for item in answer.json()["output"]]
            self.items = [*asked, *({"type": "item_reference", "id": identity} for identity in ids)]
        return answer.status_code


@contextlib.asynccontextmanager
async def served(store: Store, agent: ReferringAgent, *, passed_on: bool) -> AsyncIterator[Gateway]:
    """Run a gateway whose own engine answers, or the provider, with "answer N"."""
    if passed_on:
        provider = json_provider()
        async with provider.serve() as url, mixed(store, url, default=True) as gateway:
            gateway.set_body = lambda: None  # replaced below
            yield gateway
    else:
        async with Gateway(ScriptedEngine(lambda request: f"answer {agent.turns}"), store) as gateway:
            yield gateway
