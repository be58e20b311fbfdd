"""Budgets of sessions at a running gateway: official SDKs of each dialect, several gateways, and restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from anthropic import APIStatusError as AnthropicError
from anthropic import AsyncAnthropic
from google import genai
from google.genai import errors, types
from openai import APIStatusError, AsyncOpenAI

from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.store import Store
from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.grades import excluded_calls
from polar_proxy.types import EngineRequest
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client, new_session
from tests.gateway.shared_gateways import ask, run_gateway
from tests.store.conftest import postgres, postgres_template, url

pytestmark = pytest.mark.slow

__all__ = ["postgres", "postgres_template", "url"]

KEY = "sk-budget-of-the-test"
Ask = Callable[[str, bool], Awaitable[str]]
USER: Any = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def sdk_of(dialect: str, address: str) -> AsyncIterator[Ask]:
    """Yield a function that asks in a dialect and returns the answer's text. The SDK repeats requests as it likes."""
    openai = AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY)
    anthropic = AsyncAnthropic(base_url=address, api_key=KEY)
    google: Any = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=address)).aio

    async def chat(text: str, stream: bool) -> str:
        messages: Any = [{"role": "user", "content": text}]
        answer: Any = await openai.chat.completions.create(model="m", messages=messages, stream=stream)
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([part.choices[0].delta.content or "" async for part in answer if part.choices])

    async def completions(text: str, stream: bool) -> str:
        answer: Any = await openai.completions.create(model="m", prompt=text, stream=stream)
        return "".join([part.choices[0].text async for part in answer]) if stream else str(answer.choices[0].text)

    async def responses(text: str, stream: bool) -> str:
        answer: Any = await openai.responses.create(model="m", input=text, stream=stream)
        if not stream:
            return str(answer.output_text)
        return "".join([event.delta async for event in answer if event.type == "response.output_text.delta"])

    async def messages(text: str, stream: bool) -> str:
        given: Any = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": text}]}
        if not stream:
            return "".join(getattr(block, "text", "") for block in (await anthropic.messages.create(**given)).content)
        async with anthropic.messages.stream(**given) as answer:
            return await answer.get_final_text()

    async def generate(text: str, stream: bool) -> str:
        if not stream:
            return str((await google.models.generate_content(model="m", contents=text)).text)
        answer = await google.models.generate_content_stream(model="m", contents=text)
        return "".join([part.text or "" async for part in answer])

    async with openai, anthropic:
        yield {
            "openai_chat": chat,
            "openai_completions": completions,
            "openai_responses": responses,
            "anthropic_messages": messages,
            "google_generate_content": generate,
        }[dialect]


DIALECTS = (
    *("openai_chat", "openai_completions", "openai_responses"),
    *("anthropic_messages", "google_generate_content"),
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_sdks_get_the_dialects_own_refusal(serve: Serve, store: Store, dialect: str, stream: bool) -> None:
    session = await new_session(store, KEY, {"max_calls": 2})
    engine = ScriptedEngine()
    async with serve(engine) as gateway, sdk_of(dialect, gateway.url) as ask_model:
        assert [await ask_model(f"number {number}", stream) for number in range(2)] == ["hello", "hello"]
        with pytest.raises((APIStatusError, AnthropicError, errors.APIError)) as refused:
            await ask_model("one more", stream)
    status = getattr(refused.value, "status_code", None) or refused.value.code  # type: ignore[union-attr]
    assert status == 403
    assert "max_calls = 2" in str(refused.value)
    assert len(engine.requests) == 2
    row = await store.sessions.get(session)
    assert row is not None
    assert row.spent == "max_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_final_answer_is_recorded_and_never_trained(
    serve: Serve, store: Store, dialect: str, stream: bool
) -> None:
    session = await new_session(store, KEY, {"max_calls": 1, "at_budget": "stop"})
    async with serve(ScriptedEngine()) as gateway, sdk_of(dialect, gateway.url) as ask_model:
        assert await ask_model("go", stream) == "hello"
        assert "Finish now" in await ask_model("and now", stream)
    calls = await store.calls.of_session(session)
    assert [call.status for call in calls] == ["ok", "budget"]
    own = calls[1]
    assert own.engine is None
    assert own.choices[0].token_ids.size == 0
    assert "not from the model" in str(own.choices[0].message.content)
    assert excluded_calls(calls) == {own.call_id: "budget"}
    for builder in BUILDERS:  # each call is in a trace or excluded
        traces = build(calls, builder).traces
        assert [call_id for trace in traces for call_id in trace.call_ids] == [calls[0].call_id]


async def test_counts_calls_in_flight(serve: Serve, store: Store) -> None:
    session = await new_session(store, KEY, {"max_calls": 5})
    engine = ScriptedEngine(lambda request: ScriptedReply("slow", wait=0.2))
    async with serve(engine) as gateway, client(gateway.url, KEY) as http:
        answers = await asyncio.gather(*(http.post("/chat/completions", json=CHAT) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [403] * 7
    assert len(await store.calls.of_session(session)) == 5


async def test_the_budget_outlives_the_gateway(serve: Serve, store: Store) -> None:
    await new_session(store, KEY, {"max_sampled_tokens": 13})
    statuses = []
    for _ in range(4):  # an answer has six tokens
        async with serve(ScriptedEngine()) as gateway, client(gateway.url, KEY) as http:
            statuses.append((await http.post("/chat/completions", json=CHAT)).status_code)
    assert statuses == [200, 200, 200, 403]


@pytest.mark.parametrize("restart", [False, True])
async def test_ends_an_agent_that_repeats_itself(serve: Serve, store: Store, restart: bool) -> None:
    await new_session(store, KEY, {"max_repeats": 3})
    messages: list[Any] = list(USER)
    statuses: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(serve(ScriptedEngine(lambda request: "ls again")))
        for turn in range(6):
            if restart:
                await stack.aclose()
                gateway = await stack.enter_async_context(serve(ScriptedEngine(lambda request: "ls again")))
            async with client(gateway.url, KEY) as http:
                answer = await http.post("/chat/completions", json={"model": "m", "messages": messages})
            statuses.append(answer.status_code)
            if answer.status_code != 200:
                break
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"result {turn}"}]
    assert statuses == [200, 200, 200, 403]


async def test_different_answers_are_no_loop(serve: Serve, store: Store) -> None:
    await new_session(store, KEY, {"max_repeats": 2})
    engine = ScriptedEngine(lambda request: f"step {len(engine.requests)}")
    messages: list[Any] = list(USER)
    async with serve(engine) as gateway, client(gateway.url, KEY) as http:
        for turn in range(5):
            answer = await http.post("/chat/completions", json={"model": "m", "messages": messages})
            assert answer.status_code == 200
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"result {turn}"}]


async def test_ends_a_session_that_was_idle(serve: Serve, store: Store) -> None:
    session = await new_session(store, KEY, {"max_idle_seconds": 0.3})
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, KEY) as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        assert await gateway.budget_spent(session, idle_since=0.0) is None
        await asyncio.sleep(0.4)
        assert await gateway.budget_spent(session, idle_since=0.0) == "max_idle_seconds"
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 403


async def test_gateways_of_one_database_share_the_budget(url: str) -> None:
    async with run_gateway(url) as (first, store), run_gateway(url) as (second, _):
        await new_session(store, KEY, {"max_calls": 4})
        statuses = [
            (await ask(gateway, KEY, [{"role": "user", "content": f"{turn}"}])).status_code
            for turn, gateway in enumerate((first, second) * 4)
        ]
    assert statuses == [200] * 4 + [403] * 4


@pytest.mark.parametrize("at_budget", ["refuse", "stop"])
async def test_gateways_that_answer_at_the_same_time_never_exceed_the_limit_of_calls(url: str, at_budget: str) -> None:
    asked: list[EngineRequest] = []

    def slow(request: EngineRequest) -> ScriptedReply:
        asked.append(request)
        return ScriptedReply("slow", wait=0.3)

    async with run_gateway(url, slow) as (first, store), run_gateway(url, slow) as (second, _):
        session = await new_session(store, KEY, {"max_calls": 5, "at_budget": at_budget})
        for gateway in (first, second):  # both know the session
            assert (await ask(gateway, KEY, [{"role": "user", "content": gateway.url}])).status_code == 200
        answers = await asyncio.gather(
            *(ask((first, second)[turn % 2], KEY, [{"role": "user", "content": f"{turn}"}]) for turn in range(10))
        )
        late = await ask(first, KEY, [{"role": "user", "content": "late"}])
        calls = await store.calls.of_session(session)
        row = await store.sessions.get(session)
        assert not await store.open_calls.of_session(session)
    assert len(asked) == 5
    assert sum(call.status == "ok" for call in calls) == 5
    assert row is not None
    assert row.spent == "max_calls"
    if at_budget == "refuse":
        assert sorted(answer.status_code for answer in (*answers, late)) == [200] * 3 + [403] * 8
        assert len(calls) == 5
    else:
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in (*answers, late)]
        assert sorted("Finish now" in text for text in texts) == [False] * 3 + [True] * 8
        assert excluded_calls(calls) == {call.call_id: "budget" for call in calls if call.status == "budget"}
    for builder in BUILDERS:
        built = build(calls, builder)
        assert len(built.excluded) + sum(len(trace.call_ids) for trace in built.traces) == len(calls)
    assert {call.parent_call_id for call in calls} <= {None, *(call.call_id for call in calls)}
