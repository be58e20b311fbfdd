"""Passed-on requests whose history the provider keeps (conversations, item references), and passed-on requests that
ask no model: token counts, stored responses, conversations."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest

from polar_proxy.export.text_conversations import text_conversations
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.traces.grades import excluded_calls
from polar_proxy.types import CallRecord, Json
from tests.gateway.agents import recorded_calls
from tests.gateway.test_passthrough import ANTHROPIC, GOOGLE, KEY, MODEL, RESPONSES, Provider
from tests.gateway.test_passthrough_routes import OWN_KEY, mixed, post, responses_answer, texts

pytestmark = pytest.mark.slow

CONVERSATION = b'{ "id":"conv_67c9", "object":"conversation", "created_at":1, "metadata":{} }'
CREATE: Json = {"items": [{"role": "user", "content": "Call me Ada."}]}


class Talk:
    """An agent that keeps its conversation at the provider."""

    def __init__(self, gateway: Gateway, provider: Provider, conversation: Any = "conv_67c9") -> None:
        self.gateway = gateway
        self.provider = provider
        self.conversation = conversation
        self._number = 0

    async def ask(self, text: str, key: str = KEY) -> None:
        self._number += 1
        self.provider.body = responses_answer(self._number, f"answer {text}")
        body = {"model": "gpt-5", "input": text, "conversation": self.conversation}
        answer = await post(self.gateway.url, "/v1/responses", body, key)
        assert answer.content == self.provider.body
        assert json.loads(self.provider.requests[-1][2]) == body

    async def request(self, method: str, path: str, body: Json | None = None, sent_back: bytes = b"{}") -> None:
        """Send a request that must be passed on, with its response, byte for byte."""
        content = b"" if body is None else json.dumps(body, indent=1).encode()
        self.provider.body = sent_back
        async with httpx.AsyncClient() as http:
            answer = await http.request(method, self.gateway.url + path, content=content, headers=OWN_KEY)
        first, headers, received = self.provider.requests[-1]
        assert (answer.status_code, answer.content) == (self.provider.status, sent_back)
        assert (first, headers["authorization"]) == (f"{method} {path} HTTP/1.1", f"Bearer {KEY}")
        assert received == content


def json_provider(status: int = 200) -> Provider:
    return Provider(status, headers=[("content-type", "application/json"), ("x-ratelimit-remaining", "7")])


def reasons(calls: list[CallRecord]) -> list[str]:
    excluded = excluded_calls(calls)
    return [excluded[call.call_id] for call in calls]


@pytest.mark.parametrize("restart", [False, True])
async def test_a_conversation_at_the_provider_is_recorded_with_its_history(store: Store, restart: bool) -> None:
    provider = json_provider()
    async with provider.serve() as url, contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(mixed(store, url, default=True))
        talk = Talk(gateway, provider)
        await talk.request("POST", "/v1/conversations", CREATE, CONVERSATION)
        for text in ("one", "two", "three"):
            if restart:
                await stack.aclose()
                talk.gateway = await stack.enter_async_context(mixed(store, url, default=True))
            talk.conversation = {"id": "conv_67c9"} if text == "two" else "conv_67c9"
            await talk.ask(text)
    calls = await recorded_calls(store, 3)
    assert texts(calls[-1]) == ["Call me Ada.", "one", "answer one", "two", "answer two", "three"]
    assert [call.edge for call in calls] == ["root", "continues", "continues"]
    assert [call.provider_conversation for call in calls] == ["conv_67c9"] * 3
    assert reasons(calls) == ["no_tokens"] * 3
    (conversation,) = text_conversations(calls, excluded_calls(calls))
    assert conversation.calls == tuple(calls)


async def test_a_conversation_that_was_created_elsewhere_is_joined_and_no_training_data(store: Store) -> None:
    provider = json_provider()
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        talk = Talk(gateway, provider)
        await talk.ask("one")
        await talk.ask("two")
    calls = await recorded_calls(store, 2)
    assert texts(calls[1]) == ["one", "answer one", "two"]
    assert [call.edge for call in calls] == ["root", "continues"]
    assert reasons(calls) == ["missing_history"] * 2


CHANGES: dict[str, tuple[str, str, Json | None]] = {
    "items added": ("POST", "/items", {"items": [{"role": "user", "content": "more"}]}),
    "an item deleted": ("DELETE", "/items/msg_1", None),
    "deleted": ("DELETE", "", None),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_conversation_that_was_changed_is_no_training_data_from_then_on(store: Store, change: str) -> None:
    method, path, body = CHANGES[change]
    provider = json_provider()
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        talk = Talk(gateway, provider)
        await talk.request("POST", "/v1/conversations", {}, CONVERSATION)
        await talk.ask("one")
        await talk.request("GET", "/v1/conversations/conv_67c9/items?limit=2")
        await talk.ask("two")
        await talk.request(method, f"/v1/conversations/conv_67c9{path}", body)
        await talk.ask("three")
    assert reasons(await recorded_calls(store, 3)) == ["no_tokens", "no_tokens", "missing_history"]


async def test_a_call_that_broke_off_may_have_added_to_its_conversation(store: Store) -> None:
    provider = json_provider()
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        talk = Talk(gateway, provider)
        await talk.request("POST", "/v1/conversations", {}, CONVERSATION)
        body = {"model": "gpt-5", "input": "x", "conversation": "conv_67c9"}
        for provider.status in (400, 500):
            assert (await post(gateway.url, "/v1/responses", body)).status_code == provider.status
            provider.status = 200
            await talk.ask("next")
    refused, first, failed, second = await recorded_calls(store, 4)
    assert (refused.status, failed.status) == ("upstream_error", "upstream_error")
    assert reasons([first, second]) == ["no_tokens", "missing_history"]


async def test_no_call_is_joined_to_another_session(store: Store) -> None:
    provider = json_provider()
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        talk = Talk(gateway, provider)
        await talk.request("POST", "/v1/conversations", {}, CONVERSATION)
        await talk.ask("one")
        await talk.ask("two", key="sk-of-another-agent")
        provider.body = responses_answer(3, "answer")
        for body in ({"previous_response_id": "resp_of_provider_1"}, {"input": [{"id": "msg_1"}]}):
            await post(gateway.url, "/v1/responses", {"model": "gpt-5", "input": "x", **body}, "sk-of-another-agent")
    (other,) = [row.session_id for row in await store.sessions.recent() if row.calls == 3]
    calls = await store.calls.of_session(other)
    assert texts(calls[0]) == ["two"]
    assert reasons(calls) == ["missing_history"] * 3


OUTPUT: list[Json] = [
    {"id": "rs_9f", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Look first."}]},
    {"id": "msg_9f", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"id": "ws_9f", "type": "web_search_call", "status": "completed"},
    {"id": "fc_a", "type": "function_call", "call_id": "call_a", "name": "sh", "arguments": '{"cmd": "ls"}'},
    {"id": "fc_b", "type": "function_call", "call_id": "call_b", "name": "sh", "arguments": '{"cmd": "pwd"}'},
]
RESULTS: list[Json] = [
    {"type": "function_call_output", "call_id": "call_a", "output": "a.txt"},
    {"type": "function_call_output", "call_id": "call_b", "output": "/home"},
]


def reference(identity: str) -> Json:
    return {"type": "item_reference", "id": identity}


@pytest.mark.parametrize("restart", [False, True])
async def test_referenced_items_are_recorded_as_the_items_themselves(store: Store, restart: bool) -> None:
    provider = json_provider()
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    answer = {"id": "resp_1", "object": "response", "status": "completed", "output": OUTPUT, "usage": usage}
    user: Json = {"role": "user", "content": "Which files?"}
    tools = RESPONSES["tools"]
    async with provider.serve() as url, contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(mixed(store, url, default=True))
        provider.body = json.dumps(answer).encode()
        await post(gateway.url, "/v1/responses", {"model": "m", "input": [user], "tools": tools})
        if restart:
            await stack.aclose()
            gateway = await stack.enter_async_context(mixed(store, url, default=True))
        items = [user, *(reference(item["id"]) for item in OUTPUT if item["id"] != "ws_9f"), *RESULTS]
        body = {"model": "m", "input": items, "tools": tools}
        provider.body = responses_answer(2, "a.txt in /home")
        await post(gateway.url, "/v1/responses", body)
    assert json.loads(provider.requests[-1][2]) == body
    first, second = await recorded_calls(store, 2)
    places = {"rs_9f": "rs_0", "msg_9f": "msg_0", "fc_a": "fc_0", "fc_b": "fc_1"}
    found = await store.calls.find_items(first.session_id, [*places, "fc_c"])
    assert found == {identity: (first.call_id, place) for identity, place in places.items()}
    assert (second.edge, second.parent_call_id) == ("continues", first.call_id)
    assert reasons([first, second]) == ["no_tokens"] * 2
    kinds = [json.loads(message).get("type") for message in second.messages]
    assert kinds == [None, "reasoning", "message", "function_call", "function_call", *["function_call_output"] * 2]
    (conversation,) = text_conversations([first, second], excluded_calls([first, second]))
    assert len(conversation.calls) == 2


async def test_a_call_with_a_stored_prompt_is_no_training_data(store: Store) -> None:
    provider = json_provider()
    provider.body = responses_answer(1, "yes")
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        await post(gateway.url, "/v1/responses", {"model": "m", "input": "and?", "prompt": {"id": "pmpt_1"}})
    assert reasons(await recorded_calls(store, 1)) == ["missing_history"]


async def test_a_reference_to_an_unknown_item_is_no_training_data(store: Store) -> None:
    provider = json_provider()
    provider.body = responses_answer(1, "yes")
    items = [reference("msg_unknown"), {"role": "user", "content": "and?"}]
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        answer = await post(gateway.url, "/v1/responses", {"model": "m", "input": items})
    assert answer.content == provider.body
    (call,) = await recorded_calls(store, 1)
    assert [json.loads(message) for message in call.messages] == items
    assert reasons([call]) == ["missing_history"]


async def test_an_answer_in_the_background_is_recorded_as_unread(store: Store) -> None:
    provider = json_provider()
    provider.body = json.dumps({"id": "resp_1", "object": "response", "status": "queued", "output": []}).encode()
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        body = {"model": "m", "input": "x", "background": True}
        assert (await post(gateway.url, "/v1/responses", body)).content == provider.body
        talk = Talk(gateway, provider)
        await talk.request("GET", "/v1/responses/resp_1?stream=true", sent_back=b"data: {}\n\n")
        await talk.request("POST", "/v1/responses/resp_1/cancel", {}, b'{"id": "resp_1"}')
    (call,) = await recorded_calls(store, 1)
    assert call.choices[0].finish_reason == "unread"


COUNTS: dict[str, tuple[str, Json]] = {
    "anthropic": ("/v1/messages/count_tokens", {name: ANTHROPIC[name] for name in ("model", "messages", "tools")}),
    "responses": ("/v1/responses/input_tokens", RESPONSES),
    "google": (f"{MODEL}:countTokens?x=%2F", GOOGLE),
}


@pytest.mark.parametrize("status", [200, 429])
@pytest.mark.parametrize("name", COUNTS)
async def test_requests_for_token_counts_are_passed_on_and_not_recorded(store: Store, name: str, status: int) -> None:
    path, body = COUNTS[name]
    provider = json_provider(status)
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        await Talk(gateway, provider).request("POST", path, body, b'{ "input_tokens" : 14 }')
    assert [row.calls for row in await store.sessions.recent()] == [0]


async def test_headers_of_a_token_count_are_passed_on(store: Store) -> None:
    provider = json_provider()
    path, body = COUNTS["anthropic"]
    async with provider.serve() as url, mixed(store, url, default=True) as gateway:
        answer = await post(gateway.url, path, body)
    assert answer.headers["x-ratelimit-remaining"] == "7"


async def test_a_token_count_whose_provider_cannot_be_reached_gets_an_error(store: Store) -> None:
    path, body = COUNTS["anthropic"]
    async with mixed(store, "http://127.0.0.1:9", default=True) as gateway:
        answer = await post(gateway.url, path, body)
    assert (answer.status_code, answer.json()["type"]) == (502, "error")


async def test_a_rule_chooses_which_token_counts_are_passed_on(store: Store) -> None:
    path, body = COUNTS["anthropic"]
    provider = json_provider()
    provider.body = b'{"input_tokens":12345}'
    async with provider.serve() as url, mixed(store, url, models=("claude-*",)) as gateway:
        passed = await post(gateway.url, path, {**body, "model": "claude-x"})
        counted = await post(gateway.url, path, {**body, "model": "m"})
    assert passed.content == provider.body
    assert counted.json()["input_tokens"] != 12345
    assert len(provider.requests) == 1
