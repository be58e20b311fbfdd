"""Conversations: the routes of the Conversations API, and calls that continue a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from pydantic import TypeAdapter

from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.gateway.responses import conversations
from polar_proxy.store import Store
from polar_proxy.types import Json, Message
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.fakes.store_faults import failing_writes
from tests.gateway.agents import chat_request, client, connected_sdk, new_session, recorded_calls
from tests.gateway.responses_agent import CALLS, OUTPUTS, TOOLS, two_step_engine
from tests.until import until

pytestmark = pytest.mark.slow

HELLO: Json = {"type": "message", "role": "user", "content": "hi"}
both = pytest.mark.parametrize("stream", [False, True])


def assert_published(model: Any, answer: Any) -> None:
    """Assert that an answer of the SDK, which validates nothing, is valid by the SDK's type of it."""
    _adapter(model).validate_python(answer.to_dict(), strict=True)


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


async def listed(sdk: AsyncOpenAI, identity: str) -> list[Any]:
    """Return all items in order, each checked against the published type."""
    items: list[Any] = [item async for item in sdk.conversations.items.list(identity, order="asc")]
    for item in items:
        assert_published(ConversationItem, item)
    return items


async def test_conversation_is_created_read_changed_and_deleted(serve: Serve, store: Store) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        made = await sdk.conversations.create(metadata={"topic": "a"}, items=[HELLO])
        assert_published(Conversation, made)
        assert (made.metadata, made.object) == ({"topic": "a"}, "conversation")
        assert await sdk.conversations.retrieve(made.id) == made
        changed = await sdk.conversations.update(made.id, metadata={"topic": "b"})
        assert changed.metadata == {"topic": "b"}
        assert await sdk.conversations.retrieve(made.id) == changed
        deleted = await sdk.conversations.delete(made.id)
        assert_published(ConversationDeletedResource, deleted)
        assert (deleted.id, deleted.deleted) == (made.id, True)
        with pytest.raises(openai.NotFoundError, match="Conversation with id 'conv_"):
            await sdk.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.create(model="m", input="hi", conversation=made.id)
    rows = (await store.maintenance.stats())["rows"]
    assert (rows["calls"], rows["conversations"], rows["conversation_items"]) == (0, 0, 0)


async def test_items_are_added_listed_read_and_deleted(serve: Serve) -> None:
    items: Any = [
        HELLO,
        {"role": "assistant", "content": "hello", "id": "msg_of_the_client"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c0", "name": "bash", "arguments": "{}"},
        OUTPUTS[0],
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"},
        OUTPUTS[1],
    ]
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        made = await sdk.conversations.create()
        empty = await sdk.conversations.items.list(made.id)
        assert_published(ConversationItemList, empty)
        added = await sdk.conversations.items.create(made.id, items=items)
        assert_published(ConversationItemList, added)
        everything = await listed(sdk, made.id)
        assert [item.id for item in everything] == [item.id for item in added.data]
        assert everything[1].id == "msg_of_the_client"
        assert everything[0].content[0].type == "input_text"
        page = await sdk.conversations.items.list(made.id, limit=3)
        newest = [item async for item in page]
        assert [item.id for item in newest] == [item.id for item in reversed(everything)]
        assert len(page.data) == 3
        one = await sdk.conversations.items.retrieve(everything[3].id, conversation_id=made.id)
        assert one == everything[3]
        left = await sdk.conversations.items.delete(one.id, conversation_id=made.id)  # type: ignore[arg-type]
        assert left == made
        assert [item.id for item in await listed(sdk, made.id)] == [i.id for i in everything if i.id != one.id]
        with pytest.raises(openai.NotFoundError, match="not found in this conversation"):
            await sdk.conversations.items.retrieve(str(one.id), conversation_id=made.id)


@both
async def test_calls_of_a_conversation_continue_each_other(serve: Serve, store: Store, stream: bool) -> None:
    """The second turn sends only the tools' outputs; a gateway that has just started serves it."""
    engine = two_step_engine()
    async with connected_sdk(serve, engine) as sdk:
        made = await sdk.conversations.create(items=[{"type": "message", "role": "developer", "content": "be exact"}])
        one = await turn(sdk, stream, conversation=made.id, input=[HELLO], instructions="now")
    assert one.conversation.id == made.id
    async with connected_sdk(serve, engine) as sdk:
        two = await turn(sdk, stream, conversation={"id": made.id}, input=OUTPUTS, instructions="now")
        assert two.output_text == "done"
        three = await turn(sdk, stream, conversation=made.id, input="thanks", instructions="now")
        items = await listed(sdk, made.id)
        assert (await sdk.responses.retrieve(three.id)).to_dict() == three.to_dict()
    kinds = ["reasoning", "message", "function_call", "custom_tool_call"]
    outputs = ["function_call_output", "custom_tool_call_output", "message"]
    assert [item.type for item in items] == ["message", "message", *kinds, *outputs, "message", "message"]
    assert [item.id for item in items[2:6]] == [item.id for item in one.output]
    seen = chat_request(engine, 1)
    assert seen.messages[0] == Message("system", "now\n\nbe exact")
    assert seen.messages[2] == Message("assistant", "let me see", "hm", CALLS)
    first, second, third = await recorded_calls(store)
    assert [(call.edge, call.base_call_id) for call in (second, third)] == [
        ("continues", first.call_id),
        ("continues", second.call_id),
    ]
    assert [call.prompt_mode for call in (second, third)] == ["continue", "continue"]
    assert second.messages[: len(first.messages)] == first.messages  # the same bytes, stored once


async def turn(sdk: AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    if not stream:
        return await sdk.responses.create(model="m", tools=TOOLS, **fields)
    events = await sdk.responses.create(model="m", tools=TOOLS, stream=True, **fields)
    return [event async for event in events][-1].response


async def test_response_in_the_background_is_added(serve: Serve, store: Store) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        made = await sdk.conversations.create()
        await sdk.responses.create(model="m", input="hi", conversation=made.id, background=True)
        await recorded_calls(store, count=1)
        assert [item.type for item in await listed(sdk, made.id)] == ["message", "message"]


async def test_item_of_another_response_is_added_in_full(serve: Serve) -> None:
    engine = ScriptedEngine()
    async with connected_sdk(serve, engine) as sdk:
        other = await sdk.responses.create(model="m", input="hi")
        made = await sdk.conversations.create(items=[{"type": "item_reference", "id": other.output[0].id}])
        await sdk.responses.create(model="m", input="and?", conversation=made.id)
        # An item that the conversation has already is not repeated.
        again: Any = [{"type": "item_reference", "id": other.output[0].id}, HELLO]
        await sdk.responses.create(model="m", input=again, conversation=made.id)
    assert [message.content for message in engine.requests[-1].messages] == ["hello", "and?", "hello", "hi"]  # type: ignore[union-attr]


async def test_tokens_of_a_conversation_are_counted(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        made = await sdk.conversations.create(items=[HELLO])
        counted = await sdk.responses.input_tokens.count(model="m", input="go on", conversation=made.id)
        answer = await sdk.responses.create(model="m", input="go on", conversation=made.id)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


async def test_call_that_fails_adds_nothing(serve: Serve) -> None:
    async with connected_sdk(serve, BrokenEngine()) as sdk:
        made = await sdk.conversations.create()
        with pytest.raises(openai.APIError):
            await sdk.responses.create(model="m", input="hi", conversation=made.id)
        assert await listed(sdk, made.id) == []


async def test_call_that_cannot_be_recorded_is_not_answered(serve: Serve, store: Store) -> None:
    """A plain session's other calls are answered then; but the next call of this conversation would miss it."""
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        identity = (await http.post("/conversations", json={})).json()["id"]
        with failing_writes(store):
            refused = await http.post("/responses", json={"model": "m", "input": "hi", "conversation": identity})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
            unwritten = await http.post(f"/conversations/{identity}/items", json={"items": [HELLO]})
            assert (unwritten.status_code, unwritten.json()["error"]["code"]) == (503, "store_unavailable")
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        assert (await http.get(f"/conversations/{identity}/items")).json()["data"] == []


async def test_conversation_deleted_during_a_call_leaves_the_call_recorded(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(lambda request: ScriptedReply("hello", wait=0.5))
    async with connected_sdk(serve, engine) as sdk:
        made = await sdk.conversations.create()
        request = asyncio.create_task(sdk.responses.create(model="m", input="hi", conversation=made.id))
        await until(lambda: engine.requests)
        await sdk.conversations.delete(made.id)
        assert (await request).output_text == "hello"
    (call,) = await recorded_calls(store)
    assert call.status == "ok"


async def test_conversation_is_unknown_to_another_session(serve: Serve, store: Store) -> None:
    await new_session(store, "k2")
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        made = await sdk.conversations.create(items=[HELLO])
        (item,) = await listed(sdk, made.id)
        other = sdk.with_options(api_key="k2")
        attempts: list[Callable[[], Awaitable[Any]]] = [
            lambda: other.conversations.retrieve(made.id),
            lambda: other.conversations.update(made.id, metadata={"a": "b"}),
            lambda: other.conversations.delete(made.id),
            lambda: other.get(f"/conversations/{made.id}/items", cast_to=object),
            lambda: other.conversations.items.create(made.id, items=[HELLO]),
            lambda: other.conversations.items.retrieve(item.id, conversation_id=made.id),
            lambda: other.conversations.items.delete(item.id, conversation_id=made.id),
            lambda: other.responses.create(model="m", input="hi", conversation=made.id),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError, match="Conversation with id"):
                await attempt()
        assert [found.id for found in await listed(sdk, made.id)] == [item.id]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": 7}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "OWN", "store": False}, "store"),
        ({"conversation": "OWN", "input": [{**HELLO, "id": "twice"}]}, "input"),
        ({"conversation": "OWN", "input": [{"type": "item_reference", "id": "unknown"}]}, "input"),
    ],
)
async def test_bad_use_of_a_conversation_is_refused(serve: Serve, store: Store, fields: Json, param: str) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        own = (await http.post("/conversations", json={"items": [{**HELLO, "id": "twice"}]})).json()["id"]
        body = {"model": "m", "input": "hi", **fields}
        body["conversation"] = own if body["conversation"] == "OWN" else body["conversation"]
        refused = await http.post("/responses", json=body)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["param"] == param
    assert await recorded_calls(store) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "items"),
        ({"items": "hi"}, "items"),
        ({"items": [HELLO] * 21}, "items"),
        ({"items": [{**HELLO, "id": "a"}, {**HELLO, "id": "a"}]}, "items"),
        ({"items": [{**HELLO, "id": "twice"}]}, "items"),
        ({"items": [{"type": "hologram", "content": "x"}]}, "input[0]"),
    ],
)
async def test_bad_items_are_refused(serve: Serve, body: Json, param: str) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        own = (await http.post("/conversations", json={"items": [{**HELLO, "id": "twice"}]})).json()["id"]
        refused = await http.post(f"/conversations/{own}/items", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert len((await http.get(f"/conversations/{own}/items")).json()["data"]) == 1


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, ["a"], {"a": "x" * 513}, {"k" * 65: "x"}, {str(n): "x" for n in range(17)}]
)
async def test_bad_metadata_is_refused(serve: Serve, metadata: Any) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        refused = await http.post("/conversations", json={"metadata": metadata})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")


async def test_wrong_method_and_bad_list_are_refused(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        own = (await http.post("/conversations", json={})).json()["id"]
        refused = await http.put(f"/conversations/{own}")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, POST, DELETE")
        for query, param in (
            ("limit=0", "limit"),
            ("order=up", "order"),
            ("after=x", "after"),
            ("include=x", "include"),
        ):
            found = await http.get(f"/conversations/{own}/items?{query}")
            assert (found.status_code, found.json()["error"]["param"]) == (400, param)


async def test_size_of_conversations_is_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_MOST_CONVERSATIONS", 5)
    long: Json = {**HELLO, "content": "x" * 300_000}
    async with serve(ScriptedEngine(), max_body_mb=1, limits={"messages": 8}) as gateway, client(gateway.url) as http:
        own = (await http.post("/conversations", json={"items": [long]})).json()["id"]
        for content, statuses in ((long, [200, 200, 413]), (HELLO, [200] * 5 + [413])):
            found = [
                (await http.post(f"/conversations/{own}/items", json={"items": [content]})).status_code
                for _ in statuses
            ]
            assert found == statuses
        answer = await http.post("/responses", json={"model": "m", "input": "hi", "conversation": own})
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "conversation")
        made = [await http.post("/conversations", json={}) for _ in range(5)]
        assert [one.status_code for one in made] == [200] * 4 + [429]
        for one in made[:3]:
            path = f"/conversations/{one.json()['id']}/items"
            last = [await http.post(path, json={"items": [long]}) for _ in range(3)][-1]
        full = await http.post(f"/conversations/{made[3].json()['id']}/items", json={"items": [long] * 2})
        assert (last.status_code, full.status_code) == (200, 429)
