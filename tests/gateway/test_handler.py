"""The request handler over real HTTP: the agent's answer, the record, and their order."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncGenerator

import httpx
import numpy as np
import pytest

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.scripted import END, ScriptedEngine, ScriptedReply, encode, logprob
from polar_proxy.errors import EngineError, RequestError, StoreError
from polar_proxy.gateway import Gateway
from polar_proxy.gateway.recording import RequestContext
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, EngineRequest, SampleEvent, ToolCall
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.gateway.agents import CHAT, client, events_of, new_session, only_call, recorded_calls
from tests.until import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_records_a_call(serve: Serve, store: Store, stream: bool) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={**CHAT, "stream": stream, "temperature": 0.5})
        assert answer.status_code == 200
        if stream:
            chunks = events_of(answer.text)
            assert chunks[-1] == "[DONE]"
            parsed = [json.loads(chunk) for chunk in chunks[:-1]]
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in parsed)
            assert parsed[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            text = answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["usage"]["completion_tokens"] == 6
    assert text == "hello"
    call = await only_call(store)
    assert call.status == "ok"
    assert call.stream is stream
    assert call.sampling["temperature"] == 0.5
    assert call.choices[0].token_ids.tolist() == [*encode("hello"), END]
    expected = np.array([logprob(t) for t in [*encode("hello"), END]], dtype=np.float32)
    np.testing.assert_array_equal(call.choices[0].logprobs, expected)
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [1, *encode("user:hi"), 2, 1, *encode("assistant:")]
    assert answer.headers["x-polar-call-id"] == call.call_id


@pytest.mark.parametrize("stream", [False, True])
async def test_sends_the_last_byte_after_the_commit(serve: Serve, store: Store, stream: bool) -> None:
    """While the commit hangs, the client does not get the last byte."""
    release = asyncio.Event()
    reached = asyncio.Event()
    commit = store.calls.commit

    async def slow_commit(record: CallRecord, **options: bool) -> None:
        reached.set()
        await release.wait()
        await commit(record)

    store.calls.commit = slow_commit  # type: ignore[method-assign]
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        request = asyncio.create_task(http.post("/chat/completions", json={**CHAT, "stream": stream}))
        await asyncio.wait_for(reached.wait(), 120)
        await asyncio.sleep(0.1)
        assert not request.done()
        release.set()
        answer = await request
    assert "hello" in answer.text or '"h"' in answer.text
    assert (await only_call(store)).status == "ok"


async def test_answers_if_the_store_fails_and_counts_a_lost_call(serve: Serve, store: Store) -> None:
    async def broken(record: CallRecord, **options: bool) -> None:
        raise StoreError("disk full")

    store.calls.commit = broken  # type: ignore[method-assign]
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        session = answer.headers["x-polar-session-id"]
        assert gateway.sessions.lost(session) == 1
        assert "polar_lost_calls_total 1.0" in (await http.get(gateway.url + "/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_the_engine_and_is_recorded(serve: Serve, store: Store, stream: bool) -> None:
    engine = ScriptedEngine(lambda request: "x" * 10_000, pace=0.01, tokens_per_event=1)
    async with serve(engine) as gateway:
        body = json.dumps({**CHAT, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head + body)
        await until(lambda: engine.sampled)
        writer.close()
        await writer.wait_closed()
        call = await only_call(store)
        sampled = engine.sampled
        await asyncio.sleep(0.1)
        assert engine.aborted == 1
        assert engine.sampled == sampled
        assert reader is not None
    assert call.status == "client_gone"
    assert call.http_status == 499
    assert 0 < len(call.choices[0].token_ids) < 10_000
    assert len(call.choices[0].token_ids) == len(call.choices[0].logprobs)


async def test_stopping_the_gateway_records_calls_in_flight(store: Store) -> None:
    engine = ScriptedEngine(lambda request: "x" * 10_000, pace=0.01, tokens_per_event=1)
    async with engine, Gateway(engine, store, GatewaySettings(port=0), grace=0) as gateway:
        task = asyncio.create_task(client(gateway.url).post("/chat/completions", json=CHAT))
        await until(lambda: engine.sampled)
    assert (await task).status_code == 503
    call = await only_call(store)
    assert call.status == "client_gone"
    assert call.error == "the gateway was stopped"


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors_before_the_first_token(serve: Serve, store: Store, stream: bool) -> None:
    too_long = RequestError("the prompt is too long", param="messages", code="context_length_exceeded")
    async with serve(ScriptedEngine(lambda request: too_long)) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={**CHAT, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    call = await only_call(store)
    assert call.status == "upstream_error"
    assert call.error == "the prompt is too long"


async def test_engine_error_in_the_middle_of_a_stream(serve: Serve, store: Store) -> None:
    async with serve(BrokenEngine("hel")) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={**CHAT, "stream": True})
    chunks = events_of(answer.text)
    assert "error" in json.loads(chunks[-1])
    assert "[DONE]" not in answer.text
    call = await only_call(store)
    assert call.status == "upstream_error"
    assert call.choices[0].token_ids.tolist() == encode("hel")


async def test_a_fault_of_polar_has_its_own_code(serve: Serve, store: Store) -> None:
    def break_down(request: EngineRequest) -> ScriptedReply:
        raise LookupError("a fault")

    async with serve(ScriptedEngine(break_down)) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert [call.status for call in await recorded_calls(store)] == ["upstream_error"]


@pytest.mark.parametrize(("status", "retry"), [(503, "1"), (429, "1"), (502, None)])
async def test_engine_error_status(serve: Serve, status: int, retry: str | None) -> None:
    engine = ScriptedEngine(lambda request: EngineError("busy", status=status))
    async with serve(engine) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json=CHAT)
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry


async def test_slow_first_token_gets_headers_and_heartbeats(serve: Serve) -> None:
    heard_enough = asyncio.Event()

    class Prefilling(ScriptedEngine):
        async def sample(
            self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
        ) -> AsyncGenerator[SampleEvent, None]:
            await heard_enough.wait()
            async for event in super().sample(request, stream=stream, prompt=prompt):
                yield event

    engine = Prefilling(lambda request: "ab")
    body = ""
    settings = {"headers_after_seconds": 0.05, "heartbeat_seconds": 0.1}
    async with (
        serve(engine, **settings) as gateway,
        client(gateway.url) as http,
        http.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        async for chunk in answer.aiter_text():
            body += chunk
            if body.count(": keepalive\n\n") >= 2 and not heard_enough.is_set():
                assert engine.sampled == 0
                heard_enough.set()
    assert events_of(body)[-1] == "[DONE]"
    assert engine.sampled == 3


async def test_records_a_call_that_fails_inside_polar(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(lambda request: KeyError("a bug"))) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json=CHAT)
    assert answer.status_code == 500
    assert "KeyError" in answer.json()["error"]["message"]
    assert (await only_call(store)).status == "upstream_error"


async def test_replaces_half_an_emoji(serve: Serve, store: Store) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        assert (await http.post("/chat/completions", content=body)).status_code == 200
        for bad in (b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000):
            assert (await http.post("/chat/completions", content=bad)).status_code == 400
    assert json.loads((await only_call(store)).messages[0])["content"] == "cut ?"


async def test_writes_out_default_sampling_parameters(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        await http.post("/chat/completions", json=CHAT)
    sampling = (await only_call(store)).sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, 0)


async def test_answers_and_records_tool_calls(serve: Serve, store: Store) -> None:
    calls = [ToolCall("call_1", "bash", '{"command": "ls"}'), ToolCall("call_2", "bash", '{"command": "pwd"}')]
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    async with serve(ScriptedEngine(lambda request: calls)) as gateway, client(gateway.url) as http:
        answer = (await http.post("/chat/completions", json={**CHAT, "tools": tools})).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [c.arguments for c in calls]
    call = await only_call(store)
    assert call.tools is not None
    assert json.loads(call.tools) == tools


async def test_answers_several_choices_and_prompts(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        many = (await http.post("/chat/completions", json={**CHAT, "n": 3})).json()
        prompts = {"model": "m", "prompt": ["one", "two"], "n": 2, "max_tokens": 3, "return_token_ids": True}
        text = (await http.post("/completions", json=prompts)).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2]
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2, 3]
    assert [choice["finish_reason"] for choice in text["choices"]] == ["length"] * 4
    assert text["choices"][2]["prompt_token_ids"] == encode("two")
    assert text["choices"][3]["text"] == "hel"
    (session,) = await store.sessions.recent()
    assert session.calls == 3


async def test_records_the_edge_of_a_continuation(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        first = await http.post("/chat/completions", json=CHAT)
        messages = [*CHAT["messages"], first.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        await http.post("/chat/completions", json={**CHAT, "messages": messages})
        await http.post("/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": "other"}]})
    calls = await recorded_calls(store)
    assert [call.edge for call in calls] == ["root", "continues", "root"]
    assert calls[1].parent_call_id == calls[0].call_id


async def test_large_bodies(serve: Serve, store: Store) -> None:
    """A body of 100 MB passes. A body above the limit gets 413 in the dialect's own format."""
    big = {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000_000}]}
    engine = ScriptedEngine()

    async def short(request: object) -> list[int]:
        return [1, 2]

    engine.render = short  # type: ignore[method-assign]
    async with serve(engine, max_body_mb=101) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json=big)
        assert answer.status_code == 200
        big["messages"].append({"role": "user", "content": "x" * 8_000_000})  # type: ignore[attr-defined]
        refused = await http.post("/chat/completions", json=big)
        assert refused.status_code == 413
        assert refused.json()["error"]["type"] == "invalid_request_error"
    assert len((await only_call(store)).messages[0]) > 100_000_000


async def test_a_socket_inside_a_sandbox_takes_only_known_keys(serve: Serve, store: Store) -> None:
    """Even if the gateway itself accepts any key: an agent has its own and needs no other."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await new_session(store, "made")
    async with serve(ScriptedEngine()) as gateway, client(f"http://127.0.0.1:{port}") as http:
        await gateway.serve_on(listener)
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # asyncio leaves it to its owner
        own = {"authorization": "Bearer made"}
        assert (await http.post("/chat/completions", json=CHAT, headers=own)).status_code == 200
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 401
        assert (await http.post("/chat/completions", json=CHAT, headers={"x-api-key": "guess"})).status_code == 401
        await gateway.stop_serving_on(listener)
        with pytest.raises(httpx.HTTPError):
            async with client(f"http://127.0.0.1:{port}") as late:
                await late.post("/chat/completions", json=CHAT)


async def test_a_heartbeat_is_sent_one_interval_after_the_last_event(serve: Serve) -> None:
    """Not at the next multiple of the interval since the headers, up to twice as late."""
    silent = asyncio.Event()

    class Thinking(ScriptedEngine):
        async def sample(
            self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
        ) -> AsyncGenerator[SampleEvent, None]:
            await asyncio.sleep(0.2)
            async for event in super().sample(request, stream=stream, prompt=prompt):
                yield event
                await silent.wait()

    engine = Thinking(lambda request: "ab", tokens_per_event=1)
    settings = {"headers_after_seconds": 0.0, "heartbeat_seconds": 2.0}
    async with (
        serve(engine, **settings) as gateway,
        client(gateway.url) as http,
        http.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as answer,
    ):
        loop, last = asyncio.get_running_loop(), 0.0
        async for chunk in answer.aiter_text():
            if ": keepalive" in chunk and not silent.is_set():
                assert loop.time() - last < 3.0
                silent.set()
            last = loop.time()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [False, True])
async def test_an_answered_request_is_freed_without_a_garbage_collection(
    serve: Serve, stream: bool, fault: bool
) -> None:
    """The collector seldom looks at old objects. Cycles of long requests would take any amount of memory until then."""
    # A reply of its own for each call, because an exception that is raised again keeps its earlier traceback.
    engine = ScriptedEngine(lambda _: ScriptedReply("he", error=EngineError("broken") if fault else None))
    settings = {"retry_window_seconds": 0.0, "headers_after_seconds": 0.0}
    async with serve(engine, **settings) as gateway, client(gateway.url) as http:
        gc.collect()
        gc.disable()
        try:
            for number in range(4):
                await http.post("/chat/completions", json={**CHAT, "stream": stream, "user": str(number)})
            # The connection keeps its last request, and the retry cache the last answer.
            await until(lambda: sum(isinstance(found, RequestContext) for found in gc.get_objects()) <= 1)
        finally:
            gc.enable()
