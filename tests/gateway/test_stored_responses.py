"""Stored responses: retrieve, list the input, delete, cancel, refer to a response and to its items."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import CompactedResponse, ResponseItem
from pydantic import TypeAdapter

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.types import Json, Message
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.fakes.store_faults import failing_writes
from tests.gateway.agents import chat_request, client, connected_sdk, new_session, recorded_calls
from tests.gateway.published_responses import check_response, checked_events
from tests.gateway.responses_agent import CALLS, OUTPUTS, TOOLS, two_step_engine

pytestmark = pytest.mark.slow

BODY: Json = {"model": "m", "input": "hi"}
_ITEMS: TypeAdapter[Any] = TypeAdapter(ResponseItem)


@pytest.mark.parametrize("stream", [False, True])
async def test_second_turn_that_names_the_first_by_item_ids_continues_it(
    serve: Serve, store: Store, stream: bool
) -> None:
    """The AI SDK sends such bodies. The model sees the conversation, and the call continues the first one's tokens."""
    engine = two_step_engine()
    question: Any = {"role": "user", "content": "hi"}
    async with connected_sdk(serve, engine) as sdk:
        if stream:
            async with sdk.responses.stream(model="m", input=[question], tools=TOOLS) as events:
                one: Any = await events.get_final_response()
        else:
            one = await sdk.responses.create(model="m", input=[question], tools=TOOLS)
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    references: Any = [{"type": "item_reference", "id": item.id} for item in one.output]
    async with connected_sdk(serve, engine) as sdk:  # a gateway that has just started
        two = await sdk.responses.create(model="m", input=[question, *references, *OUTPUTS], tools=TOOLS)
    assert two.output_text == "done"
    seen = chat_request(engine)
    assert seen.messages[1] == Message("assistant", "let me see", "hm", CALLS)
    first, second = await recorded_calls(store)
    assert (second.edge, second.base_call_id) == ("continues", first.call_id)
    assert b"item_reference" not in b"".join(second.messages)


async def test_response_is_retrieved_as_it_was_sent(serve: Serve) -> None:
    async with connected_sdk(serve, two_step_engine(), temperature=0.5) as sdk:
        sent = await sdk.responses.create(
            model="m", input="hi", instructions="be exact", tools=TOOLS, metadata={"a": "b"}, top_p=0.3
        )
        found = await sdk.responses.retrieve(sent.id)
        cut = await sdk.responses.create(model="m", input="hi", max_output_tokens=2)
        assert (await sdk.responses.retrieve(cut.id)).to_dict() == cut.to_dict()
    assert found.to_dict() == sent.to_dict()
    assert (sent.temperature, sent.top_p) == (0.5, 1.0)  # the policy's, not the request's
    assert sent.completed_at is not None
    assert sent.completed_at >= sent.created_at
    assert sent.usage is not None
    assert 0 < sent.usage.output_tokens_details.reasoning_tokens < sent.usage.output_tokens
    assert cut.completed_at is None


async def test_recorded_events_are_streamed_again(serve: Serve) -> None:
    async with connected_sdk(serve, two_step_engine()) as sdk:
        sent = await sdk.responses.create(model="m", input="hi", tools=TOOLS)
        events = [event async for event in await sdk.responses.retrieve(sent.id, stream=True)]
        later = [event async for event in await sdk.responses.retrieve(sent.id, stream=True, starting_after=3)]
        none = [event async for event in await sdk.responses.retrieve(sent.id, stream=True, starting_after=999)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last: Any = events[-1]
    assert last.type == "response.completed"
    assert last.response.to_dict() == sent.to_dict()
    assert [event.to_dict() for event in later] == [event.to_dict() for event in events[4:]]
    assert none == []


async def test_input_items_are_listed_in_pages(serve: Serve) -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    items: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "id": "msg_of_the_client"},
        {"role": "user", "content": parts},
        {"type": "function_call", "call_id": "c0", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c0", "output": "ok"},
    ]
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        one = await sdk.responses.create(model="m", instructions="be exact", input=items)
        newest = await sdk.responses.input_items.list(one.id, limit=2)
        everything: list[Any] = [item async for item in newest]
        oldest = await sdk.responses.input_items.list(
            one.id, order="asc", limit=1, include=["message.input_image.image_url"]
        )
        first: Any = oldest.data[0]
        again = await sdk.responses.create(model="m", input=[{"type": "item_reference", "id": first.id}])
    assert [item.type for item in everything] == ["function_call_output", "function_call", *["message"] * 3]
    assert len(newest.data) == 2
    assert (first.role, first.content[0].text, first.content[0].type) == ("user", "hi", "input_text")
    assert everything[3].id == "msg_of_the_client"
    for item in everything:
        _ITEMS.validate_python(item.to_dict())
    assert again.output_text == "hello"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_x", "after"),
        ("/input_items?include=secrets", "include"),
        ("?stream=maybe", "stream"),
        ("?starting_after=1", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?include[]=message.output_text.logprobs", "include"),
    ],
)
async def test_bad_parameter_of_a_list_or_a_retrieval_is_named(serve: Serve, query: str, param: str) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        identity = (await http.post("/responses", json=BODY)).json()["id"]
        refused = await http.get(f"/responses/{identity}{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def assert_unknown(sdk: AsyncOpenAI, identity: str) -> None:
    """Assert that a session can neither see a response nor refer to it or to its items."""
    for request in (
        sdk.responses.retrieve(identity),
        sdk.responses.delete(identity),
        sdk.responses.cancel(identity),
        sdk.get(f"/responses/{identity}/input_items", cast_to=object),
    ):
        with pytest.raises(openai.NotFoundError, match="not found") as caught:
            await request
        assert (caught.value.type, caught.value.param, caught.value.code) == ("invalid_request_error", "id", None)
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="m", input="go on", previous_response_id=identity)
    assert refused.value.code == "previous_response_not_found"
    for item in ("msg", "rs", "in"):
        name = f"{item}_{identity.removeprefix('resp_')}_0"
        with pytest.raises(openai.NotFoundError, match="Items are not persisted") as unknown:
            await sdk.responses.create(model="m", input=[{"type": "item_reference", "id": name}])
        assert unknown.value.param == "input"


async def test_deleted_response_is_unknown_but_stays_recorded(serve: Serve, store: Store) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        one = await sdk.responses.create(model="m", input="hi")
        two = await sdk.responses.create(model="m", input="go on", previous_response_id=one.id)
        deleted = await sdk.delete(f"/responses/{one.id}", cast_to=object)
        assert deleted == {"id": one.id, "object": "response", "deleted": True}
        await assert_unknown(sdk, one.id)
        assert (await sdk.responses.retrieve(two.id)).output_text == "hello"
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        await assert_unknown(sdk, one.id)
    first, second = await recorded_calls(store)
    assert first.deleted_at is not None
    assert second.deleted_at is None
    assert first.choices[0].token_ids.size > 0


async def test_response_that_is_not_stored_is_recorded_but_unknown(serve: Serve, store: Store) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        one = await sdk.responses.create(model="m", input="hi", store=False)
        await assert_unknown(sdk, one.id)
    (call,) = await recorded_calls(store)
    assert call.status == "ok"


async def test_response_is_unknown_to_another_session(serve: Serve, store: Store) -> None:
    await new_session(store, "k2")
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        one = await sdk.responses.create(model="m", input="hi")
        await assert_unknown(sdk.with_options(api_key="k2"), one.id)
        assert (await sdk.responses.retrieve(one.id)).id == one.id


async def test_failed_call_and_call_of_another_dialect_are_unknown(serve: Serve, store: Store) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    async with connected_sdk(serve, BrokenEngine()) as sdk:
        with pytest.raises(openai.APIError):
            await sdk.responses.create(model="m", input="hi")
        for call in await recorded_calls(store):
            await assert_unknown(sdk, "resp_" + call.call_id.removeprefix("call_"))


@pytest.mark.parametrize(
    "identity", ["resp_", "resp_0", "call_1", "..", "%2e%2e", "%C3%A9", "resp_" + "0" * 5000, "a%00b"]
)
async def test_hostile_id_is_not_found(serve: Serve, identity: str) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        url = httpx.URL(gateway.url, raw_path=f"/v1/responses/{identity}".encode())
        for method in ("GET", "DELETE"):
            answer = await http.request(method, url)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert len(answer.text) < 400


async def test_only_background_responses_can_be_cancelled(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        one = await sdk.responses.create(model="m", input="hi")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response") as caught:
            await sdk.responses.cancel(one.id)
    assert caught.value.type == "invalid_request_error"


async def test_stored_responses_need_the_key_of_a_session(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine(), require_known_keys=True) as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.responses.retrieve("resp_1")


async def test_agent_in_a_sandbox_sees_its_own_responses(serve: Serve, store: Store) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    await new_session(store, "own")
    async with (
        serve(ScriptedEngine()) as gateway,
        client(f"http://127.0.0.1:{listener.getsockname()[1]}", "own") as inside,
        client(gateway.url, "other") as outside,
    ):
        await gateway.serve_on(listener)
        identity = (await inside.post("/responses", json=BODY)).json()["id"]
        assert (await inside.get(f"/responses/{identity}")).json()["id"] == identity
        assert (await inside.get(f"/responses/{identity}", headers={"authorization": "Bearer x"})).status_code == 401
        assert (await outside.get(f"/responses/{identity}")).status_code == 404


async def test_store_that_cannot_be_written_refuses_to_delete(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        identity = (await http.post("/responses", json=BODY)).json()["id"]
        with failing_writes(store):
            refused = await http.delete(f"/responses/{identity}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert "retry-after" in refused.headers
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        assert (await http.get(f"/responses/{identity}")).status_code == 200


async def test_response_that_could_not_be_recorded_is_served_from_memory(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        assert (await http.post("/responses", json=BODY)).status_code == 200
        with failing_writes(store):
            sent = (await http.post("/responses", json=BODY)).json()
            assert (await http.get(f"/responses/{sent['id']}")).json() == sent
            other = {"authorization": "Bearer other"}
            for method in ("GET", "DELETE"):
                assert (await http.request(method, f"/responses/{sent['id']}", headers=other)).status_code in (404, 503)
            assert (await http.delete(f"/responses/{sent['id']}")).status_code == 200
        assert (await http.get(f"/responses/{sent['id']}")).status_code in (404, 503)


async def test_wrong_method_is_refused(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        refused = await http.put("/responses/resp_1", json={})
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, DELETE")


async def test_routes_work_without_version_and_with_a_key_in_the_path(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        for prefix in ("/s/k1/v1", "/s/k1"):
            identity = (await http.post(f"{prefix}/responses", json=BODY)).json()["id"]
            assert (await http.get(f"{prefix}/responses/{identity}")).json()["id"] == identity


async def test_references_to_too_much_text_are_refused(serve: Serve) -> None:
    """The limit for what one request reads is the size of the largest body."""
    async with serve(ScriptedEngine(), max_body_mb=1) as gateway, client(gateway.url) as http:
        sent = [await http.post("/responses", json={"model": "m", "input": str(i) * 600_000}) for i in range(3)]
        names = ["msg_" + answer.json()["id"].removeprefix("resp_") + "_0" for answer in sent]
        one, *two = ({"type": "item_reference", "id": name} for name in names)
        assert (await http.post("/responses", json={"model": "m", "input": [one]})).status_code == 200
        refused = await http.post("/responses", json={"model": "m", "input": two})
        foreign = await http.post("/responses", json={"input": two}, headers={"authorization": "Bearer other"})
        assert foreign.status_code == 404  # another session does not learn that they exist
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "input")


async def test_token_count_includes_what_the_body_refers_to(serve: Serve) -> None:
    async with connected_sdk(serve, ScriptedEngine()) as sdk:
        one = await sdk.responses.create(model="m", input="hi")
        counted = await sdk.responses.input_tokens.count(model="m", input="go on", previous_response_id=one.id)
        two = await sdk.responses.create(model="m", input="go on", previous_response_id=one.id)
    assert two.usage is not None
    assert counted.input_tokens == two.usage.input_tokens


async def test_model_may_be_left_out(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        for model in ({}, {"model": None}):
            answer = (await http.post("/responses", json={"input": "hi", **model})).json()
            assert answer["model"] == "scripted-model"
            assert (await http.get(f"/responses/{answer['id']}")).json() == answer
    assert [call.model for call in await recorded_calls(store)] == ["scripted-model"] * 2


async def test_compacted_conversation_goes_on_from_its_summary(serve: Serve, store: Store) -> None:
    summary = "The user wants the failing test fixed, and the cause is an off-by-one error in parse()."
    replies = ["hello", summary, "done"]
    engine = ScriptedEngine(lambda request: replies[len(engine.requests) - 1])
    async with connected_sdk(serve, engine) as sdk:
        one = await sdk.responses.create(model="m", input="Fix the failing test")
        compacted = await sdk.responses.compact(model="m", previous_response_id=one.id)
        opening: Any = [item.to_dict(warnings=False) for item in compacted.output]
        two = await sdk.responses.create(model="m", input=[*opening, {"role": "user", "content": "go on"}])
        await assert_unknown(sdk, compacted.id)
    CompactedResponse.model_validate({**compacted.to_dict(warnings=False), "output": opening[-1:]}, strict=True)
    assert [item["type"] for item in opening] == ["message", "compaction"]
    assert (compacted.object, two.output_text) == ("response.compaction", "done")
    seen = chat_request(engine)
    assert [message.role for message in seen.messages] == ["user", "user", "user"]
    assert str(seen.messages[1].content).endswith(summary)
    first, asked, last = await recorded_calls(store)
    assert (asked.edge, asked.parent_call_id, asked.rule) == (
        "continues",
        first.call_id,
        "responses_compaction_request",
    )
    assert (last.edge, last.parent_call_id, last.rule) == ("compacts", asked.call_id, "responses_compacted")


async def test_compaction_needs_a_conversation_and_does_not_stream(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        for body, param in (({"model": "m"}, "input"), ({**BODY, "stream": True}, "stream")):
            refused = await http.post("/responses/compact", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_objects_and_events_are_as_published(serve: Serve) -> None:
    """The SDK's models validate them; the SDK's client does not validate."""
    tools = [*TOOLS, {"type": "function", "function": {"name": "old"}}, {"type": "local_shell"}, {"type": "shell"}]
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    bodies: list[Json] = [
        {**BODY, "tools": tools, "tool_choice": {"type": "auto"}},
        {**BODY, "instructions": "x", "temperature": 0.1, "include": ["message.output_text.logprobs"]},
        {**BODY, "max_output_tokens": 2, "text": {"format": schema, "verbosity": "low"}},
    ]
    async with serve(two_step_engine()) as gateway, client(gateway.url) as http:
        for body in bodies:
            answer = (await http.post("/responses", json=body)).json()
            check_response(answer)
            streams = [
                await http.post("/responses", json={**body, "stream": True}),
                await http.get(f"/responses/{answer['id']}?stream=true"),
            ]
            for stream in streams:
                assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
                assert checked_events(stream.text)[-1]["response"]["status"] in ("completed", "incomplete")
