"""The Responses API over a WebSocket: many requests on one connection, each recorded like an HTTP request."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest
from openai.types.responses import Response
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import EngineError
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.traces.builders import build
from polar_proxy.types import Json
from tests.conftest import Serve
from tests.gateway.agents import chat_request, client, connected_sdk, new_session, only_call, recorded_calls
from tests.gateway.responses_agent import OUTPUTS, TOOLS, two_step_engine
from tests.gateway.websocket_client import create, next_event, opened, read_answer, request
from tests.until import until

pytestmark = pytest.mark.slow


def endless() -> ScriptedEngine:
    return ScriptedEngine(lambda request: "x" * 100_000, pace=0.01, tokens_per_event=1)


@pytest.mark.parametrize("store_responses", [True, False])
async def test_turns_of_one_websocket_continue_each_other_exactly(
    serve: Serve, store: Store, store_responses: bool
) -> None:
    async with serve(two_step_engine()) as gateway, opened(gateway) as websocket:
        one = (await create(websocket, input="hi", tools=TOOLS, store=store_responses))[-1]["response"]
        fields = {"tools": TOOLS, "store": store_responses}
        two = (await create(websocket, input=OUTPUTS, previous_response_id=one["id"], **fields))[-1]["response"]
        three = await create(websocket, input="and now?", previous_response_id=two["id"], **fields)
        assert three[-1]["type"] == "response.completed"
    calls = await recorded_calls(store)
    assert [call.edge for call in calls] == ["root", "continues", "continues"]
    assert [call.base_call_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    built = build(calls)
    assert [trace.grade for trace in built.traces] == ["continued"]  # one sequence of the sampled tokens
    assert built.excluded == {}


async def test_events_are_those_of_a_stream_over_http(serve: Serve) -> None:
    fields: Json = {"model": "m", "input": "hi", "tools": TOOLS, "instructions": "be exact"}
    async with serve(two_step_engine()) as gateway, client(gateway.url) as http, opened(gateway) as websocket:
        stream = (await http.post("/responses", json={**fields, "stream": True})).text
        over_http = re.findall("^data: (.*)$", stream, re.MULTILINE)
        over_websocket = [json.dumps(event) for event in await create(websocket, **fields)]
    assert len(over_http) > 10
    assert [without_ids(event) for event in over_websocket] == [without_ids(event) for event in over_http]


def without_ids(event: str) -> Json:
    text = re.sub(r'"((?:resp|msg|rs|fc|ctc)_)[0-9a-z]+', r'"\1', json.dumps(json.loads(event)))
    value: Json = json.loads(re.sub(r'"(created_at|completed_at)": \d+', r'"\1": 0', text))
    return value


async def test_a_record_is_that_of_the_same_request_over_http(serve: Serve, store: Store) -> None:
    fields: Json = {"model": "m", "input": "hi", "temperature": 0.5, "stream": True}
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        await http.post("/responses", json=fields)
        async with opened(gateway) as websocket:
            await create(websocket, **fields)
    one, two = await recorded_calls(store)
    assert (two.params, two.messages, two.path, two.dialect) == (one.params, one.messages, one.path, one.dialect)
    assert two.sampling == one.sampling


async def test_warm_up_samples_nothing_and_can_be_continued(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine()
    async with serve(engine) as gateway, client(gateway.url) as http, opened(gateway) as websocket:
        rules = [{"role": "developer", "content": "be exact"}]
        events = await create(websocket, input=rules, generate=False, store=False)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert (warm["output"], warm["usage"]["total_tokens"], engine.requests) == ([], 0, [])
        assert (await http.get(f"/responses/{warm['id']}")).status_code == 404
        await create(websocket, input="hi", previous_response_id=warm["id"], store=False)
    assert [(message.role, message.content) for message in chat_request(engine).messages] == [
        ("system", "be exact"),
        ("user", "hi"),
    ]
    assert (await only_call(store)).edge == "root"


async def test_a_warm_up_belongs_to_its_session(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, opened(gateway) as websocket, opened(gateway, key="k2") as other:
        warm = (await create(websocket, input="secret", generate=False))[-1]["response"]
        (error,) = await create(other, input="hi", previous_response_id=warm["id"])
    assert error["error"]["code"] == "previous_response_not_found"


async def test_unstored_response_is_continued_by_its_own_websocket_only(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, opened(gateway) as websocket, opened(gateway) as other:
        one = (await create(websocket, input="hi", store=False))[-1]["response"]
        (error,) = await create(other, input="more", previous_response_id=one["id"])
        assert error["error"]["code"] == "previous_response_not_found"
        two = (await create(websocket, input="more", previous_response_id=one["id"], store=False))[-1]["response"]
        (late,) = await create(websocket, input="fork", previous_response_id=one["id"])  # no longer the latest
        assert late["error"]["code"] == "previous_response_not_found"
        assert two["status"] == "completed"
    assert [call.edge for call in await recorded_calls(store)] == ["root", "continues"]


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_type", None),
        (b"\xff\xfe", None, None),
        (request(type="response.steer", input="hi"), "invalid_value", "type"),
        (json.dumps({"model": "m", "input": "hi"}), "invalid_value", "type"),
        (request(input="hi", previous_response_id="resp_x"), "previous_response_not_found", "previous_response_id"),
        (request(input="hi", background=True), "unsupported_parameter", "background"),
        (request(input="hi", stream=False), "unsupported_parameter", "stream"),
        (request(input="hi", stream_id="a"), "unsupported_parameter", "stream_id"),
        (request(input="hi", generate="no"), "invalid_type", "generate"),
        (request(), "missing_required_parameter", "input"),
    ],
)
async def test_refused_message_leaves_the_websocket_open(
    serve: Serve, message: str | bytes, code: str | None, param: str | None
) -> None:
    async with serve(ScriptedEngine()) as gateway, opened(gateway) as websocket:
        await websocket.send(message)
        error = await next_event(websocket)
        assert (error["type"], error["status"]) == ("error", 400)
        assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        assert (await create(websocket, input="hi"))[-1]["type"] == "response.completed"


async def test_text_that_is_not_utf8_is_refused(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(ScriptedEngine()) as gateway, opened(gateway) as websocket:
        await websocket.send(b'{"type": "\xff"}', text=True)
        assert (await next_event(websocket))["error"]["code"] == "invalid_json"
    assert caplog.records == []


async def test_engine_error_is_an_error_event(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(lambda request: EngineError("the engine is full", status=429))
    async with serve(engine) as gateway, opened(gateway) as websocket:
        (error,) = await create(websocket, input="hi")
    assert (error["status"], error["error"]["code"]) == (429, "engine_error")
    assert error["error"]["headers"] == {"retry-after": "1"}
    assert (await only_call(store)).status == "upstream_error"


async def test_a_second_request_is_refused_while_the_first_is_answered(serve: Serve, store: Store) -> None:
    go = asyncio.Event()

    class Waiting(ScriptedEngine):
        async def weight_version(self) -> str | None:
            await go.wait()
            return await super().weight_version()

    async with serve(Waiting()) as gateway, opened(gateway) as websocket:
        await websocket.send(request(input="hi"))
        await websocket.send(request(input="hi again"))
        error = await next_event(websocket)
        assert (error["status"], error["error"]["code"]) == (400, "response_in_progress")
        go.set()
        assert (await read_answer(websocket))[-1]["type"] == "response.completed"
        assert (await create(websocket, input="hi again"))[-1]["type"] == "response.completed"
    assert len(await recorded_calls(store)) == 2


async def test_too_large_message_is_refused_and_the_websocket_closed(serve: Serve) -> None:
    async with serve(ScriptedEngine(), max_body_mb=1) as gateway, opened(gateway) as websocket:
        await websocket.send(request(input="x" * (3 << 20)))
        error = await next_event(websocket)
        assert (error["status"], error["error"]["type"]) == (413, "invalid_request_error")
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


async def test_a_client_that_disconnects_is_recorded(serve: Serve, store: Store) -> None:
    engine = endless()
    async with serve(engine, retry_grace_seconds=0) as gateway:
        async with opened(gateway) as websocket:
            await websocket.send(request(input="hi"))
            await until(lambda: engine.sampled)
        call = await only_call(store)
        assert engine.aborted == 1
    assert (call.status, call.http_status) == ("client_gone", 499)
    assert 0 < len(call.choices[0].token_ids) < 100_000


async def test_a_retry_on_a_new_websocket_joins_the_answer_of_a_lost_one(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(lambda request: "x" * 200, pace=0.01, tokens_per_event=1)
    async with serve(engine, retry_grace_seconds=60) as gateway:
        async with opened(gateway) as websocket:
            await websocket.send(request(input="hi"))
            await until(lambda: engine.sampled)
        async with opened(gateway) as websocket:
            answer = (await create(websocket, input="hi"))[-1]["response"]
            again = await create(websocket, input="go on", previous_response_id=answer["id"], store=False)
    assert answer["output"][0]["content"][0]["text"] == "x" * 200
    assert again[-1]["type"] == "response.completed"
    assert [call.edge for call in await recorded_calls(store)] == ["root", "continues"]


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/s/known/v1/responses"])
async def test_known_keys_open_a_websocket_on_each_path(serve: Serve, store: Store, path: str) -> None:
    await new_session(store, "known")
    async with serve(ScriptedEngine(), require_known_keys=True) as gateway:
        key = "" if "known" in path else "known"
        async with opened(gateway, path, key) as websocket:
            assert (await create(websocket, input="hi"))[-1]["type"] == "response.completed"
    assert (await only_call(store)).path == path.removeprefix("/s/known")


@pytest.mark.parametrize(
    ("path", "key", "headers", "status"),
    [
        ("/v1/responses", "unknown", {}, 401),
        ("/v1/responses", "", {}, 401),
        ("/v1/responses", "known", {"origin": "https://evil.example"}, 403),
        ("/v1/responses", "known", {"host": "evil.example"}, 403),
        ("/v1/chat/completions", "known", {}, 426),
        ("/metrics", "known", {}, 426),
    ],
)
async def test_refused_before_the_upgrade(
    serve: Serve,
    store: Store,
    path: str,
    key: str,
    headers: dict[str, str],
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await new_session(store, "known")
    async with serve(ScriptedEngine(), require_known_keys=True) as gateway:
        with pytest.raises(InvalidStatus) as refused:
            async with opened(gateway, path, key, headers=headers):
                pass
    response = refused.value.response
    assert response.status_code == status
    assert json.loads(response.body or b"")["error"]["message"]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"sec-websocket-version": "12"}, 426),
        ("GET", {"sec-websocket-key": "a"}, 400),
        ("POST", {}, 405),
    ],
)
async def test_malformed_upgrade_gets_an_error_of_the_dialect(
    serve: Serve, method: str, headers: dict[str, str], status: int
) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        answer = await http.request(method, "/responses", headers={**upgrade, **headers})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_sandboxed_agents_use_websockets(serve: Serve, store: Store) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await new_session(store, "made")
    async with serve(ScriptedEngine()) as gateway:
        await gateway.serve_on(listener)
        async with opened(url, key="made") as websocket:
            assert (await create(websocket, input="hi"))[-1]["type"] == "response.completed"
        with pytest.raises(InvalidStatus):
            async with opened(url, key="guess"):
                pass


async def test_the_official_client_holds_a_conversation(serve: Serve, store: Store) -> None:
    tools: Any = TOOLS
    turns: Any = ("hi", OUTPUTS)
    responses: list[Response] = []
    async with connected_sdk(serve, two_step_engine()) as sdk, sdk.responses.connect() as connection:
        for turn in turns:
            previous = {"previous_response_id": responses[-1].id} if responses else {}
            await connection.response.create(model="m", input=turn, tools=tools, **previous)  # type: ignore[arg-type]
            async for event in connection:
                if event.type == "response.completed":
                    responses.append(event.response)
                    break
    assert responses[-1].output_text == "done"
    assert [call.edge for call in await recorded_calls(store)] == ["root", "continues"]


async def closed_by_stop(gateway: Gateway, websocket: ClientConnection) -> int | None:
    """Stop the gateway, and return the code with which it closes the WebSocket."""
    await gateway.__aexit__(None, None, None)
    await websocket.wait_closed()
    return websocket.close_code


async def test_stopping_the_server_closes_idle_websockets(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    async with engine:
        gateway = await Gateway(engine, store, GatewaySettings(port=0)).__aenter__()
        async with opened(gateway) as websocket:
            await create(websocket, input="hi")
            assert await closed_by_stop(gateway, websocket) == 1001
    assert caplog.records == []


async def stopped_while_it_answers(engine: ScriptedEngine, store: Store, grace: float) -> str:
    """Stop a gateway in the middle of an answer. Return the type of the answer's last event."""
    async with engine:
        gateway = await Gateway(engine, store, GatewaySettings(port=0), grace=grace).__aenter__()
        async with opened(gateway) as websocket:
            await websocket.send(request(input="hi"))
            await until(lambda: engine.sampled)
            stopping = asyncio.create_task(closed_by_stop(gateway, websocket))
            last = (await read_answer(websocket))[-1]
            assert await stopping == 1001
    return str(last["type"])


async def test_stopping_the_server_records_the_answer_in_flight(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert await stopped_while_it_answers(endless(), store, grace=0) == "response.failed"
    call = await only_call(store)
    assert (call.status, call.error) == ("client_gone", "the gateway was stopped")
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_stopping_server_lets_an_answer_end(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(lambda request: "x" * 50, pace=0.01, tokens_per_event=1)
    assert await stopped_while_it_answers(engine, store, grace=60) == "response.completed"
    assert caplog.records == []
    assert (await only_call(store)).status == "ok"
