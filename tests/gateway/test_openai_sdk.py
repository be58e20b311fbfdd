"""The official `openai` SDK against a running gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from polar_proxy.engines.scripted import END, ScriptedAnswer, ScriptedEngine, encode, logprob
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.store import Store
from polar_proxy.types import EngineRequest, ToolCall
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.gateway.agents import connected_sdk, recorded_calls

pytestmark = pytest.mark.slow

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
CALLS = (
    ToolCall("call_1", "bash", '{"command": "grep -n \\"é\\" a.py", "deep": {"b": [1, 2.5, null, true]}}'),
    ToolCall("call_2", "bash", "{}"),
)


def failing(error: Exception) -> ScriptedEngine:
    return ScriptedEngine(lambda request: error)


async def test_answer(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        answer = await client.chat.completions.create(model="m", messages=USER)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("hello") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_stream(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        stream = await client.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


async def test_sync_client_in_threads(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway:

        def ask(number: int) -> str | None:
            with OpenAI(base_url=gateway.url + "/v1", api_key=f"k{number}", max_retries=0) as client:
                return client.chat.completions.create(model="m", messages=USER).choices[0].message.content

        assert await asyncio.gather(*(asyncio.to_thread(ask, number) for number in range(4))) == ["hello"] * 4
    assert [session.calls for session in await store.sessions.recent()] == [1] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls_round_trip_and_continue(serve: Serve, store: Store, stream: bool) -> None:
    """Arguments keep every character, come back with the tools' results, and the next call continues."""

    def script(request: EngineRequest) -> ScriptedAnswer:
        return "done" if len(engine.requests) > 1 else CALLS

    engine = ScriptedEngine(script)
    async with connected_sdk(serve, engine) as client:
        if stream:
            async with client.chat.completions.stream(model="m", messages=USER, tools=TOOLS) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        found = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert found == [(call.id, call.name, call.arguments) for call in CALLS]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in CALLS]
        history: Any = [*USER, choice.message.model_dump(exclude_none=True), *results]
        last = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
    assert last.choices[0].message.content == "done"
    first, second = await recorded_calls(store)
    assert (second.edge, second.parent_call_id) == ("continues", first.call_id)
    assert first.tools is not None
    assert json.loads(first.tools) == TOOLS


async def test_the_stream_helper_of_the_sdk(serve: Serve) -> None:
    async with (
        connected_sdk(serve, ScriptedEngine()) as client,
        client.chat.completions.stream(
            model="m", messages=USER, logprobs=True, stream_options={"include_usage": True}
        ) as events,
    ):
        kinds = [event.type async for event in events]
        answer = await events.get_final_completion()
    assert "content.delta" in kinds
    assert "content.done" in kinds
    assert answer.choices[0].message.content == "hello"
    assert answer.usage is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [item.logprob for item in logprobs.content] == [logprob(token) for token in [*encode("hello"), END]]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(serve: Serve, stream: bool) -> None:
    replies = iter(["one", "two", "three"])
    engine = ScriptedEngine(lambda request: next(replies))
    async with connected_sdk(serve, engine) as client:
        if stream:
            texts = ["", "", ""]
            async for chunk in await client.chat.completions.create(model="m", messages=USER, n=3, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        else:
            answer = await client.chat.completions.create(model="m", messages=USER, n=3)
            texts = [choice.message.content or "" for choice in answer.choices]
    assert texts == ["one", "two", "three"]


async def test_logprobs_and_token_ids(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        answer = await client.chat.completions.create(
            model="m", messages=USER, logprobs=True, extra_body={"return_token_ids": True}
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    ids = [*encode("hello"), END]
    assert [item.logprob for item in logprobs.content] == [logprob(token) for token in ids]
    assert bytes(byte for item in logprobs.content for byte in item.bytes or []) == b"hello"
    extra = answer.model_dump()
    assert extra["choices"][0]["token_ids"] == ids
    assert extra["prompt_token_ids"] == [1, *encode("user:hi"), 2, 1, *encode("assistant:")]


async def test_response_format(serve: Serve, store: Store) -> None:
    """Supported formats reach the engine; an unknown one is rejected by name."""
    engine = ScriptedEngine(lambda request: "{}")
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    async with connected_sdk(serve, engine) as client:
        for form in ({"type": "text"}, {"type": "json_object"}, schema):
            await client.chat.completions.create(model="m", messages=USER, response_format=form)  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=USER, response_format={"type": "xml"})  # type: ignore[call-overload]
    assert caught.value.param == "response_format"
    assert [getattr(request, "response_format", 0) for request in engine.requests] == [
        None,
        {"type": "json_object"},
        schema,
    ]


async def test_completions(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        answer = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=3, logprobs=0)
        assert [choice.text for choice in answer.choices] == ["hel", "hel"]
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.tokens == ["h", "e", "l"]
        assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
        stream = await client.completions.create(model="m", prompt="a", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        assert [model.id async for model in client.models.list()] == ["scripted-model"]
        assert (await client.models.retrieve("any/name")).id == "any/name"


async def test_rejects_an_unknown_key(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine(), require_known_keys=True) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model="m", messages=USER)
    assert caught.value.code == "invalid_api_key"


async def test_rejects_a_bad_request(serve: Serve, store: Store) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=USER, temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    assert caught.value.type == "invalid_request_error"
    assert [session.calls for session in await store.sessions.recent()] == [0]


async def test_not_found(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="hi")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("too long", code="context_length_exceeded"), openai.BadRequestError),
        (EngineError("busy", status=429), openai.RateLimitError),
        (EngineError("down", status=503), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors(serve: Serve, error: Exception, kind: type[openai.APIStatusError], stream: bool) -> None:
    async with connected_sdk(serve, failing(error)) as client:
        with pytest.raises(kind, match=str(error)):
            await client.chat.completions.create(model="m", messages=USER, stream=stream)


async def test_an_error_in_the_middle_of_a_stream_is_raised(serve: Serve) -> None:
    heard: list[str] = []

    async def listen(client: AsyncOpenAI) -> None:
        async for chunk in await client.chat.completions.create(model="m", messages=USER, stream=True):
            heard.append(chunk.choices[0].delta.content or "")

    async with connected_sdk(serve, BrokenEngine()) as client:
        with pytest.raises(openai.APIError, match="The scripted engine broke"):
            await listen(client)
    assert "".join(heard) == "he"
