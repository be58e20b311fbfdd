"""The Responses API of the official `openai` SDK against a running gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from polar_proxy.dialects.base import ReferencedCall
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.engines.scripted import END, Script, ScriptedAnswer, ScriptedEngine, ScriptedReply, encode, logprob
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.store import Store
from polar_proxy.types import EngineRequest, Json, Message, ToolCall
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.gateway.agents import chat_request, connected_sdk, recorded_calls

pytestmark = pytest.mark.slow

TOOLS: Any = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Edit files."},
    {"type": "namespace", "name": "ns", "description": "", "tools": [{"type": "custom", "name": "exec"}]},
]
CALLS = (
    ToolCall("call_1", "bash", '{"command": "grep -n \\"é\\" a.py", "deep": {"b": [1, 2.5, null, true]}}'),
    ToolCall("call_2", "apply_patch", json.dumps({"input": "*** Begin Patch\né"})),
    ToolCall("call_3", "ns__exec", '{"input": "1+1"}'),
)


def thinking(script: Script) -> ScriptedEngine:
    """Return an engine that gives the script's answers after the reasoning "hm"."""
    return ScriptedEngine(lambda request: replace(ScriptedReply.of(script(request)), reasoning="hm"))


async def ask(client: AsyncOpenAI, stream: bool, **fields: Any) -> Response:
    """Return the final response, from the SDK's own stream helper or in one piece."""
    if not stream:
        answer = await client.responses.create(model="m", **fields)
        assert isinstance(answer, Response)
        return answer
    async with client.responses.stream(model="m", **fields) as events:
        return await events.get_final_response()


both = pytest.mark.parametrize("stream", [False, True])


@both
async def test_answer(serve: Serve, stream: bool) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        answer = await ask(client, stream, input="hi", instructions="be exact", metadata={"a": "b"})
    assert answer.output_text == "hello"
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert (answer.instructions, answer.metadata, answer.tool_choice) == ("be exact", {"a": "b"}, "auto")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("hello") + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_stream_events(serve: Serve) -> None:
    async with connected_sdk(serve, thinking(lambda request: "hello")) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_summary_text.delta" in kinds
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello"


@both
async def test_parallel_tool_calls_round_trip_and_continue(serve: Serve, store: Store, stream: bool) -> None:
    """Each kind of tool call comes as its own kind of item and goes back with its result; the next call continues."""

    def script(request: EngineRequest) -> ScriptedAnswer:
        return "done" if len(engine.requests) > 1 else CALLS

    engine = thinking(script)
    question = {"role": "user", "content": "hi"}
    async with connected_sdk(serve, engine) as client:
        answer = await ask(client, stream, input=[question], tools=TOOLS, store=False)
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        kinds = ["reasoning", "function_call", "custom_tool_call", "custom_tool_call"]
        assert [item["type"] for item in items] == kinds
        assert [item["call_id"] for item in items[1:]] == ["call_1", "call_2", "call_3"]
        assert items[1]["arguments"] == CALLS[0].arguments
        assert items[2]["input"] == "*** Begin Patch\né"
        assert (items[3]["namespace"], items[3]["name"], items[3]["input"]) == ("ns", "exec", "1+1")
        outputs = [{"type": item["type"] + "_output", "call_id": item["call_id"], "output": "ok"} for item in items[1:]]
        history: Any = [question, *items, *outputs]
        last = await ask(client, stream, input=history, tools=TOOLS, store=False)
    assert last.output_text == "done"
    assert [tool["function"]["name"] for tool in chat_request(engine).tools] == ["bash", "apply_patch", "ns__exec"]
    user, assistant, *results = chat_request(engine).messages
    assert user == Message("user", "hi")
    assert assistant.reasoning == "hm"
    assert [(c.id, c.name, json.loads(c.arguments)) for c in assistant.tool_calls] == [
        (c.id, c.name, json.loads(c.arguments)) for c in CALLS
    ]
    assert [(m.role, m.tool_call_id) for m in results] == [("tool", c.id) for c in CALLS]
    first, second = await recorded_calls(store)
    assert (second.edge, second.parent_call_id) == ("continues", first.call_id)
    assert first.tools is not None
    assert json.loads(first.tools) == TOOLS


@both
async def test_continues_a_previous_response(serve: Serve, store: Store, stream: bool) -> None:
    """Only new items are sent. The model sees all items and the call records all. Instructions are not inherited."""
    replies: list[ScriptedAnswer] = [CALLS, "second", "third"]
    engine = thinking(lambda request: replies[len(engine.requests) - 1])
    async with connected_sdk(serve, engine) as client:
        one = await ask(client, stream, input="one", instructions="first rule", tools=TOOLS)
    results: Any = [{"type": "function_call_output", "call_id": call.id, "output": "ok"} for call in CALLS]
    async with connected_sdk(serve, engine) as client:  # a gateway that has just started
        two = await ask(client, stream, input=results, previous_response_id=one.id, instructions="second rule")
        three = await ask(client, stream, input="three", previous_response_id=two.id)
    assert (two.previous_response_id, three.previous_response_id) == (one.id, two.id)
    assert three.output_text == "third"
    assert chat_request(engine, 1).messages[0] == Message("system", "second rule")
    seen = chat_request(engine, 2).messages
    assert [message.role for message in seen] == ["user", "assistant", "tool", "tool", "tool", "assistant", "user"]
    assert seen[1].tool_calls == CALLS
    assert [message.reasoning for message in seen if message.role == "assistant"] == ["hm", "hm"]
    calls = await recorded_calls(store)
    assert ["resp_" + call.call_id.removeprefix("call_") for call in calls] == [one.id, two.id, three.id]
    assert len(calls[2].messages) == 1 + 4 + 3 + 2 + 1


@pytest.mark.parametrize("identity", ["resp_0", "resp_01hv0000000000000000", "msg_1", "nonsense", ""])
async def test_rejects_an_unknown_previous_response(serve: Serve, identity: str) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="hi", previous_response_id=identity)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_continues_only_complete_responses(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine()
    async with connected_sdk(serve, engine) as client:
        completion = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    async with connected_sdk(serve, BrokenEngine()) as client:
        with pytest.raises(openai.APIError):
            await client.responses.create(model="m", input="hi")
    chatted, broken = await recorded_calls(store)
    assert chatted.call_id in completion.id
    assert (broken.status, broken.choices[0].message.content) == ("upstream_error", "he")
    async with connected_sdk(serve, engine) as client:
        for call, message in ((chatted, "not found"), (broken, "ended early")):
            identity = "resp_" + call.call_id.removeprefix("call_")
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                await client.responses.create(model="m", input="go on", previous_response_id=identity)
            assert caught.value.code == "previous_response_not_found"


async def test_a_short_body_that_continues_a_long_conversation_keeps_the_loop_free(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length of the conversation decides, not that of the body."""
    threads: list[str] = []
    write_out = OpenAIResponses.write_out_references

    def noted(self: OpenAIResponses, body: Json, calls: Mapping[str, ReferencedCall], *items: Any) -> Json:
        threads.append(threading.current_thread().name)
        return write_out(self, body, calls, *items)

    monkeypatch.setattr(OpenAIResponses, "write_out_references", noted)
    async with connected_sdk(serve, ScriptedEngine()) as client:
        for text in ("hi", "x" * (1 << 20)):
            one = await client.responses.create(model="m", input=text)
            await client.responses.create(model="m", input="go on", previous_response_id=one.id)
    assert [name == threading.main_thread().name for name in threads] == [True, False]


@both
async def test_structured_output(serve: Serve, stream: bool) -> None:
    class Point(BaseModel):
        x: int

    engine = ScriptedEngine(lambda request: '{"x": 3}')
    async with connected_sdk(serve, engine) as client:
        if stream:
            async with client.responses.stream(model="m", input="hi", text_format=Point) as events:
                parsed = (await events.get_final_response()).output_parsed
        else:
            parsed = (await client.responses.parse(model="m", input="hi", text_format=Point)).output_parsed
    assert parsed == Point(x=3)
    form = chat_request(engine).response_format
    assert form is not None
    assert form["json_schema"]["schema"]["properties"] == {"x": {"title": "X", "type": "integer"}}


async def test_length(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        answer = await client.responses.create(model="m", input="hi", max_output_tokens=3)
        stream = await client.responses.create(model="m", input="hi", max_output_tokens=3, stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    for found in (answer, last.response):
        assert (found.status, found.output_text) == ("incomplete", "hel")
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.output[0].status == "incomplete"  # type: ignore[union-attr]


@both
async def test_logprobs(serve: Serve, stream: bool) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as client:
        answer = await ask(client, stream, input="hi", include=["message.output_text.logprobs"])
    content: Any = answer.output[0].content  # type: ignore[union-attr]
    assert [item.logprob for item in content[0].logprobs] == [logprob(token) for token in encode("hello")]
    assert END not in encode("hello")


async def test_token_count(serve: Serve) -> None:
    engine = ScriptedEngine()
    async with connected_sdk(serve, engine) as client:
        counted = await client.responses.input_tokens.count(model="m", input="hi", instructions="be exact")
        answer = await client.responses.create(model="m", input="hi", instructions="be exact")
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(engine.requests) == 1


async def test_rejects_a_bad_request(serve: Serve, store: Store) -> None:
    bad: Json = {"type": "hologram", "content": "x"}
    async with connected_sdk(serve, ScriptedEngine()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input=[bad])  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.create(model="m", input="hi", background=True, store=False)
    assert (caught.value.param, caught.value.type) == ("input[0]", "invalid_request_error")
    assert [session.calls for session in await store.sessions.recent()] == [0]


async def test_rejects_an_unknown_key(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine(), require_known_keys=True) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.responses.create(model="m", input="hi")
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("too long", code="context_length_exceeded"), openai.BadRequestError),
        (EngineError("busy", status=429), openai.RateLimitError),
        (EngineError("down", status=503), openai.InternalServerError),
    ],
)
@both
async def test_engine_errors(serve: Serve, error: Exception, kind: type[openai.APIStatusError], stream: bool) -> None:
    async with connected_sdk(serve, ScriptedEngine(lambda request: error)) as client:
        with pytest.raises(kind, match=str(error)):
            await client.responses.create(model="m", input="hi", stream=stream)


async def test_an_error_in_the_middle_of_a_stream_is_reported(serve: Serve) -> None:
    async with connected_sdk(serve, BrokenEngine()) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        events = [event async for event in stream]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "he"
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "The scripted engine broke.")
