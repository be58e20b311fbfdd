"""Hooks at a running gateway: what the model and the agent get, what is recorded, and what is never trained."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply, decode
from polar_proxy.errors import UsageError
from polar_proxy.export.exporter import export
from polar_proxy.gateway.hooks import HookedCall, Hooks
from polar_proxy.store import Store
from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.grades import excluded_calls
from polar_proxy.types import ChatRequest, EngineRequest, Message, ToolCall
from tests.conftest import Serve
from tests.gateway.agents import chat_request, client, new_session
from tests.gateway.test_budgets import DIALECTS, KEY, sdk_of

pytestmark = pytest.mark.slow

HERE = __name__


class WithoutInternet:
    """Removes the tool that leaks the internet."""

    def on_request(self, request: EngineRequest, call: HookedCall) -> EngineRequest | None:
        if not isinstance(request, ChatRequest):
            return None
        return replace(request, tools=tuple(tool for tool in request.tools if tool["function"]["name"] != "fetch"))


class Shouting:
    async def on_answer(self, answer: Message, call: HookedCall) -> Message | None:
        return replace(answer, content=answer.content.upper()) if isinstance(answer.content, str) else None


class SafeCommands:
    def on_tool_call(self, tool_call: ToolCall, call: HookedCall) -> ToolCall | None:
        return replace(tool_call, arguments='{"command": "true"}') if "rm -rf" in tool_call.arguments else None


class Rewriting:
    """Adds a message to each request."""

    def on_request(self, request: EngineRequest, call: HookedCall) -> EngineRequest:
        assert isinstance(request, ChatRequest)
        return replace(request, messages=(Message("system", f"You are {call.label}."), *request.messages))


class Failing:
    def on_request(self, request: EngineRequest, call: HookedCall) -> EngineRequest:
        raise ValueError("secret detail")


class Slow:
    def on_request(self, request: EngineRequest, call: HookedCall) -> None:
        time.sleep(1)


class Mistaken:
    def on_request(self, request: EngineRequest, call: HookedCall) -> Any:
        return {"messages": []}


class Nothing:
    pass


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


USER = {"role": "user", "content": "hi"}


@asynccontextmanager
async def hooked(serve: Serve, engine: ScriptedEngine, hooks: type[Any], **settings: Any) -> AsyncIterator[Any]:
    async with (
        serve(engine, hooks=f"{HERE}:{hooks.__name__}", **settings) as gateway,
        client(gateway.url, KEY) as http,
    ):
        yield http


async def test_removes_a_tool_and_records_both_lists(serve: Serve, store: Store) -> None:
    session = await new_session(store, KEY)
    engine = ScriptedEngine()
    messages: list[Any] = [USER]
    body = {"model": "m", "messages": messages, "tools": [tool("bash"), tool("fetch")]}
    async with hooked(serve, engine, WithoutInternet) as http:
        for _ in range(2):
            answer = await http.post("/chat/completions", json=body)
            messages += [answer.json()["choices"][0]["message"], USER]
    assert [one["function"]["name"] for one in chat_request(engine).tools] == ["bash"]
    calls = await store.calls.of_session(session)
    assert [call.hooks for call in calls] == [{"request": {"tools": [tool("bash")]}}] * 2
    assert all(b'"fetch"' in (call.tools or b"") for call in calls)
    assert [call.prompt_mode for call in calls] == ["render", "continue"]
    assert excluded_calls(calls) == {}
    assert [len(trace.call_ids) for trace in build(calls, "merged").traces] == [2]


async def test_what_a_hook_changed_is_stored_without_secrets(serve: Serve, store: Store) -> None:
    session = await new_session(store, KEY)
    secret = tool("bash") | {"headers": {"Authorization": "Bearer sk-live-0123456789abcdef0123"}}
    async with hooked(serve, ScriptedEngine(), WithoutInternet) as http:
        body = {"model": "m", "messages": [USER], "tools": [secret, tool("fetch")]}
        assert (await http.post("/chat/completions", json=body)).status_code == 200
    (call,) = await store.calls.of_session(session)
    assert "bash" in str(call.hooks)
    assert "0123456789abcdef" not in str(call.hooks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_agents_get_the_changed_answer(serve: Serve, store: Store, dialect: str, stream: bool) -> None:
    session = await new_session(store, KEY)
    async with serve(ScriptedEngine(), hooks=f"{HERE}:Shouting") as gateway, sdk_of(dialect, gateway.url) as ask_model:
        assert await ask_model("hi", stream) == "HELLO"
    (call,) = await store.calls.of_session(session)
    assert call.choices[0].message.content == "HELLO"
    assert call.hooks is not None
    assert [answer["content"] for answer in call.hooks["answer"]] == ["hello"]
    assert call.choices[0].token_ids.size > 0  # what was sampled
    assert excluded_calls([call]) == {call.call_id: "hook"}


async def test_a_changed_answer_is_not_trained_and_the_next_prompt_has_the_changed_text(
    serve: Serve, store: Store
) -> None:
    session = await new_session(store, KEY)
    replies = iter(("quiet", "LOUD", "quiet"))
    engine = ScriptedEngine(lambda request: next(replies))
    messages: list[Any] = [USER]
    async with hooked(serve, engine, Shouting) as http:
        for _ in range(3):
            answer = await http.post("/chat/completions", json={"model": "m", "messages": messages})
            messages += [answer.json()["choices"][0]["message"], USER]
    calls = await store.calls.of_session(session)
    assert [call.edge for call in calls] == ["root", "continues", "continues"]
    assert [call.prompt_reason for call in calls] == ["no_base", "base_without_tokens", None]
    assert excluded_calls(calls) == {calls[0].call_id: "hook", calls[2].call_id: "hook"}
    for builder in BUILDERS:
        result = build(calls, builder)
        (trace,) = result.traces
        text = bytes(int(token) - 3 for token in trace.token_ids if token > 2).decode()
        assert "QUIET" in text
        assert "quiet" not in text
        assert len(result.excluded) + len(trace.call_ids) == len(calls)


async def test_an_export_counts_the_calls_whose_answers_hooks_changed(serve: Serve, store: Store) -> None:
    await new_session(store, KEY)
    replies = iter(("quiet", "LOUD", "also quiet"))
    async with hooked(serve, ScriptedEngine(lambda request: next(replies)), Shouting) as http:
        for number in range(3):
            messages = [{"role": "user", "content": f"question {number}"}]
            await http.post("/chat/completions", json={"model": "m", "messages": messages})
    lines: list[bytes] = []
    report = await export(store, "tokens-jsonl", lines.append)
    assert (report.rows, dict(report.left_out)) == (1, {"hook": 2})
    (row,) = map(json.loads, lines)
    trained = [token for token, mask in zip(row["response_ids"], row["loss_mask"], strict=True) if mask]
    assert decode(trained) == "LOUD"


async def test_changes_a_tool_call(serve: Serve, store: Store) -> None:
    session = await new_session(store, KEY)
    calls = (ToolCall("call_1", "bash", '{"command": "ls"}'), ToolCall("call_2", "bash", '{"command": "rm -rf /"}'))
    engine = ScriptedEngine(lambda request: ScriptedReply("ok", calls=calls))
    async with hooked(serve, engine, SafeCommands) as http:
        answer = await http.post("/chat/completions", json={"model": "m", "messages": [USER], "tools": [tool("bash")]})
    got = [one["function"]["arguments"] for one in answer.json()["choices"][0]["message"]["tool_calls"]]
    assert got == ['{"command": "ls"}', '{"command": "true"}']
    (record,) = await store.calls.of_session(session)
    assert [one.arguments for one in record.choices[0].message.tool_calls] == got
    assert "rm -rf" in str((record.hooks or {})["answer"])


async def test_an_answer_that_a_hook_leaves_alone_is_trained(serve: Serve, store: Store) -> None:
    session = await new_session(store, KEY)
    async with hooked(serve, ScriptedEngine(lambda request: "LOUD"), Shouting) as http:
        await http.post("/chat/completions", json={"model": "m", "messages": [USER]})
    calls = await store.calls.of_session(session)
    assert [call.hooks for call in calls] == [None]
    assert excluded_calls(calls) == {}


async def test_a_rewritten_conversation_is_rendered_each_time(serve: Serve, store: Store) -> None:
    session = await new_session(store, KEY)
    engine = ScriptedEngine()
    messages: list[Any] = [USER]
    async with hooked(serve, engine, Rewriting) as http:
        for _ in range(2):
            answer = await http.post("/chat/completions", json={"model": "m", "messages": messages})
            messages += [answer.json()["choices"][0]["message"], USER]
    calls = await store.calls.of_session(session)
    assert [call.prompt_reason for call in calls] == ["hook", "hook"]
    assert [call.edge for call in calls] == ["root", "continues"]  # of the conversation as the agent sent it
    system = {"role": "system", "content": "You are None."}
    assert (calls[0].hooks or {})["request"]["messages"][0] == {"position": 0, "message": system}
    assert chat_request(engine).messages[0].content == "You are None."
    assert excluded_calls(calls) == {}
    assert build(calls, "merged").drift_events == ()


@pytest.mark.parametrize("hooks", [Failing, Slow, Mistaken])
async def test_a_failing_hook_fails_the_call_and_is_logged_once(
    serve: Serve, store: Store, hooks: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    session = await new_session(store, KEY)
    engine = ScriptedEngine()
    async with hooked(serve, engine, hooks, hook_seconds=0.2) as http:
        with caplog.at_level(logging.ERROR):
            answers = [await http.post("/chat/completions", json={"model": "m", "messages": [USER]}) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {500}
    error = answers[0].json()["error"]
    assert error["code"] == "hook_failed"
    assert "secret detail" not in error["message"]
    assert len([line for line in caplog.records if "the hook on_request failed" in line.message]) == 1
    assert engine.requests == []
    calls = await store.calls.of_session(session)
    assert {(call.status, call.http_status) for call in calls} == {("upstream_error", 500)}


async def test_a_plain_hook_does_not_stop_the_event_loop(serve: Serve, store: Store) -> None:
    async with hooked(serve, ScriptedEngine(), Slow, hook_seconds=5) as http:
        waiting = asyncio.create_task(http.post("/chat/completions", json={"model": "m", "messages": [USER]}))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        assert (await http.get(str(http.base_url).replace("/v1", "") + "healthz")).status_code == 200
        assert time.monotonic() - began < 0.6
        assert (await waiting).status_code == 200


@pytest.mark.parametrize("name", [f"{HERE}:Nothing", f"{HERE}:Missing", "no_such_module:Hooks", "hooks"])
def test_refuses_hooks_that_cannot_be_used(name: str) -> None:
    with pytest.raises(UsageError, match="hooks"):
        Hooks(name, 1.0)
