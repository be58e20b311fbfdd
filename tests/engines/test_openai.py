"""`openai`: requests fit any OpenAI-compatible API; answers are passed on and recorded as text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from polar_proxy.config import EngineSettings
from polar_proxy.dialects.base import Answer as Gathered
from polar_proxy.engines.factory import make_engine
from polar_proxy.engines.hosted.base import CONTEXT_LENGTH
from polar_proxy.engines.hosted.openai import OpenAIEngine
from polar_proxy.engines.openai_client import ServerEngine
from polar_proxy.engines.vllm.engine import VllmEngine
from polar_proxy.errors import EngineError, RequestError, UsageError
from polar_proxy.store import Store
from polar_proxy.traces.builders import build
from polar_proxy.types import ChatRequest, EngineRequest, Json, Message, Sampling, TextRequest, ToolCall
from tests.conftest import Serve
from tests.engines.engine_contract import WEATHER, chat
from tests.fakes.engine_server import Fault
from tests.fakes.strict_api import StrictApi
from tests.fakes.vllm_server import Answer

pytestmark = pytest.mark.slow

streams = pytest.mark.parametrize("stream", [False, True])
CALLING = Answer("Let me look.", reasoning="Hm.", tool_calls=(("get_weather", '{"city":  "Zürich"}'),))


async def gathered(engine: OpenAIEngine, request: EngineRequest, *, stream: bool = True) -> Gathered:
    answer = Gathered()
    async for event in engine.sample(request, stream=stream):
        answer.add(event)
    assert answer.finished
    return answer


def connected(api: StrictApi, path: str = "/v1") -> OpenAIEngine:
    return OpenAIEngine(api.url + path, model="fake")


@streams
async def test_returns_text_reasoning_and_calls_without_ids(stream: bool) -> None:
    async with StrictApi() as api, connected(api) as engine:
        api.script(CALLING)
        answer = await gathered(engine, chat(sampling=Sampling(), tools=(WEATHER,)), stream=stream)
        state = answer.choices[0]
        message = state.message.to_openai()
        assert (message["content"], message["reasoning_content"]) == ("Let me look.", "Hm.")
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":  "Zürich"}'}
        assert state.finish_reason == "tool_calls"
        assert (answer.prompt_ids, state.token_ids, state.logprobs) == (None, [], [])
        assert answer.prompt_tokens > 100  # the API's own count
        assert answer.completion_tokens == len(CALLING.tokens())
        assert api.bodies[-1].get("stream", False) is stream


async def test_sends_only_documented_fields() -> None:
    everything = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        max_tokens=30,
        seed=3,
        stop=("x",),
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": 1.0},
        logprobs=True,
        top_logprobs=3,
    )
    form: Json = {"type": "json_object"}
    more: dict[str, Any] = {"tools": (WEATHER,), "tool_choice": "auto", "parallel_tool_calls": False}
    async with StrictApi() as api, connected(api) as engine:  # it refuses unknown fields
        answer = await gathered(engine, chat(sampling=everything, response_format=form, **more))
        assert sorted(answer.choices) == [0, 1]
        body = api.bodies[-1]
        assert {"top_k", "min_p", "logprobs", "top_logprobs", "return_token_ids"}.isdisjoint(body)
        assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 30, 3)
        assert (body["n"], body["stop"], body["logit_bias"]) == (2, ["x"], {"5": 1.0})
        assert (body["response_format"], body["tool_choice"], body["parallel_tool_calls"]) == (form, "auto", False)
        await gathered(engine, chat(sampling=Sampling()), stream=False)
        assert sorted(api.bodies[-1]) == ["messages", "model"]


def _turns() -> tuple[Message, ...]:
    call = ToolCall("c1", "get_weather", "{}")
    return (
        Message("user", "Weather?"),
        Message("assistant", None, reasoning="Look first.", tool_calls=(call,)),
        Message("tool", "rain", tool_call_id="c1"),
    )


@pytest.mark.parametrize("wants", [False, True])
async def test_sends_earlier_reasoning_only_if_the_api_requires_it(wants: bool) -> None:
    async with StrictApi(wants_reasoning=wants) as api, connected(api) as engine:
        request = replace(chat(), messages=_turns())
        for _ in range(2):
            await gathered(engine, request)
        assert len(api.bodies) == (3 if wants else 2)  # refused once, then known
        assert ("reasoning_content" in api.bodies[-1]["messages"][1]) is wants
        assert api.bodies[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_learns_the_newer_name_of_the_token_limit() -> None:
    async with StrictApi(newer_limit=True) as api, connected(api) as engine:
        for _ in range(2):
            await gathered(engine, chat())
        assert ["max_tokens" in body for body in api.bodies] == [True, False, False]
        assert api.bodies[-1]["max_completion_tokens"] == 24


async def test_requests_at_the_same_time_all_learn_the_newer_name() -> None:
    async with StrictApi(newer_limit=True) as api, connected(api) as engine:
        await asyncio.gather(*(gathered(engine, chat()) for _ in range(8)))
        assert sum("max_completion_tokens" in body for body in api.bodies) == 8


@streams
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_passes_on_overload_with_its_retry_after(serve: Serve, store: Store, status: int, stream: bool) -> None:
    async with StrictApi(retry_after="17") as api, serve(connected(api)) as gateway:
        api.script(Fault(status, "slow down"))
        async with httpx.AsyncClient(
            base_url=gateway.url + "/v1", headers={"authorization": "Bearer k"}, timeout=120
        ) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            answer = await http.post("/chat/completions", json=body)
        assert answer.status_code == status
        assert answer.headers["retry-after"] == "17"
        assert "slow down" in answer.json()["error"]["message"]
        (row,) = await store.sessions.recent()
        (call,) = await store.calls.of_session(row.session_id)
        assert (call.status, call.http_status) == ("upstream_error", answer.status_code)


@streams
async def test_calls_are_recorded_as_text_and_never_trained(serve: Serve, store: Store, stream: bool) -> None:
    async with StrictApi() as api, serve(connected(api)) as gateway:
        api.script(CALLING)
        async with httpx.AsyncClient(
            base_url=gateway.url + "/v1", headers={"authorization": "Bearer k"}, timeout=120
        ) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "stream": stream}
            answer = await http.post("/chat/completions", json=body)
        assert answer.status_code == 200
        (row,) = await store.sessions.recent()
        (call,) = await store.calls.of_session(row.session_id)
        assert (call.status, call.prompt_ids, call.choices[0].token_ids.size) == ("no_tokens", None, 0)
        assert call.choices[0].message.content == "Let me look."
        if not stream:  # the API's own count, by which agents know how full the context is
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] > usage["prompt_tokens_details"]["cached_tokens"] > 0
            assert usage["completion_tokens"] == len(CALLING.tokens())
        assert call.engine is not None
        assert (call.engine.engine, call.engine.model) == ("openai", "fake")
        assert build([call], "per_call").excluded == {call.call_id: "no_tokens"}


@pytest.mark.parametrize(
    ("path", "root"), [("", "/v1"), ("/v1", "/v1"), ("/api/v1/", "/api/v1"), ("/v1beta/openai/", "/v1beta/openai")]
)
async def test_url_root(path: str, root: str) -> None:
    paths: list[str] = []
    async with StrictApi() as api:
        plain = api.plain

        def recording(path: str, body: Json) -> tuple[int, Json]:
            paths.append(path)
            return plain(path, body)

        api.plain = recording  # type: ignore[method-assign]
        async with OpenAIEngine(api.url + path) as engine:
            assert engine.info.model == "fake"
            assert await engine.health() is None
    assert paths == [f"{root}/models"] * 2


async def test_info_from_the_models_route() -> None:
    async with StrictApi(lists_models=False) as api:
        with pytest.raises(EngineError, match="--model"):
            await OpenAIEngine(api.url).__aenter__()
        async with connected(api) as engine:
            assert engine.info.context_length == CONTEXT_LENGTH
            assert {"token_ids", "logprobs", "score", "continue"}.isdisjoint(engine.info.capabilities)
    async with StrictApi(context_length=777) as api, connected(api) as engine:
        assert engine.info.context_length == 777
    async with StrictApi(api_key="right") as api:
        with pytest.raises(EngineError, match="key"):
            await OpenAIEngine(api.url, model="fake", api_key="wrong").__aenter__()
        async with OpenAIEngine(api.url, model="fake", api_key="right") as engine:
            await gathered(engine, chat())


async def test_rejects_what_it_cannot_do() -> None:
    async with StrictApi() as api, connected(api) as engine:
        for doing in (engine.render(chat()), engine.score([1, 2]), gathered(engine, TextRequest("m", (1, 2)))):
            with pytest.raises(RequestError, match="token"):
                await doing
        assert (await gathered(engine, TextRequest("m", "def"))).choices[0].message.content == "Hello."
        api.script(Answer("Hello there", drop_after=2))
        with pytest.raises(EngineError, match="broke off"):
            await gathered(engine, chat())
        api.script(Fault(200, body=b'{"error": {"message": "provider is down", "code": 503}}'))
        with pytest.raises(EngineError, match="provider is down") as caught:
            await gathered(engine, chat(), stream=False)
        assert caught.value.status == 503


def test_make_engine_from_settings() -> None:
    assert isinstance(make_engine(EngineSettings(kind="openai", url="https://api.example.com/v1")), OpenAIEngine)
    with pytest.raises(UsageError, match="--engine-url"):
        make_engine(EngineSettings(kind="vllm"))
    with pytest.raises(UsageError, match=r"no folder /none .*engine\.model_folder"):
        make_engine(EngineSettings(kind="vllm", url="http://127.0.0.1:9", model_folder="/none"))


@pytest.mark.parametrize("make", [OpenAIEngine, VllmEngine])
async def test_an_engine_that_was_not_entered_says_so(make: type[ServerEngine]) -> None:
    """Not that its server cannot be reached."""
    engine = make("http://127.0.0.1:9", model="m")  # type: ignore[call-arg]
    request = ChatRequest(model="m", messages=(), sampling=Sampling())
    assert "not open" in str(await engine.health())
    with pytest.raises(EngineError, match="not open"):
        async for _ in engine.sample(request):
            pass
    if isinstance(engine, VllmEngine):
        accepted = engine.accept_prompt(request, np.array([1], dtype=np.int32))
        for use in (engine.render(request), engine.decode([1]), engine.load(), accepted):
            with pytest.raises(EngineError, match="not open"):
                await use
