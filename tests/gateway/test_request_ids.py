"""Every answer names its request in its headers; session keys in the path are percent-decoded; a 404 stays a 404."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from polar_proxy.engines.openai_stream import api_error
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.gateway.agents import only_call

pytestmark = pytest.mark.slow

USER: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"model": "m", "messages": USER},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": USER},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}
each_route = pytest.mark.parametrize("path", BODIES)


@each_route
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_id_of_its_call(serve: Serve, store: Store, path: str, stream: bool) -> None:
    body = BODIES[path] if "generate" in path or not stream else {**BODIES[path], "stream": True}
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(gateway.url + path, json=body)
    call = await only_call(store)
    assert answer.status_code == 200
    assert (answer.headers["x-request-id"], answer.headers["request-id"]) == (call.call_id, call.call_id)


@each_route
async def test_an_error_of_the_engine_has_the_id_of_its_call(serve: Serve, store: Store, path: str) -> None:
    engine = ScriptedEngine(lambda request: EngineError("down", status=503))
    async with serve(engine) as gateway, httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(gateway.url + path, json=BODIES[path])
    call = await only_call(store)
    assert answer.status_code == 503
    assert (answer.headers["x-request-id"], answer.headers["request-id"]) == (call.call_id, call.call_id)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages", 400),
        ("POST", "/v1/chat/completions", 400),
        ("POST", "/v1/messages/count_tokens", 400),
        ("POST", "/v1/messages/batches", 404),
        ("POST", "/v1/unknown", 404),
        ("GET", "/v1/messages", 405),
        ("GET", "/v1/responses/resp_1", 404),
        ("GET", "/v1/models", 200),
        ("GET", "/healthz", 200),
    ],
)
async def test_an_answer_without_a_call_has_a_new_id(serve: Serve, method: str, path: str, status: int) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        answers = [await http.request(method, gateway.url + path, json={"model": 1}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, status]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids == [answer.headers["request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert all(value.startswith("req_") for value in ids)
    if "messages" in path:
        assert [answer.json()["request_id"] for answer in answers] == ids


async def test_a_refused_host_gets_the_same_id_in_header_and_body(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        headers = {"host": "elsewhere.example"}
        answer = await http.post(gateway.url + "/v1/messages", json={}, headers=headers)
    assert answer.status_code == 403
    assert answer.json()["request_id"] == answer.headers["request-id"]


async def test_the_sdks_show_the_id(serve: Serve, store: Store) -> None:
    async with (
        serve(ScriptedEngine()) as gateway,
        AsyncOpenAI(base_url=gateway.url + "/v1", api_key="k", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(model="m", messages=USER)
        assert answer._request_id == (await only_call(store)).call_id
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[])
        assert str(caught.value.request_id).startswith("req_")


async def test_an_error_inside_an_anthropic_stream_has_the_id_of_the_call(serve: Serve, store: Store) -> None:
    async with (
        serve(BrokenEngine()) as gateway,
        AsyncAnthropic(base_url=gateway.url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(model="m", messages=USER, max_tokens=9) as events:
                await events.get_final_message()
    body: Any = caught.value.body
    assert body["request_id"] == (await only_call(store)).call_id


@pytest.mark.parametrize("path", ["/s/run%2F1/v1/chat/completions", "/s/run%2f1/chat/completions"])
async def test_a_session_key_in_the_path_is_percent_decoded(serve: Serve, store: Store, path: str) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        encoded = await http.post(gateway.url + path, json=BODIES["/v1/chat/completions"])
        keyed = await http.post(
            gateway.url + "/v1/chat/completions",
            json=BODIES["/v1/chat/completions"],
            headers={"authorization": "Bearer run/1"},
        )
        plain = await http.get(gateway.url + "/s/run%2F1/v1/models")
    assert (encoded.status_code, keyed.status_code, plain.status_code) == (200, 200, 200)
    assert encoded.headers["x-polar-session-id"] == keyed.headers["x-polar-session-id"]


async def test_a_model_name_in_googles_path_is_percent_decoded(serve: Serve, store: Store) -> None:
    path = "/v1beta/models/org%2Fm:generateContent"
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(gateway.url + path, json=BODIES["/v1beta/models/m:generateContent"])
    assert answer.json()["modelVersion"] == "org/m"


@each_route
@pytest.mark.parametrize("code", ["model_not_found", 404])
async def test_the_engines_404_stays_a_404(serve: Serve, store: Store, path: str, code: object) -> None:
    body = {"error": {"message": "The model `m` does not exist.", "param": None, "code": code}}
    engine = ScriptedEngine(lambda request: api_error(body, 404, "The engine"))  # type: ignore[arg-type, return-value]
    async with serve(engine) as gateway, httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(gateway.url + path, json=BODIES[path])
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model `m` does not exist."
    assert (await only_call(store)).http_status == 404


def test_a_404_with_a_code_is_the_requests_fault_and_a_missing_route_is_not() -> None:
    error = api_error({"error": {"message": "No deployment.", "code": "deployment_not_found"}}, 404, "The engine")
    assert isinstance(error, RequestError)
    assert (error.status, error.code) == (404, "deployment_not_found")
    for body in ({"detail": "Not Found"}, {"error": {"message": "Not Found", "code": 404}}, "404 page not found"):
        missing = api_error(body, 404, "The engine")
        assert isinstance(missing, EngineError)
        assert missing.status == 502


async def test_a_request_that_breaks_a_limit_has_an_id(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{gateway.url}/v1/messages", headers={"x-long": "x" * 100_000}, json={})
    assert answer.status_code == 431
    request_id = answer.json()["request_id"]
    assert (answer.headers["x-request-id"], answer.headers["request-id"]) == (request_id, request_id)
