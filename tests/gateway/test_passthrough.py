"""The passthrough engine: the provider's bytes reach the agent as they came, and the call is recorded as text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websocket
from websockets.exceptions import InvalidStatus

from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.types import Json, ToolCall
from tests.conftest import Serve
from tests.gateway.agents import recorded_calls

pytestmark = pytest.mark.slow

KEY = "sk-own-key-of-the-agent"
REPLY = ScriptedReply("Let me look.", "I should look.", (ToolCall("call_1", "sh", '{"cmd": "ls ü"}'),))
FUNCTION = {"name": "sh", "description": "run", "parameters": {"type": "object", "properties": {}}}
CHAT: Json = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": FUNCTION}],
}
RESPONSES: Json = {"model": "m", "input": "hi", "tools": [{"type": "function", **FUNCTION}]}
ANTHROPIC: Json = {
    "model": "m",
    "max_tokens": 5000,
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "sh", "input_schema": {"type": "object"}}],
}
GOOGLE: Json = {
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    "tools": [{"functionDeclarations": [{"name": "sh", "description": "run"}]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
}
STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
MODEL = "/v1beta/models/m"
REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {**CHAT, **STREAM}),
    "chat whole": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", {**RESPONSES, "stream": True}),
    "responses whole": ("/v1/responses", RESPONSES),
    "anthropic": ("/v1/messages", {**ANTHROPIC, "stream": True}),
    "anthropic whole": ("/v1/messages", ANTHROPIC),
    "google": (f"{MODEL}:streamGenerateContent?alt=sse", GOOGLE),
    "google array": (f"{MODEL}:streamGenerateContent", GOOGLE),
    "google whole": (f"{MODEL}:generateContent", GOOGLE),
    "completions": ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 500, **STREAM}),
}


@dataclass
class Provider:
    """A stand-in for a provider: it sends given bytes in small pieces, and keeps what it was sent."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    piece: int = 37
    cut: bool = False
    """The connection breaks off at the end of the body."""
    wait: asyncio.Event | None = None
    """Awaited before the last piece."""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self.requests.append((first, headers, await reader.readexactly(int(headers.get("content-length", 0)))))
        writer.write(f"HTTP/1.1 {self.status} X\r\ntransfer-encoding: chunked\r\n".encode())
        writer.write("".join(f"{name}: {value}\r\n" for name, value in self.headers).encode() + b"\r\n")
        pieces = [self.body[i : i + self.piece] for i in range(0, len(self.body), self.piece)]
        for number, piece in enumerate(pieces):
            if self.wait is not None and number == len(pieces) - 1:
                await self.wait.wait()
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        if not self.cut:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()


async def answer_of(serve: Serve, path: str, body: Json) -> tuple[str, bytes]:
    """Return content type and body of a real answer in the path's dialect."""
    async with serve(ScriptedEngine(lambda request: REPLY)) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(gateway.url + path, json=body, headers={"authorization": "Bearer source"})
        assert reply.status_code == 200, reply.text
        return reply.headers["content-type"], reply.content


@contextlib.asynccontextmanager
async def passed_on(serve: Serve, provider: Provider, **settings: Any) -> AsyncIterator[Gateway]:
    async with provider.serve() as url, serve(PassthroughEngine(url), **settings) as gateway:
        yield gateway


async def calls_of_agent(store: Store) -> list[Any]:
    rows = [row for row in await store.sessions.recent() if row.label != "source"]
    return [call for row in rows for call in await store.calls.of_session(row.session_id)]


@pytest.mark.parametrize("name", REQUESTS)
async def test_every_byte_is_passed_on_and_the_call_is_recorded(serve: Serve, store: Store, name: str) -> None:
    path, body = REQUESTS[name]
    kind, expected = await answer_of(serve, path, body)
    provider = Provider(headers=[("content-type", kind), ("x-ratelimit-remaining", "7")], body=expected)
    sent = json.dumps(body, indent=1).encode()
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(
            gateway.url + path, content=sent, headers={"authorization": f"Bearer {KEY}", "x-own": "1"}
        )
    assert (reply.content, reply.headers["content-type"]) == (expected, kind)
    assert reply.headers["x-ratelimit-remaining"] == "7"
    ((first, headers, received),) = provider.requests
    assert (first, received) == (f"POST {path} HTTP/1.1", sent)
    assert (headers["authorization"], headers["x-own"]) == (f"Bearer {KEY}", "1")
    (call,) = await calls_of_agent(store)
    assert (call.status, call.http_status, call.engine.engine) == ("no_tokens", 200, "passthrough")
    message = call.choices[0].message
    if name != "completions":
        assert (message.content, message.reasoning) == (REPLY.text, REPLY.reasoning)
        (tool_call,) = message.tool_calls
        assert (tool_call.name, json.loads(tool_call.arguments)) == ("sh", {"cmd": "ls ü"})
    assert call.choices[0].finish_reason in ("stop", "tool_calls")
    assert call.usage is not None
    assert call.usage.output_tokens > 0
    assert call.first_token_at is not None


async def test_the_last_piece_waits_for_the_record(serve: Serve, store: Store) -> None:
    path, body = REQUESTS["chat"]
    kind, expected = await answer_of(serve, path, body)
    provider = Provider(headers=[("content-type", kind)], body=expected, wait=asyncio.Event())
    async with (
        passed_on(serve, provider) as gateway,
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", gateway.url + path, json=body, headers={"authorization": f"Bearer {KEY}"}) as reply,
    ):
        received = b""
        pieces = reply.aiter_raw()
        while b"look" not in received:
            received += await anext(pieces)
        assert b'finish_reason":"' not in received
        provider.wait.set()  # type: ignore[union-attr]
        async for piece in pieces:
            if b"[DONE]" in piece:
                assert [call.status for call in await calls_of_agent(store)] == ["no_tokens"]
            received += piece
    assert received == expected


@pytest.mark.parametrize("status", [400, 401, 429, 529])
async def test_an_error_of_the_provider_is_passed_on_byte_for_byte(serve: Serve, store: Store, status: int) -> None:
    error = b'{ "type":"error", "error":{"type":"overloaded_error","message":"Overloaded ... try later"} }'
    headers = [("content-type", "application/json"), ("retry-after", "17"), ("request-id", "req_of_provider")]
    provider = Provider(status, headers, error)
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(gateway.url + "/v1/messages", json=ANTHROPIC, headers={"x-api-key": KEY})
    assert (reply.status_code, reply.content) == (status, error)
    assert (reply.headers["retry-after"], reply.headers["request-id"]) == ("17", "req_of_provider")
    (call,) = await recorded_calls(store, 1)
    assert (call.status, call.http_status) == ("upstream_error", status)
    assert "Overloaded ... try later" in (call.error or "")


async def test_an_error_inside_a_stream_is_passed_on_and_recorded_as_a_failure(serve: Serve, store: Store) -> None:
    stream = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'
    provider = Provider(headers=[("content-type", "text/event-stream")], body=stream)
    body = {**ANTHROPIC, "stream": True}
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(gateway.url + "/v1/messages", json=body, headers={"x-api-key": KEY})
    assert (reply.status_code, reply.content) == (200, stream)
    (call,) = await recorded_calls(store, 1)
    assert call.status == "upstream_error"


async def test_a_stream_that_breaks_off_is_recorded_as_far_as_it_came(serve: Serve, store: Store) -> None:
    path, body = REQUESTS["anthropic"]
    kind, whole = await answer_of(serve, path, body)
    start = whole[: whole.index(b"content_block_stop")]
    provider = Provider(headers=[("content-type", kind)], body=start, cut=True)
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(gateway.url + path, json=body, headers={"x-api-key": KEY})
    assert reply.content.startswith(start)
    assert b"event: error" in reply.content[len(start) :]
    (call,) = await calls_of_agent(store)
    assert call.status == "upstream_error"
    assert call.choices[0].message.reasoning


async def test_what_cannot_be_read_is_passed_on_all_the_same(serve: Serve, store: Store) -> None:
    blocks = [{"type": "text", "text": "found"}, {"type": "hologram", "data": "..."}]
    answer = json.dumps({"type": "message", "model": "m", "content": blocks, "stop_reason": "end_turn"}).encode()
    body = {**ANTHROPIC, "messages": [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}]}
    provider = Provider(headers=[("content-type", "application/json")], body=answer)
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(gateway.url + "/v1/messages", json=body, headers={"x-api-key": KEY})
    assert reply.content == answer
    (call,) = await recorded_calls(store, 1)
    assert (call.status, call.choices[0].finish_reason) == ("no_tokens", "unread")
    assert [json.loads(message) for message in call.messages] == body["messages"]


BAD_FRAME = struct.pack(">II", 20, 0) + bytes(4) + b"{ba}" + bytes(4)
MALFORMED = {
    "events": ("text/event-stream", b'data: {"id": "a", "choices": []}\n\ndata: {bad\n\ndata: [DONE]\n\n'),
    "frames": ("application/vnd.amazon.eventstream", BAD_FRAME * 2),
    "body": ("application/json", b'{"choices": ['),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_answers_are_passed_on_byte_for_byte(serve: Serve, store: Store, name: str) -> None:
    kind, answer = MALFORMED[name]
    path, body = REQUESTS["chat"]
    provider = Provider(headers=[("content-type", kind)], body=answer)
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(gateway.url + path, json=body, headers={"authorization": f"Bearer {KEY}"})
    assert (reply.status_code, reply.content) == (200, answer)
    (call,) = await recorded_calls(store, 1)
    assert (call.status, call.choices[0].finish_reason) == ("no_tokens", "unread")


async def test_no_key_is_stored(serve: Serve, store: Store) -> None:
    path, body = REQUESTS["chat"]
    kind, expected = await answer_of(serve, path, body)
    provider = Provider(headers=[("content-type", kind)], body=expected)
    keys = {"authorization": f"Bearer {KEY}", "cookie": f"session={KEY}", "x-api-key": KEY}
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        await client.post(f"{gateway.url}/s/my-run{path}?key={KEY}", json=body, headers=keys)
    assert len(await calls_of_agent(store)) == 1
    path_of_file = store.database.path
    assert path_of_file is not None
    for file in path_of_file.parent.glob(path_of_file.name + "*"):
        assert KEY.encode() not in file.read_bytes()


async def test_a_key_of_polar_is_not_sent_to_a_provider(serve: Serve) -> None:
    provider = Provider()
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        headers = {"authorization": "Bearer sk-polar-0123"}
        reply = await client.post(gateway.url + "/v1/chat/completions", json=CHAT, headers=headers)
    assert reply.status_code == 401
    assert "give the agent its own key" in reply.text
    assert provider.requests == []


KEYS_OF_POLAR: dict[str, tuple[dict[str, str], str]] = {
    "query": ({}, "?key=sk-polar-0123"),
    "encoded query": ({}, "?key=sk%2Dpolar-0123"),
    "admin": ({"authorization": "Bearer polar-admin-0123"}, ""),
    "trainer": ({"x-api-key": "polar-trainer-0123"}, ""),
    "cookie": ({"cookie": "a=b; polar_view=0123.1.2"}, ""),
}


@pytest.mark.parametrize("name", KEYS_OF_POLAR)
async def test_no_key_of_polar_in_any_place_is_sent_to_a_provider(serve: Serve, name: str) -> None:
    headers, query = KEYS_OF_POLAR[name]
    provider = Provider()
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        reply = await client.post(f"{gateway.url}{MODEL}:generateContent{query}", json=GOOGLE, headers=headers)
    assert (reply.status_code, provider.requests) == (401, [])


@pytest.mark.parametrize("model", ["a%20b", "a%20HTTP/1.1%0Dx:%20y%0D%0D", "%C3%BC", "a%2F..%2Fb", "a%3Fb"])
async def test_a_path_is_sent_on_as_it_was_encoded(serve: Serve, model: str) -> None:
    kind, expected = await answer_of(serve, *REQUESTS["google whole"])
    provider = Provider(headers=[("content-type", kind)], body=expected)
    target = f"/v1beta/models/{model}:generateContent"
    async with passed_on(serve, provider) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        body = json.dumps(GOOGLE).encode()
        head = f"POST /s/my-run{target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert expected in await reader.read()
        writer.close()
    ((first, _, _),) = provider.requests
    assert first == f"POST {target} HTTP/1.1"


async def test_many_hosts_take_no_more_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    context = ssl.create_default_context()
    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(1) or context)
    async with PassthroughEngine() as engine:
        for number in range(1000):
            engine._client(f"x{number}.openai.azure.com")
        assert len(engine._clients) <= 64
    assert len(made) <= 1


async def test_an_intercepted_request_goes_to_the_path_that_was_asked_with_its_query(
    serve: Serve, store: Store
) -> None:
    path, body = REQUESTS["google"]
    kind, expected = await answer_of(serve, path, body)
    provider = Provider(headers=[("content-type", kind)], body=expected)
    target = "/v1beta1/projects/p%20q/locations/us/publishers/google/models/m:streamGenerateContent?alt=sse&x=%2F"
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.url}/s/my-run/intercept/us-east1-aiplatform.googleapis.com{target}"
        reply = await client.post(url, json=body, headers={"authorization": f"Bearer {KEY}"})
    assert reply.content == expected
    ((first, _, _),) = provider.requests
    assert first == f"POST {target} HTTP/1.1"
    (call,) = await calls_of_agent(store)
    assert (call.status, call.model, call.stream) == ("no_tokens", "m", True)


async def test_several_turns_continue_each_other(serve: Serve, store: Store) -> None:
    path, body = REQUESTS["anthropic whole"]
    kind, expected = await answer_of(serve, path, body)
    provider = Provider(headers=[("content-type", kind)], body=expected)
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "a.txt"}
    async with passed_on(serve, provider) as gateway, httpx.AsyncClient() as client:
        answer = (await client.post(gateway.url + path, json=body, headers={"x-api-key": KEY})).json()
        said = {"role": "assistant", "content": answer["content"]}
        turns = [*body["messages"], said, {"role": "user", "content": [result]}]
        await client.post(gateway.url + path, json={**body, "messages": turns}, headers={"x-api-key": KEY})
    assert [call.edge for call in await calls_of_agent(store)] == ["root", "continues"]


@contextlib.asynccontextmanager
async def websocket_provider(
    answer: Callable[[Json], list[Json]], *, before: Sequence[str] = ()
) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve a stand-in for the Responses API over a WebSocket. Yields its URL and the keys that it was sent.

    `before`: messages that it sends before each answer.
    """
    keys: list[str] = []

    async def serve_one(socket: ServerConnection) -> None:
        assert socket.request is not None
        keys.append(socket.request.headers["authorization"])
        async for message in socket:
            for text in before:
                await socket.send(text)
            for event in answer(json.loads(message)):
                await socket.send(json.dumps(event, separators=(", ", " : ")))

    async with serve_websocket(serve_one, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", keys


def websocket_answer(request: Json) -> list[Json]:
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    response = {"id": "resp_of_provider", "object": "response", "model": "m", "status": "completed", "usage": usage}
    return [
        {"type": "response.created", "response": {"id": "resp_of_provider"}},
        {"type": "response.output_text.delta", "output_index": 0, "delta": "ok"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {**response, "output": []}},
    ]


async def test_a_websocket_is_passed_on_message_by_message(serve: Serve, store: Store) -> None:
    async with websocket_provider(websocket_answer) as (url, keys), serve(PassthroughEngine(url)) as gateway:
        address = "ws" + gateway.url.removeprefix("http") + "/v1/responses"
        async with connect(address, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None) as socket:
            for turn in ("one", "two"):
                await socket.send(json.dumps({"type": "response.create", "model": "m", "input": turn}))
                received = [await socket.recv() for _ in range(4)]
                assert received == [json.dumps(one, separators=(", ", " : ")) for one in websocket_answer({})]
    assert keys == [f"Bearer {KEY}"]
    calls = await recorded_calls(store, 2)
    assert [(call.status, call.choices[0].message.content) for call in calls] == [("no_tokens", "ok")] * 2
    assert calls[0].usage is not None
    assert (calls[0].usage.input_tokens, calls[0].usage.output_tokens) == (5, 2)


async def test_malformed_messages_of_a_websocket_are_passed_on(serve: Serve, store: Store) -> None:
    async with (
        websocket_provider(websocket_answer, before=["{bad", "[1]"]) as (url, _),
        serve(PassthroughEngine(url)) as gateway,
    ):
        address = "ws" + gateway.url.removeprefix("http") + "/v1/responses"
        async with connect(address, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None) as socket:
            await socket.send(json.dumps({"type": "response.create", "model": "m", "input": "one"}))
            received = [await socket.recv() for _ in range(6)]
    assert received[:2] == ["{bad", "[1]"]
    assert json.loads(received[-1])["type"] == "response.completed"
    (call,) = await recorded_calls(store, 1)
    assert (call.status, call.choices[0].finish_reason) == ("no_tokens", "unread")


async def test_no_redirect_is_followed_with_the_key_of_the_agent(serve: Serve) -> None:
    async with websocket_provider(websocket_answer) as (elsewhere, keys):
        provider = Provider(302, [("location", f"ws{elsewhere.removeprefix('http')}/v1/responses")])
        async with passed_on(serve, provider) as gateway:
            address = "ws" + gateway.url.removeprefix("http") + "/v1/responses"
            with pytest.raises(InvalidStatus):
                async with connect(address, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None):
                    pass
    assert keys == []
    assert len(provider.requests) == 1


async def test_a_provider_that_refuses_a_websocket_refuses_the_agent_too(serve: Serve) -> None:
    provider = Provider(426, [("content-type", "application/json")], b'{"error":{"message":"use HTTP"}}')
    async with passed_on(serve, provider) as gateway:
        address = "ws" + gateway.url.removeprefix("http") + "/v1/responses"
        with pytest.raises(InvalidStatus) as refused:
            async with connect(address, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None):
                pass
    assert refused.value.response.status_code == 426
