"""Budgets of tokens, prices, repeats and idle time that two gateways of one database share.

`test_budgets.py` has those of calls. They run on SQLite and, in `full` runs, on PostgreSQL too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.types import CallRecord
from tests.fakes.providers import OpenAIProvider, Scripted
from tests.gateway.agents import new_session
from tests.gateway.shared_gateways import ask, run_gateway
from tests.hosted.stand_ins import engine_of
from tests.hosted.test_price_budget import PRICES
from tests.store.conftest import postgres, postgres_template, url

pytestmark = pytest.mark.slow

__all__ = ["postgres", "postgres_template", "url"]

KEY = "sk-budget-of-the-test"
Gateways = tuple[Gateway, Gateway]


@contextlib.asynccontextmanager
async def two_gateways(url: str) -> AsyncIterator[tuple[Gateways, Store]]:
    async with (
        run_gateway(url, lambda request: ScriptedReply("ls again")) as (first, store),
        run_gateway(url, lambda request: ScriptedReply("ls again")) as (second, _),
    ):
        yield (first, second), store


async def alternate(gateways: Gateways, key: str, turns: int) -> list[int]:
    """Send the turns of one conversation to the gateways in turn. Return the statuses."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    statuses = []
    for turn in range(turns):
        answer = await ask(gateways[turn % 2], key, messages)
        statuses.append(answer.status_code)
        if answer.status_code == 200:
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"result {turn}"}]
    return statuses


async def limit_spent(store: Store, session: str) -> str | None:
    row = await store.sessions.get(session)
    assert row is not None
    return row.spent


def sampled_tokens(call: CallRecord) -> int:
    return sum(choice.token_ids.size for choice in call.choices)


def prompt_tokens(call: CallRecord) -> int:
    assert call.prompt_ids is not None
    return int(call.prompt_ids.size)


COUNTERS = {"max_sampled_tokens": sampled_tokens, "max_prompt_tokens": prompt_tokens}


@pytest.mark.parametrize("limit", COUNTERS)
async def test_tokens_of_both_gateways_count(url: str, limit: str) -> None:
    async with two_gateways(url) as (gateways, store):
        unlimited = await new_session(store, "sk-unlimited")
        assert await alternate(gateways, "sk-unlimited", 3) == [200] * 3
        used = sum(map(COUNTERS[limit], await store.calls.of_session(unlimited)))
        session = await new_session(store, KEY, {limit: used})
        assert await alternate(gateways, KEY, 5) == [200] * 3 + [403] * 2
        assert await limit_spent(store, session) == limit


async def test_repeats_at_both_gateways_count(url: str) -> None:
    async with two_gateways(url) as (gateways, store):
        session = await new_session(store, KEY, {"max_repeats": 3})
        assert await alternate(gateways, KEY, 5) == [200] * 3 + [403] * 2
        assert await limit_spent(store, session) == "max_repeats"


async def test_idle_time_since_the_other_gateways_call_counts(url: str) -> None:
    async with two_gateways(url) as (gateways, store):
        session = await new_session(store, KEY, {"max_idle_seconds": 0.3})
        assert await alternate(gateways, KEY, 1) == [200]
        await asyncio.sleep(0.4)
        assert await alternate(gateways[::-1], KEY, 2) == [403] * 2
        assert await limit_spent(store, session) == "max_idle_seconds"


async def test_prices_at_both_gateways_count(url: str, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    async with OpenAIProvider() as api:
        api.script(Scripted("Hello."))
        async with (
            run_gateway(url, engine=engine_of(api), prices=str(prices)) as (first, store),
            run_gateway(url, engine=engine_of(api), prices=str(prices)) as (second, _),
        ):
            session = await new_session(store, KEY, {"max_price_usd": 0.0008})  # a call costs 0.0003
            assert await alternate((first, second), KEY, 5) == [200] * 3 + [403] * 2
            summary = await store.sessions.summary(session)
    assert summary is not None
    assert (summary.spent, summary.price_usd) == ("max_price_usd", pytest.approx(0.0009))
