"""The 17 cases of Open Responses' compliance test, each as a test whose id is the id of the case.

Source of the list: `src/lib/compliance-tests.ts` of https://github.com/openresponses/openresponses, version of July
2026. The suite has no package; `scripts/foreign_suites.sh --open-responses CHECKOUT` runs it. The bodies here are our
own, and the tests also check what the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import CompactedResponse
from websockets.asyncio.client import ClientConnection

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.types import Json
from tests.conftest import Serve
from tests.foreign.obliging_engine import obliging_engine
from tests.gateway.agents import chat_request, client
from tests.gateway.published_responses import check_event, check_response, checked_events
from tests.gateway.websocket_client import create, opened

pytestmark = pytest.mark.slow

TOOL: Json = {
    "type": "function",
    "name": "lookup",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
PHASES: list[Json] = [
    {"type": "message", "role": "assistant", "phase": phase, "content": text}
    for phase, text in (("commentary", "adding"), ("final_answer", "seven"))
]


def user(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def seen(engine: ScriptedEngine) -> list[tuple[str, Any]]:
    """Return role and content of each message of the last prompt."""
    return [(message.role, message.content) for message in chat_request(engine).messages]


IMAGE: list[Json] = [
    {"type": "input_text", "text": "look"},
    {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
]


@pytest.mark.parametrize(
    ("items", "fields", "expected"),
    [
        pytest.param([user("hi")], {}, ["user"], id="basic-response"),
        pytest.param([user("hi")], {"stream": True}, ["user"], id="streaming-response"),
        pytest.param(
            [{"type": "message", "role": "system", "content": "be exact"}, user("hi")],
            {},
            ["system", "user"],
            id="system-prompt",
        ),
        pytest.param([user("look up 'x'")], {"tools": [TOOL]}, ["user"], id="tool-calling"),
        pytest.param([{**user(""), "content": IMAGE}], {}, ["user"], id="image-input"),
        pytest.param(
            [user("I am Ada"), {"type": "message", "role": "assistant", "content": "Hello"}, user("Who am I?")],
            {},
            ["user", "assistant", "user"],
            id="multi-turn",
        ),
        pytest.param([*PHASES, user("again")], {}, ["assistant", "assistant", "user"], id="assistant-phase"),
    ],
)
async def test_response(serve: Serve, items: list[Json], fields: Json, expected: list[str]) -> None:
    engine = obliging_engine()
    async with serve(engine) as gateway, client(gateway.url) as http:
        answer = await http.post("/responses", json={"model": "m", "input": items, **fields})
    response = last_response(checked_events(answer.text)) if "stream" in fields else answer.json()
    check_response(response)
    (item,) = response["output"]
    if "tools" in fields:
        assert (item["type"], item["arguments"]) == ("function_call", '{"key": "x"}')
    else:
        assert item["content"][0]["text"].startswith("You said: ")
    assert [role for role, _ in seen(engine)] == expected


def last_response(events: Sequence[Json]) -> Json:
    """Return the response at the end of a stream."""
    assert events[-1]["type"] == "response.completed"
    response: Json = events[-1]["response"]
    assert response["status"] == "completed"
    return response


async def answered(websocket: ClientConnection, **fields: Any) -> Json:
    """Return the answer to a request with `store: false` unless given, after its events were checked."""
    events = await create(websocket, **{"store": False, **fields})
    for event in events:
        check_event(event)
    return last_response(events)


@pytest.mark.parametrize("case", ["response-output-phase-schema"])
async def test_phases_are_listed_as_they_were_sent(serve: Serve, case: str) -> None:
    """The suite's case sends nothing: it checks its own schema. Polar keeps the phases of a client's messages."""
    async with serve(obliging_engine()) as gateway, client(gateway.url) as http:
        response = (await http.post("/responses", json={"model": "m", "input": [*PHASES, user("hi")]})).json()
        listed = (await http.get(f"/responses/{response['id']}/input_items?order=asc")).json()["data"]
    assert [item.get("phase") for item in listed] == ["commentary", "final_answer", None]


@pytest.mark.parametrize("case", ["compact-response"])
async def test_compaction(serve: Serve, case: str) -> None:
    items = [user("Launch on Tuesday"), {"type": "message", "role": "assistant", "content": "Noted"}]
    async with serve(obliging_engine()) as gateway, client(gateway.url) as http:
        body = {"model": "m", "input": items, "prompt_cache_key": "a"}
        found = (await http.post("/responses/compact", json=body)).json()
    CompactedResponse.model_validate({**found, "output": found["output"][-1:]}, strict=True)
    assert [item["type"] for item in found["output"]] == ["message", "compaction"]


@pytest.mark.parametrize("case", ["compact-missing-model"])
async def test_compaction_needs_a_model(serve: Serve, case: str) -> None:
    async with serve(obliging_engine()) as gateway, client(gateway.url) as http:
        for model in ({}, {"model": None}, {"model": ""}):
            refused = await http.post("/responses/compact", json={"input": [user("hi")], **model})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    "inputs",
    [pytest.param(["one"], id="websocket-response"), pytest.param(["one", "two"], id="websocket-sequential-responses")],
)
async def test_responses_on_one_websocket(serve: Serve, inputs: list[str]) -> None:
    engine = obliging_engine()
    async with serve(engine) as gateway, opened(gateway) as websocket:
        for text in inputs:
            response = await answered(websocket, input=text)
            assert response["output"][0]["content"][0]["text"] == f"You said: {text}"
    assert seen(engine) == [("user", inputs[-1])]


@pytest.mark.parametrize("case", ["websocket-continuation"])
async def test_websocket_continues_an_unstored_response(serve: Serve, case: str) -> None:
    engine = obliging_engine()
    async with serve(engine) as gateway, opened(gateway) as websocket:
        one = await answered(websocket, input="one")
        two = await answered(websocket, input="two", previous_response_id=one["id"])
    assert two["previous_response_id"] == one["id"]
    assert seen(engine) == [("user", "one"), ("assistant", "You said: one"), ("user", "two")]


@pytest.mark.parametrize("case", ["websocket-reconnect-store-false-recovery"])
async def test_unstored_response_is_unknown_on_a_new_websocket(serve: Serve, case: str) -> None:
    async with serve(obliging_engine()) as gateway:
        async with opened(gateway) as websocket:
            one = await answered(websocket, input="one")
        async with opened(gateway) as websocket:
            (error,) = await create(websocket, input="two", store=False, previous_response_id=one["id"])
            assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
            await answered(websocket, input=[user("one"), user("two")])


@pytest.mark.parametrize("case", ["websocket-previous-response-not-found"])
async def test_unknown_previous_response_on_a_websocket(serve: Serve, case: str) -> None:
    async with serve(obliging_engine()) as gateway, opened(gateway) as websocket:
        (error,) = await create(websocket, input="hi", store=False, previous_response_id="resp_0")
    assert (error["type"], error["status"]) == ("error", 400)
    assert (error["error"]["code"], error["error"]["param"]) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("case", ["websocket-failed-continuation-evicts-cache"])
@pytest.mark.parametrize("stored", [False, True])
async def test_unstored_response_is_forgotten_when_its_continuation_fails(
    serve: Serve, case: str, stored: bool
) -> None:
    """A stored response can still be continued, because it is read from the store."""
    async with serve(obliging_engine()) as gateway, opened(gateway) as websocket:
        one = await answered(websocket, input="one", store=stored)
        stray = {"type": "function_call_output", "call_id": "call_0", "output": "?"}
        (error,) = await create(websocket, input=[stray], store=False, previous_response_id=one["id"])
        assert (error["status"], error["error"]["code"]) == (400, "tool_call_not_found")
        last = (await create(websocket, input="two", store=False, previous_response_id=one["id"]))[-1]
    if stored:
        assert last["type"] == "response.completed"
    else:
        assert last["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("case", ["websocket-compact-new-chain"])
async def test_compacted_conversation_goes_on_over_a_websocket(serve: Serve, case: str) -> None:
    engine = obliging_engine()
    async with serve(engine) as gateway, client(gateway.url) as http, opened(gateway) as websocket:
        compacted = (await http.post("/responses/compact", json={"model": "m", "input": [user("one")]})).json()
        response = await answered(websocket, input=[*compacted["output"], user("two")])
    assert response["previous_response_id"] is None
    (_, first), (_, summary), (_, last) = seen(engine)
    assert (first, last) == ("one", "two")
    assert "summary" in summary
