"""The official `anthropic` SDK against a running gateway."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from polar_proxy.dialects.wire import unseal
from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.scripted import INFO, ScriptedAnswer, ScriptedEngine, encode
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest, SampleEvent, ToolCall, ToolDelta
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.gateway.agents import recorded_calls

pytestmark = pytest.mark.slow

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "bash", "description": "Runs it.", "input_schema": {"type": "object"}}]
CALLS = (
    ToolCall("call_1", "bash", '{"command": "grep -n \\"é\\" a.py", "deep": {"b": [1, 2.5, null, true]}}'),
    ToolCall("call_2", "bash", "{}"),
)
Script = Callable[[ChatRequest], Sequence[SampleEvent]]


class EventsEngine(ScriptedEngine):
    """Answers with given events (reasoning, stop strings, tool calls in pieces) and invented ids."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._events = script

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        assert isinstance(request, ChatRequest)
        self.requests.append(request)
        ids = tuple(await self.render(request))
        for number, event in enumerate(self._events(request)):
            evidence: Any = {"token_ids": (7,), "logprobs": (-0.5,)}
            evidence["prompt_ids"] = ids if number == 0 else None
            yield SampleEvent(
                text=event.text,
                reasoning=event.reasoning,
                tool_calls=event.tool_calls,
                finish_reason=event.finish_reason,
                cached_tokens=event.cached_tokens,
                stop_sequence=event.stop_sequence,
                **evidence,
            )


@contextlib.asynccontextmanager
async def connected(serve: Serve, engine: ScriptedEngine, **settings: Any) -> AsyncIterator[AsyncAnthropic]:
    async with (
        serve(engine, **settings) as gateway,
        AsyncAnthropic(base_url=gateway.url, api_key="sk-test", max_retries=0, timeout=120) as client,
    ):
        yield client


async def ask(client: AsyncAnthropic, stream: bool, **body: Any) -> Message:
    """Return the answer, assembled by the SDK's own accumulator if it is streamed."""
    body = {"model": "m", "messages": USER, "max_tokens": 100, **body}
    if not stream:
        return await client.messages.create(**body)
    async with client.messages.stream(**body) as events:
        return await events.get_final_message()


def echo(answer: Message) -> Any:
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}


both = pytest.mark.parametrize("stream", [False, True])


@both
async def test_answer(serve: Serve, store: Store, stream: bool) -> None:
    engine = ScriptedEngine()
    async with connected(serve, engine) as client:
        answer = await ask(client, stream, system="Be brief.", metadata={"user_id": "u"}, service_tier="auto")
        prompt = await engine.render(engine.requests[0])  # type: ignore[arg-type]
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [{"type": "text", "text": "hello"}]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "m")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == len(prompt)
    assert answer.usage.output_tokens == len("hello") + 1
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (0, 0)
    (call,) = await recorded_calls(store)
    assert answer.id == "msg_" + call.call_id
    assert call.dialect == "anthropic_messages"
    record = await store.calls.get(call.call_id)
    assert record is not None
    assert [json.loads(message)["role"] for message in record.messages] == ["system", "user"]


async def test_stream_events(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine(tokens_per_event=1)) as client:
        stream = await client.messages.create(model="m", messages=USER, max_tokens=9, stream=True)
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas == len("hello")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start: Any = events[0]
    assert start.message.usage.input_tokens > 0
    assert start.message.stop_reason is None
    last: Any = events[-2]
    assert (last.delta.stop_reason, last.usage.output_tokens) == ("end_turn", 6)


async def test_stream_bytes(serve: Serve) -> None:
    """Each event holds its name twice, a ping follows the start, and there is no `[DONE]`."""
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        body = {"model": "m", "messages": USER, "max_tokens": 9, "stream": True}
        answer = await http.post(gateway.url + "/v1/messages?beta=true", json=body, headers={"x-api-key": "k"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
        names.append(name.removeprefix("event: "))
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-1] == "message_stop"


@both
async def test_parallel_tool_calls_round_trip_and_continue(serve: Serve, store: Store, stream: bool) -> None:
    """Tool inputs keep their values, come back with the tools' results, and the next call continues."""

    def script(request: EngineRequest) -> ScriptedAnswer:
        return "done" if len(engine.requests) > 1 else CALLS

    engine = ScriptedEngine(script)
    async with connected(serve, engine) as client:
        answer = await ask(client, stream, tools=TOOLS, max_tokens=500)
        assert answer.stop_reason == "tool_use"
        found = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
        assert found == [(call.id, call.name, json.loads(call.arguments)) for call in CALLS]
        results: Any = [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "no such file", "is_error": True},
            {"type": "tool_result", "tool_use_id": "call_2", "content": [{"type": "text", "text": "ok"}]},
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
        ]
        history: Any = [*USER, echo(answer), {"role": "user", "content": results}]
        last = await ask(client, stream, messages=history, tools=TOOLS)
    assert [block.text for block in last.content if block.type == "text"] == ["done"]
    heard: Any = engine.requests[1]
    assert [(m.role, m.content, m.tool_call_id) for m in heard.messages[2:]] == [
        ("tool", "Error: no such file", "call_1"),
        ("tool", "ok", "call_2"),
        ("user", "go on", None),
    ]
    assert heard.tools == (
        {
            "type": "function",
            "function": {"name": "bash", "description": "Runs it.", "parameters": {"type": "object"}},
        },
    )
    first, second = await recorded_calls(store)
    assert (second.edge, second.parent_call_id) == ("continues", first.call_id)
    assert first.tools is not None
    assert json.loads(first.tools) == TOOLS


THOUGHT = (
    SampleEvent(reasoning="let me "),
    SampleEvent(reasoning="see ⚙"),
    SampleEvent(text="hi"),
    SampleEvent(finish_reason="stop", cached_tokens=3),
)


@both
@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_thinking_round_trip(serve: Serve, store: Store, stream: bool, display: Any) -> None:
    """Reasoning comes back as it was sampled, even from a client that saw only its signature."""
    engine = EventsEngine(lambda request: THOUGHT)
    async with connected(serve, engine) as client:
        thinking: Any = {"type": "adaptive", "display": display}
        answer = await ask(client, stream, thinking=thinking)
        thought, text = answer.content
        assert (thought.type, text.type) == ("thinking", "text")
        assert thought.thinking == ("" if display == "omitted" else "let me see ⚙")  # type: ignore[union-attr]
        assert unseal(thought.signature) == "let me see ⚙"  # type: ignore[union-attr]
        again: Any = [*USER, echo(answer), {"role": "user", "content": "and?"}]
        await ask(client, stream, messages=again, thinking={"type": "disabled"})
    assert answer.usage.cache_read_input_tokens == 3
    first, second = engine.requests
    assert isinstance(first, ChatRequest)
    assert isinstance(second, ChatRequest)
    assert answer.usage.input_tokens == len(await engine.render(first)) - 3
    assert (second.messages[1].reasoning, second.messages[1].content) == ("let me see ⚙", "hi")
    assert (first.template_kwargs, second.template_kwargs) == ({"enable_thinking": True}, {"enable_thinking": False})
    assert [call.edge for call in await recorded_calls(store)] == ["root", "continues"]


@both
async def test_a_tool_call_that_is_not_an_object_reaches_the_agent_as_text(serve: Serve, stream: bool) -> None:
    calls = (
        ToolDelta(0, "c0", "bash", "[1]"),
        ToolDelta(1, "c1", "bash", '{"a": 1}'),
        ToolDelta(2, "c2", "bash", '{"b'),
    )
    engine = EventsEngine(
        lambda request: [SampleEvent(text="so:"), SampleEvent(tool_calls=calls, finish_reason="tool_calls")]
    )
    async with connected(serve, engine) as client:
        answer = await ask(client, stream, tools=TOOLS)
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": 'so:\nbash([1])\nbash({"b)'},
        {"type": "tool_use", "id": "c1", "name": "bash", "input": {"a": 1}},
    ]
    assert answer.stop_reason == "tool_use"


async def test_streams_tool_arguments_in_pieces_on_request(serve: Serve) -> None:
    pieces = ['{"command"', ': "l', 's"}']
    first = SampleEvent(tool_calls=(ToolDelta(0, "c0", "bash", ""),))
    rest = [SampleEvent(tool_calls=(ToolDelta(0, arguments=piece),)) for piece in pieces]
    engine = EventsEngine(lambda request: [first, *rest, SampleEvent(finish_reason="tool_calls")])
    async with connected(serve, engine) as client:
        tools: Any = [{**TOOLS[0], "eager_input_streaming": True}]
        async with client.messages.stream(model="m", messages=USER, max_tokens=50, tools=tools) as events:
            heard = [event.partial_json async for event in events if event.type == "input_json"]
            answer = await events.get_final_message()
    assert heard == pieces
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{"command": "ls"}]


@both
async def test_stop_reasons(serve: Serve, stream: bool) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        answer = await ask(client, stream, max_tokens=3)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)
    stopped = SampleEvent(text="one", finish_reason="stop", stop_sequence="END")
    engine = EventsEngine(lambda request: [stopped])
    async with connected(serve, engine) as client:
        # This SDK no longer sends them; the harnesses' own clients do.
        extra = {"temperature": 0.5, "top_k": 20, "top_p": 0.9}
        answer = await ask(client, stream, stop_sequences=["END"], extra_body=extra)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    sampling = engine.requests[0].sampling
    assert (sampling.stop, sampling.temperature, sampling.top_k, sampling.top_p) == (("END",), 0.5, 20, 0.9)


async def test_structured_output(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    engine = ScriptedEngine(lambda request: '{"a": 1}')
    async with connected(serve, engine) as client:
        await ask(client, False, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
    (request,) = engine.requests
    assert isinstance(request, ChatRequest)
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema, "strict": True},
    }


async def test_count_tokens(serve: Serve, store: Store) -> None:
    """The count is that of the prompt sampled for the same body, and no call is recorded."""
    engine = ScriptedEngine()
    async with connected(serve, engine) as client:
        counted = await client.messages.count_tokens(model="m", messages=USER, system="Be brief.", tools=TOOLS)
        assert engine.sampled == 0
        answer = await ask(client, False, system="Be brief.", tools=TOOLS)
        assert counted.input_tokens == answer.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.count_tokens(model="m", messages=[])
    assert [session.calls for session in await store.sessions.recent()] == [1]


async def test_beta_routes_and_flags(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        answer = await client.beta.messages.create(
            model="m",
            messages=USER,
            max_tokens=100,
            betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            mcp_servers=[{"type": "url", "url": "https://example.com/mcp", "name": "m"}],
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
        )
    assert answer.stop_reason == "end_turn"


async def test_hello_and_models(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine()) as client, httpx.AsyncClient(timeout=120) as http:
        url = str(client.base_url).rstrip("/")
        head = await http.head(url + "/api/hello")
        assert head.status_code == 200
        assert (await http.get(url + "/s/key/api/hello")).json() == {"message": "hello"}
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.type, model.display_name) == ("scripted-model", "model", "scripted-model")


async def test_rejects_an_unknown_key(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine(), require_known_keys=True) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await ask(client, True)
        assert caught.value.type == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.count_tokens(model="m", messages=USER)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"extra_body": {"temperature": 9}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "assistant", "content": "Sure,"}]}, "prefill"),
        ({"tools": [{"name": "bash", "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}}, "nobody"),
    ],
)
async def test_rejects_bad_requests(serve: Serve, store: Store, body: Any, names: str) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, False, **body)
    assert caught.value.type == "invalid_request_error"
    assert names in str(caught.value)
    assert [session.calls for session in await store.sessions.recent()] in ([], [0])


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (RequestError("no images", code="no_images"), anthropic.BadRequestError, "invalid_request_error"),
        (EngineError("busy", status=429), anthropic.RateLimitError, "rate_limit_error"),
        (EngineError("down", status=503), anthropic.APIStatusError, "overloaded_error"),
        (EngineError("broken"), anthropic.InternalServerError, "api_error"),
    ],
)
@both
async def test_engine_errors(serve: Serve, error: Exception, kind: Any, name: str, stream: bool) -> None:
    async with connected(serve, ScriptedEngine(lambda request: error)) as client:
        with pytest.raises(kind, match=str(error)) as caught:
            await ask(client, stream)
    assert caught.value.type == name
    assert caught.value.response.headers.get("retry-after") == (
        "1" if name.endswith(("limit_error", "ed_error")) else None
    )


@both
async def test_a_prompt_that_is_too_long_gets_the_error_that_makes_claude_code_compact(
    serve: Serve, stream: bool
) -> None:
    text = "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens."
    error = RequestError(text, code="context_length_exceeded", param="messages")
    async with connected(serve, ScriptedEngine(lambda request: error)) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, stream)
    body: Any = caught.value.body
    assert body["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"


async def test_an_error_in_the_middle_of_a_stream_is_raised(serve: Serve) -> None:
    heard: list[str] = []
    async with connected(serve, BrokenEngine()) as client:

        async def listen() -> None:
            async with client.messages.stream(model="m", messages=USER, max_tokens=50) as events:
                heard.extend([text async for text in events.text_stream])

        with pytest.raises(anthropic.APIStatusError, match="The scripted engine broke") as caught:
            await listen()
    assert caught.value.type == "api_error"


async def test_takes_the_key_from_the_path(serve: Serve, store: Store) -> None:
    async with (
        serve(ScriptedEngine()) as gateway,
        AsyncAnthropic(base_url=gateway.url + "/s/run-1", auth_token="anything", api_key=None) as client,
    ):
        await ask(client, True)
        await ask(client, False)
    assert [session.calls for session in await store.sessions.recent()] == [2]


async def test_heartbeats_of_a_slow_engine_do_not_disturb_clients(serve: Serve) -> None:
    """Heartbeats come before the first event and inside the stream."""
    engine = ScriptedEngine(pace=0.1, tokens_per_event=1)
    async with connected(serve, engine, heartbeat_seconds=0.02, headers_after_seconds=0.01) as client:
        answer = await ask(client, True)
    assert [block.text for block in answer.content if block.type == "text"] == ["hello"]
    assert answer.usage.input_tokens == len([1, *encode("user:hi"), 2, 1, *encode("assistant:")])


async def test_more_tokens_than_the_longest_answer_are_refused(serve: Serve, store: Store) -> None:
    """An answer that ended early would make Claude Code stop with an error that does not name the cause."""
    async with serve(ScriptedEngine(info=replace(INFO, max_answer=256))) as gateway:
        async with AsyncAnthropic(base_url=gateway.url, api_key="k") as client:
            with pytest.raises(
                anthropic.BadRequestError, match=r"max_tokens: 257 > 256, which is the maximum .* serve"
            ):
                await client.messages.create(model="m", max_tokens=257, messages=USER)
            assert (await client.messages.create(model="m", max_tokens=256, messages=USER)).content != []
            assert (await client.models.retrieve("m")).max_tokens == 256
        async with httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": "k"}) as http:
            chat = await http.post("/v1/chat/completions", json={"model": "m", "messages": USER, "max_tokens": 257})
            assert chat.status_code == 200
    refused, *_ = await recorded_calls(store)
    assert (refused.status, refused.http_status) == ("upstream_error", 400)
