"""The official `google-genai` SDK against a running gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from polar_proxy.engines.scripted import END, INFO, ScriptedAnswer, ScriptedEngine, ScriptedReply, encode, logprob
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest, ToolCall
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.gateway.agents import chat_request, recorded_calls

pytestmark = pytest.mark.slow

BASH = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="bash",
            description="run",
            parameters=types.Schema(
                type=types.Type.OBJECT,
                properties={"command": types.Schema(type=types.Type.STRING)},
                required=["command"],
            ),
        )
    ]
)
CALLS = (
    ToolCall("call_1", "bash", '{"command": "grep -n \\"é\\" a.py", "deep": {"b": [1, 2.5, null, true]}}'),
    ToolCall("call_2", "bash", "{}"),
)


async def _ask(client: Any, *, stream: bool) -> None:
    """Send a request and read the whole answer."""
    if not stream:
        await client.models.generate_content(model="m", contents="hi")
        return
    async for _ in await client.models.generate_content_stream(model="m", contents="hi"):
        pass


@contextlib.asynccontextmanager
async def connected(serve: Serve, engine: ScriptedEngine, **settings: Any) -> AsyncIterator[Any]:
    """Return the async client. The synchronous one would block the loop that the gateway runs in."""
    async with serve(engine, **settings) as gateway:
        options = types.HttpOptions(
            base_url=gateway.url, timeout=120_000, retry_options=types.HttpRetryOptions(attempts=1)
        )
        async with genai.Client(api_key="sk-test", http_options=options).aio as client:
            yield client


def config(**fields: Any) -> types.GenerateContentConfig:
    off = types.AutomaticFunctionCallingConfig(disable=True)
    return types.GenerateContentConfig(**{"automatic_function_calling": off, **fields})


async def test_answer(serve: Serve, store: Store) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        answer = await client.models.generate_content(model="gemini-2.5-pro", contents="hi")
    assert answer.text == "hello"
    assert answer.candidates[0].finish_reason == types.FinishReason.STOP
    assert answer.model_version == "gemini-2.5-pro"
    assert answer.usage_metadata.candidates_token_count == len("hello") + 1
    assert answer.usage_metadata.total_token_count == answer.usage_metadata.prompt_token_count + 6
    (call,) = await recorded_calls(store)
    assert (call.model, call.stream, call.call_id) == ("gemini-2.5-pro", False, answer.response_id)


async def test_stream(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine(tokens_per_event=1)) as client:
        stream = await client.models.generate_content_stream(model="m", contents="hi")
        chunks = [chunk async for chunk in stream]
    assert [chunk.text for chunk in chunks] == [*"hello", ""]
    assert [bool(chunk.candidates[0].finish_reason) for chunk in chunks] == [False] * 5 + [True]
    assert chunks[-1].usage_metadata.candidates_token_count == 6
    assert len({chunk.response_id for chunk in chunks}) == 1


async def test_sync_client_in_threads(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway:

        def ask(number: int) -> str:
            client = genai.Client(api_key=f"k{number}", http_options=types.HttpOptions(base_url=gateway.url))
            return "".join(
                chunk.text or "" for chunk in client.models.generate_content_stream(model="m", contents="hi")
            )

        assert await asyncio.gather(*(asyncio.to_thread(ask, number) for number in range(3))) == ["hello"] * 3
    assert [session.calls for session in await store.sessions.recent()] == [1] * 3


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls_round_trip(serve: Serve, store: Store, stream: bool, ids: bool) -> None:
    """Tool calls come whole, go back with their results (with or without ids), and the next call continues."""

    def script(request: EngineRequest) -> ScriptedAnswer:
        return "done" if len(engine.requests) > 1 else CALLS

    engine = ScriptedEngine(script)
    user = types.Content(role="user", parts=[types.Part(text="hi")])
    async with connected(serve, engine) as client:
        if stream:
            chunks = await client.models.generate_content_stream(
                model="m", contents=[user], config=config(tools=[BASH])
            )
            parts = [part async for chunk in chunks for part in chunk.candidates[0].content.parts]
        else:
            answer = await client.models.generate_content(model="m", contents=[user], config=config(tools=[BASH]))
            parts = answer.candidates[0].content.parts
        calls = [part.function_call for part in parts if part.function_call]
        assert [(c.id, c.name, c.args) for c in calls] == [(c.id, c.name, json.loads(c.arguments)) for c in CALLS]
        results = [
            types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": c.id}))
            for c in calls
        ]
        if not ids:
            for part in (*parts, *results):
                for thing in filter(None, (part.function_call, part.function_response)):
                    thing.id = None
        history = [user, types.Content(role="model", parts=parts), types.Content(role="user", parts=results)]
        last = await client.models.generate_content(model="m", contents=history, config=config(tools=[BASH]))
    assert last.text == "done"
    request = chat_request(engine)
    assert [tool["function"]["parameters"] for tool in request.tools] == [
        {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    ]
    asked = [call.id for call in request.messages[1].tool_calls]
    answered = [(m.tool_call_id, m.content) for m in request.messages if m.role == "tool"]
    assert answered == list(zip(asked, ["call_1", "call_2"], strict=True))
    first, second = await recorded_calls(store)
    assert (second.edge, second.parent_call_id) == ("continues", first.call_id)


async def test_automatic_function_calling(serve: Serve, store: Store) -> None:
    """The SDK calls the Python function itself and asks again until the answer is text."""
    heard: list[str] = []

    def bash(command: str) -> str:
        """Run a command.

        Args:
          command: what to run
        """
        heard.append(command)
        return "ok " + command

    def script(request: EngineRequest) -> ScriptedAnswer:
        turn = len(engine.requests)
        return "done" if turn > 2 else ToolCall(f"call_{turn}", "bash", json.dumps({"command": f"ls {turn}"}))

    engine = ScriptedEngine(script)
    async with connected(serve, engine) as client:
        answer = await client.models.generate_content(
            model="m", contents="hi", config=types.GenerateContentConfig(tools=[bash])
        )
    assert answer.text == "done"
    assert heard == ["ls 1", "ls 2"]
    request = chat_request(engine)
    assert [m.content for m in request.messages if m.role == "tool"] == ["ok ls 1", "ok ls 2"]
    assert [call.edge for call in await recorded_calls(store)] == [
        "root",
        "continues",
        "continues",
    ]


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_round_trip_in_a_chat(serve: Serve, store: Store, stream: bool, shown: bool) -> None:
    """Reasoning comes back with the history, whether it is shown to the client or not."""
    engine = ScriptedEngine(lambda request: ScriptedReply("hello", reasoning="why"))
    thinking = config(thinking_config=types.ThinkingConfig(include_thoughts=shown))
    async with connected(serve, engine) as client:
        chat = client.chats.create(model="m", config=thinking)
        if stream:
            parts = [
                part
                async for chunk in await chat.send_message_stream("one")
                for part in chunk.candidates[0].content.parts
            ]
        else:
            parts = (await chat.send_message("one")).candidates[0].content.parts
        assert "".join(part.text for part in parts if part.thought) == ("why" if shown else "")
        assert "".join(part.text for part in parts if not part.thought) == "hello"
        await chat.send_message("two")
    request = chat_request(engine)
    assert [(m.role, m.content, m.reasoning) for m in request.messages] == [
        ("user", "one", None),
        ("assistant", "hello", "why"),
        ("user", "two", None),
    ]
    assert [call.edge for call in await recorded_calls(store)] == ["root", "continues"]


async def test_arguments_that_are_not_an_object_round_trip(serve: Serve, store: Store) -> None:
    """The agent reads them as text, and sends back the history that was answered."""
    replies: list[ScriptedAnswer] = [ToolCall("call_1", "bash", "[1]"), "done"]
    engine = ScriptedEngine(lambda request: replies[len(engine.requests) - 1])
    async with connected(serve, engine) as client:
        chat = client.chats.create(model="m", config=config(tools=[BASH]))
        assert (await chat.send_message("one")).text == "bash([1])"
        assert (await chat.send_message("two")).text == "done"
    request = chat_request(engine)
    assert request.messages[1].tool_calls == (ToolCall("call_1", "bash", "[1]"),)
    assert [call.edge for call in await recorded_calls(store)] == ["root", "continues"]


@pytest.mark.parametrize("stream", [False, True])
async def test_length_stop(serve: Serve, stream: bool) -> None:
    limited = config(max_output_tokens=3)
    async with connected(serve, ScriptedEngine()) as client:
        if stream:
            chunks = await client.models.generate_content_stream(model="m", contents="hi", config=limited)
            *_, answer = [chunk async for chunk in chunks]
        else:
            answer = await client.models.generate_content(model="m", contents="hi", config=limited)
            assert answer.text == "hel"
    assert answer.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS
    assert answer.usage_metadata.candidates_token_count == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_several_candidates(serve: Serve, stream: bool) -> None:
    replies = iter(["one", "two", "three"])
    engine = ScriptedEngine(lambda request: next(replies))
    texts = ["", "", ""]
    async with connected(serve, engine) as client:
        if stream:
            chunks = await client.models.generate_content_stream(
                model="m", contents="hi", config=config(candidate_count=3)
            )
            answers = [chunk async for chunk in chunks]
        else:
            answers = [await client.models.generate_content(model="m", contents="hi", config=config(candidate_count=3))]
    for answer in answers:
        for candidate in answer.candidates:
            texts[candidate.index or 0] += "".join(part.text for part in candidate.content.parts)
    assert texts == ["one", "two", "three"]


async def test_logprobs(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        answer = await client.models.generate_content(model="m", contents="hi", config=config(response_logprobs=True))
    ids = [*encode("hello"), END]
    found = answer.candidates[0].logprobs_result.chosen_candidates
    assert [(item.token_id, item.log_probability) for item in found] == [(token, logprob(token)) for token in ids]
    assert answer.candidates[0].avg_logprobs == pytest.approx(sum(map(logprob, ids)) / len(ids))


async def test_structured_output(serve: Serve) -> None:
    engine = ScriptedEngine(lambda request: '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with connected(serve, engine) as client:
        for fields in (
            {"response_json_schema": schema},
            {"response_schema": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}, "required": ["a"]}},
        ):
            answer = await client.models.generate_content(
                model="m", contents="hi", config=config(response_mime_type="application/json", **fields)
            )
            assert answer.parsed == {"a": 1}
    for request in engine.requests:
        assert isinstance(request, ChatRequest)
        assert request.response_format == {
            "type": "json_schema",
            "json_schema": {"name": "response", "schema": schema},
        }


async def test_images_reach_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine()
    image = types.Part.from_bytes(data=b"\xfb\xff\xfe", mime_type="image/png")
    async with connected(serve, engine) as client:
        await client.models.generate_content(model="m", contents=[image, "what?"])
    request = chat_request(engine, 0)
    (message,) = request.messages
    assert message.content == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,+//+"}},
        {"type": "text", "text": "what?"},
    ]


async def test_count_tokens(serve: Serve, store: Store) -> None:
    """The count is that of the prompt that would be sent, and no call is recorded."""
    async with connected(serve, ScriptedEngine()) as client:
        counted = await client.models.count_tokens(model="m", contents="hi")
        answer = await client.models.generate_content(model="m", contents="hi")
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count
    (session,) = await store.sessions.recent()
    assert session.calls == 1


async def test_models(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        assert [model.name async for model in await client.models.list()] == ["models/scripted-model"]
        model = await client.models.get(model="any/name")
    assert model.input_token_limit == INFO.context_length
    assert "countTokens" in model.supported_actions


async def test_rejects_a_bad_request(serve: Serve, store: Store) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        with pytest.raises(errors.ClientError) as caught:
            await client.models.generate_content(model="m", contents="hi", config=config(temperature=9))
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    assert "generationConfig.temperature" in str(caught.value.message)
    assert [session.calls for session in await store.sessions.recent()] == [0]


async def test_rejects_an_unknown_key(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine(), require_known_keys=True) as client:
        with pytest.raises(errors.ClientError) as caught:
            await client.models.generate_content(model="m", contents="hi")
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")


async def test_rejects_unserved_routes(serve: Serve) -> None:
    async with connected(serve, ScriptedEngine()) as client:
        with pytest.raises(errors.ClientError) as caught:
            await client.models.embed_content(model="m", contents="hi")
    assert (caught.value.code, caught.value.status) == (405, "UNIMPLEMENTED")


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (RequestError("too long", code="context_length_exceeded"), errors.ClientError, "INVALID_ARGUMENT"),
        (EngineError("busy", status=429), errors.ClientError, "RESOURCE_EXHAUSTED"),
        (EngineError("down", status=503), errors.ServerError, "UNAVAILABLE"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors(serve: Serve, error: Any, kind: type[errors.APIError], status: str, stream: bool) -> None:
    async with connected(serve, ScriptedEngine(lambda request: error)) as client:
        with pytest.raises(kind, match=str(error)) as caught:
            await _ask(client, stream=stream)
    assert caught.value.status == status


async def test_an_error_in_the_middle_of_a_stream_is_raised(serve: Serve) -> None:
    heard: list[str] = []

    async def listen(client: Any) -> None:
        async for chunk in await client.models.generate_content_stream(model="m", contents="hi"):
            heard.append(chunk.text)

    async with connected(serve, BrokenEngine()) as client:
        with pytest.raises(errors.ServerError, match="The scripted engine broke"):
            await listen(client)
    assert "".join(heard) == "he"


async def test_streams_a_json_array(serve: Serve) -> None:
    """The URL has no `alt=sse`, and contains the key, which Google allows."""
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        answer = await http.post("/v1beta/models/m:streamGenerateContent?key=k", json=body)
        assert answer.headers["content-type"].startswith("application/json")
        elements = answer.json()
        assert "".join(part["text"] for e in elements for part in e["candidates"][0]["content"]["parts"]) == "hello"
        # and below a key in the path, without the version
        again = await http.post("/s/k/models/m:streamGenerateContent?alt=sse", json=body)
    assert again.headers["content-type"].startswith("text/event-stream")
    assert again.text.startswith("data: {")


@pytest.mark.parametrize("alt", ["sse", "json"])
async def test_sends_no_heartbeats_while_the_engine_is_slow(serve: Serve, alt: str) -> None:
    """Headers come at once, then nothing: Gemini CLI takes a comment for a broken event."""
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with (
        serve(
            ScriptedEngine(pace=0.05, tokens_per_event=1), headers_after_seconds=0.01, heartbeat_seconds=0.01
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=120) as http,
    ):
        answer = await http.post(f"/v1beta/models/m:streamGenerateContent?alt={alt}", json=body)
    if alt == "json":
        assert len(answer.json()) == 6
    else:
        assert all(line.startswith("data: ") for line in answer.text.split("\n\n")[:-1])


@pytest.mark.parametrize("path", ["/v1/cachedContents", "/v1beta/cachedContents", "/v1beta/cachedContents/1"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_cached_contents_answer_with_googles_error(serve: Serve, path: str, method: str) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        answer = await http.request(method, gateway.url + path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["status"]) == (404, "NOT_FOUND")
    assert path in error["message"]
