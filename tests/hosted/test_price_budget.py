"""Budgets of a price: hosted calls are counted by their recorded price, also after a restart of the gateway."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from polar_proxy.store import Store
from tests.conftest import Serve
from tests.fakes.providers import OpenAIProvider, Scripted
from tests.gateway.agents import CHAT, client, new_session
from tests.hosted.stand_ins import engine_of

pytestmark = pytest.mark.slow

KEY = "sk-price-of-the-test"
PRICES = '[[model]]\nname = "gpt-4.1"\ninput = 1\noutput = 10\ndate = 2026-01-01\nsource = "contract"\n'


@pytest.mark.parametrize("restart", [False, True])
async def test_a_price_ends_a_session(serve: Serve, store: Store, tmp_path: Path, restart: bool) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    session = await new_session(store, KEY, {"max_price_usd": 0.0005})  # a call costs 0.0003

    async def ask(http: httpx.AsyncClient) -> int:
        return (await http.post("/chat/completions", json=CHAT)).status_code

    statuses: list[int] = []
    async with OpenAIProvider() as api:
        api.script(Scripted("Hello."))
        for _ in range(4 if restart else 1):
            async with (
                serve(engine_of(api), prices=str(tmp_path / "prices.toml")) as gateway,
                client(gateway.url, KEY) as http,
            ):
                statuses += [await ask(http) for _ in range(1 if restart else 4)]
    assert statuses == [200, 200, 403, 403]
    row = await store.sessions.summary(session)
    assert row is not None
    assert (row.spent, row.price_usd) == ("max_price_usd", pytest.approx(0.0006))
