"""The passthrough engine beside other engines: rules that choose it, conversations that the provider has stored,
budgets, and tools that the provider runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from polar_proxy.config import GatewaySettings, RouteSettings
from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import UsageError
from polar_proxy.export.text_conversations import text_conversations
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.traces.grades import excluded_calls
from polar_proxy.types import CallRecord, Json
from tests.gateway.agents import new_session, recorded_calls
from tests.gateway.test_passthrough import ANTHROPIC, KEY, REQUESTS, Provider, answer_of, websocket_provider
from tests.gateway.test_provider_tools import REQUESTS as WITH_PROVIDER_TOOLS

pytestmark = pytest.mark.slow

OWN_KEY = {"authorization": f"Bearer {KEY}"}
SESSION = "sk-session-of-the-test"


@contextlib.asynccontextmanager
async def mixed(
    store: Store, url: str, *, default: bool = False, models: tuple[str, ...] = ("gpt-*",), **settings: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway whose own engine is scripted, and whose calls to `models` are passed on to `url`. With `default`,
    all calls are passed on."""
    passthrough = PassthroughEngine(url)
    given = GatewaySettings.model_validate({"port": 0, **settings})
    rule = RouteSettings(name="to-provider", engine="provider", models=models)
    scripted = ScriptedEngine(lambda request: "engine-text")
    gateway = (
        Gateway(passthrough, store, given)
        if default
        else Gateway(scripted, store, given, engines={"provider": passthrough}, routes=(rule,))
    )
    async with passthrough, gateway:
        yield gateway


async def post(url: str, path: str, body: Json, key: str = KEY) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(url + path, json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("name", ["chat", "chat whole", "responses whole", "anthropic", "google"])
async def test_a_rule_chooses_which_calls_are_passed_on(serve: Any, store: Store, name: str) -> None:
    path, body = REQUESTS[name]
    kind, expected = await answer_of(serve, path, body)
    provider = Provider(headers=[("content-type", kind)], body=expected)
    async with provider.serve() as url, mixed(store, url, models=("m",)) as gateway:
        passed = await post(gateway.url, path, body)
        other_path = path.replace("/m:", "/other:")
        answered = await post(gateway.url, other_path, {**body, "model": "other"} if "model" in body else body)
    assert passed.content == expected
    assert len(provider.requests) == 1
    assert provider.requests[0][1]["authorization"] == f"Bearer {KEY}"
    assert (answered.status_code, "engine-text" in answered.text) == (200, True)
    (session,) = [row for row in await store.sessions.recent() if row.label != "source"]
    calls = await store.calls.of_session(session.session_id)
    assert [(call.engine_name, call.route, call.status) for call in calls] == [
        ("provider", "to-provider", "no_tokens"),
        (None, None, "ok"),
    ]


def responses_answer(number: int, text: str) -> bytes:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    answer = {"id": f"resp_of_provider_{number}", "object": "response", "model": "gpt-5", "status": "completed"}
    return json.dumps({**answer, "output": [item], "usage": usage}).encode()


def texts(call: CallRecord) -> list[str]:
    """Return the texts of a call's messages."""
    found = []
    for message in map(json.loads, call.messages):
        content = message["content"]
        found.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
    return found


@pytest.mark.parametrize("restart", [False, True])
async def test_a_continued_response_is_recorded_with_its_history(store: Store, restart: bool) -> None:
    provider = Provider(headers=[("content-type", "application/json")])
    async with provider.serve() as url, contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(mixed(store, url))
        for number, text in enumerate(("one", "two", "three")):
            if restart:
                await stack.aclose()
                gateway = await stack.enter_async_context(mixed(store, url))
            provider.body = responses_answer(number, f"answer {text}")
            before = {"previous_response_id": f"resp_of_provider_{number - 1}"} if number else {}
            answer = await post(gateway.url, "/v1/responses", {"model": "gpt-5", "input": text, **before})
            assert answer.content == provider.body
    assert [json.loads(body)["input"] for _, _, body in provider.requests] == ["one", "two", "three"]  # as they came
    calls = await recorded_calls(store, 3)
    assert [call.edge for call in calls] == ["root", "continues", "continues"]
    assert texts(calls[-1]) == ["one", "answer one", "two", "answer two", "three"]
    for number, call in enumerate(calls):
        found = await store.calls.find_response(call.session_id, f"resp_of_provider_{number}")
        assert found == call.call_id
    excluded = excluded_calls(calls)
    assert set(excluded.values()) == {"no_tokens"}
    (conversation,) = text_conversations(calls, excluded)
    assert conversation.calls == tuple(calls)


@pytest.mark.parametrize("body", [{"previous_response_id": "resp_unknown"}, {"conversation": "conv_of_provider"}])
async def test_a_conversation_that_only_the_provider_has_is_no_training_data(store: Store, body: Json) -> None:
    provider = Provider(headers=[("content-type", "application/json")], body=responses_answer(0, "yes"))
    async with provider.serve() as url, mixed(store, url) as gateway:
        answers = [await post(gateway.url, "/v1/responses", {"model": "gpt-5", "input": "and?", **body})]
        follow = {"model": "gpt-5", "input": "more", "previous_response_id": "resp_of_provider_0"}
        answers.append(await post(gateway.url, "/v1/responses", follow))
    assert [answer.status_code for answer in answers] == [200, 200]
    calls = await recorded_calls(store, 2)
    assert texts(calls[1]) == ["and?", "yes", "more"]
    excluded = excluded_calls(calls)
    assert list(excluded.values()) == ["missing_history", "missing_history"]
    assert text_conversations(calls, excluded) == []


def websocket_events(request: Json) -> list[Json]:
    text = f"answer to {request['input']}"
    identity = f"resp_of_{request['input']}"
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    response = {"id": identity, "object": "response", "model": "gpt-5", "status": "completed", "usage": usage}
    return [
        {"type": "response.created", "response": {"id": identity}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {**response, "output": []}},
    ]


async def test_one_websocket_serves_both_engines(store: Store) -> None:
    """The WebSocket to the provider is opened for the first request that a rule passes on."""
    async with websocket_provider(websocket_events) as (url, keys), mixed(store, url) as gateway:
        address = "ws" + gateway.url.removeprefix("http") + "/v1/responses"
        async with connect(address, additional_headers=OWN_KEY, proxy=None) as socket:
            for number, (model, text) in enumerate([("local", "a"), ("gpt-5", "b"), ("gpt-5", "c"), ("local", "d")]):
                assert keys == [f"Bearer {KEY}"] * (number > 1)
                before = {"previous_response_id": "resp_of_b"} if text == "c" else {}
                await socket.send(json.dumps({"type": "response.create", "model": model, "input": text, **before}))
                received = ""
                while '"response.completed"' not in received:
                    received = str(await socket.recv())
                assert ("resp_of_" in received) == (model == "gpt-5")
    calls = await recorded_calls(store, 4)
    assert [call.status for call in calls] == ["ok", "no_tokens", "no_tokens", "ok"]
    assert texts(calls[2]) == ["b", "answer to b", "c"]


async def test_a_provider_that_cannot_be_reached_fails_the_request_of_a_websocket(store: Store) -> None:
    async with mixed(store, "http://127.0.0.1:9") as gateway:
        address = "ws" + gateway.url.removeprefix("http") + "/v1/responses"
        async with connect(address, additional_headers=OWN_KEY, proxy=None) as socket:
            await socket.send(json.dumps({"type": "response.create", "model": "gpt-5", "input": "hi"}))
            event = json.loads(await socket.recv())
    assert (event["type"], event["status"]) == ("error", 502)
    (call,) = await recorded_calls(store, 1)
    assert call.status == "upstream_error"


async def test_a_provider_that_refuses_a_websocket_with_a_web_page_fails_the_request(store: Store) -> None:
    page = Provider(403, [("content-type", "text/html")], b"<h1>Forbidden</h1>")
    async with page.serve() as url, mixed(store, url) as gateway:
        address = "ws" + gateway.url.removeprefix("http") + "/v1/responses"
        async with connect(address, additional_headers=OWN_KEY, proxy=None) as socket:
            await socket.send(json.dumps({"type": "response.create", "model": "gpt-5", "input": "hi"}))
            event = json.loads(await socket.recv())
    assert (event["type"], event["status"], event["error"]["message"]) == ("error", 403, "<h1>Forbidden</h1>")


@pytest.mark.parametrize("dialect", WITH_PROVIDER_TOOLS)
async def test_tools_of_the_provider_are_passed_on_listed_and_never_trained(store: Store, dialect: str) -> None:
    path, body, names = WITH_PROVIDER_TOOLS[dialect]
    provider = Provider(headers=[("content-type", "application/json")], body=b"{}")
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        await post(gateway.url, f"/v1{path}", {"model": "m", **body})
    assert json.loads(provider.requests[0][2])["tools"] == body["tools"]
    (call,) = await recorded_calls(store, 1)
    assert call.sampling["provider_tools"] == {"action": "allowed", "names": names}
    assert excluded_calls([call]) == {call.call_id: "provider_tools"}


UNREADABLE: dict[str, Json] = {
    "nothing": {},
    "messages": {"messages": [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}]},
    "tools": {"max_tokens": "many"},
}
"""Fields that Polar cannot read, so that a body with them is passed on as it is."""


@pytest.mark.parametrize("unreadable", UNREADABLE)
async def test_tools_of_the_provider_are_refused_by_setting(store: Store, unreadable: str) -> None:
    path, body, _ = WITH_PROVIDER_TOOLS["messages"]
    body = {"model": "m", **body, **UNREADABLE[unreadable]}
    own_tools = {"tools": ANTHROPIC["tools"], "mcp_servers": None, "max_tokens": 9}
    provider = Provider(headers=[("content-type", "application/json")], body=b"{}")
    async with provider.serve() as url, mixed(store, url, default=True, provider_tools="refuse") as gateway:
        refused = await post(gateway.url, f"/v1{path}", body)
        passed = await post(gateway.url, f"/v1{path}", {**body, **own_tools})
    assert (refused.status_code, passed.content, len(provider.requests)) == (400, b"{}", 1)
    assert "tools that its provider would run" in refused.text


def test_tools_cannot_be_removed_from_calls_that_are_passed_on(store: Store) -> None:
    settings = GatewaySettings(port=0, provider_tools="remove")
    with pytest.raises(UsageError, match="cannot remove tools"):
        Gateway(PassthroughEngine(), store, settings)


@pytest.mark.parametrize("name", ["chat", "chat whole", "responses", "anthropic", "google"])
@pytest.mark.parametrize("at_budget", ["refuse", "stop"])
async def test_a_spent_budget_ends_calls_that_would_be_passed_on(
    serve: Any, store: Store, name: str, at_budget: str
) -> None:
    path, body = REQUESTS[name]
    kind, expected = await answer_of(serve, path, body)
    session_id = await new_session(store, SESSION, {"max_calls": 1, "at_budget": at_budget})
    provider = Provider(headers=[("content-type", kind)], body=expected)
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        first, second = [await post(gateway.url, f"/s/{SESSION}{path}", body) for _ in range(2)]
    assert (first.content, len(provider.requests)) == (expected, 1)
    assert (second.status_code, "budget of this session is spent" in second.text) == (
        (403, True) if at_budget == "refuse" else (200, True)
    )
    calls = await store.calls.of_session(session_id)
    assert [call.status for call in calls] == ["no_tokens", "budget"][: len(calls)]
    assert len(calls) == (1 if at_budget == "refuse" else 2)


async def test_a_body_that_cannot_be_read_is_refused_over_budget(store: Store) -> None:
    await new_session(store, SESSION, {"max_calls": 1, "at_budget": "stop"})
    body = {**ANTHROPIC, "max_tokens": "many"}
    provider = Provider(headers=[("content-type", "application/json")], body=b"{}")
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        statuses = [(await post(gateway.url, f"/s/{SESSION}/v1/messages", body)).status_code for _ in range(2)]
    assert (statuses, len(provider.requests)) == ([200, 403], 1)


def test_hooks_cannot_be_combined_with_calls_that_are_passed_on(store: Store) -> None:
    settings = GatewaySettings(port=0, hooks="tests.gateway.test_hooks:Shouting")
    rule = RouteSettings(name="all", engine="provider")
    with pytest.raises(UsageError, match="Hooks cannot change calls"):
        Gateway(ScriptedEngine(), store, settings, engines={"provider": PassthroughEngine()}, routes=(rule,))
