"""Every dialect in, every provider's own form out, with the official SDKs on both sides."""

from __future__ import annotations

import orjson
import pytest
from openai import BadRequestError

from polar_proxy.store import Store
from tests.conftest import Serve
from tests.fakes.providers import Scripted
from tests.gateway.agents import recorded_calls
from tests.hosted.agents import AGENTS, RESULT, SYSTEM, openai_client
from tests.hosted.stand_ins import PROVIDERS, engine_of, providers, streams

pytestmark = pytest.mark.slow

FIRST = Scripted("Let me look.", reasoning="Weather: look it up.", calls=(("get_weather", {"city": "Zürich"}),))
SECOND = Scripted("It rains.", input_tokens=150, output_tokens=12, cached=40, thinking_tokens=0)


@streams
@providers
@pytest.mark.parametrize("dialect", AGENTS)
async def test_an_agent_runs_a_tool(serve: Serve, store: Store, dialect: str, provider: str, stream: bool) -> None:
    async with PROVIDERS[provider]() as api, serve(engine_of(api)) as gateway:
        api.script(FIRST, SECOND)
        done = await AGENTS[dialect](gateway.url, stream)
        assert (done.text, done.arguments, done.final) == ("Let me look.", {"city": "Zürich"}, "It rains.")
        assert (done.input_tokens, done.output_tokens) == (150, 12)
        if provider != "openai" and dialect != "openai_chat":  # OpenAI's chat route shows no reasoning
            assert done.reasoning == "Weather: look it up."
        assert len(api.bodies) == 2
        sent = orjson.dumps(api.bodies[-1]).decode()
        assert SYSTEM in sent
        assert RESULT in sent
    first, second = await recorded_calls(store, count=2)
    assert (first.dialect, first.status, first.stream) == (dialect, "no_tokens", stream)
    assert (second.edge, second.parent_call_id) == ("continues", first.call_id)
    assert second.usage is not None
    assert (second.usage.model, second.usage.input_tokens, second.usage.cached_tokens) == (api.model, 150, 40)
    assert first.usage is not None
    assert first.usage.reasoning_tokens == 5
    assert second.price_usd == pytest.approx(PRICES[provider])
    (session,) = await store.sessions.recent()
    assert (session.prompt_tokens, session.completion_tokens) == (250, 32)
    assert session.price_usd == pytest.approx((first.price_usd or 0) + (second.price_usd or 0))


PRICES = {
    "openai": (110 * 2.0 + 40 * 0.5 + 12 * 8.0) / 1e6,
    "anthropic": (110 * 3.0 + 40 * 0.3 + 12 * 15.0) / 1e6,
    "google": (110 * 1.25 + 40 * 0.125 + 12 * 10.0) / 1e6,
}
"""The price of SECOND by the shipped file, in US dollars."""


@streams
@providers
async def test_raw_completions(serve: Serve, store: Store, provider: str, stream: bool) -> None:
    async with PROVIDERS[provider]() as api, serve(engine_of(api)) as gateway, openai_client(gateway.url) as client:
        if provider != "openai":
            with pytest.raises(BadRequestError, match="no raw completions"):
                await client.completions.create(model="m", prompt="def f", stream=stream)
            assert api.bodies == []
            return
        api.script(Scripted("(x)"))
        if stream:
            parts = await client.completions.create(model="m", prompt="def f", stream=True)
            text = "".join([chunk.choices[0].text async for chunk in parts if chunk.choices])
        else:
            text = (await client.completions.create(model="m", prompt="def f")).choices[0].text
    assert text == "(x)"
    (call,) = await recorded_calls(store, count=1)
    assert (call.status, call.price_usd is not None) == ("no_tokens", True)
