"""The table of model hosts, and the gateway's routes of intercepted requests. No proxy is involved."""

from __future__ import annotations

import base64
import json
import re
import socket
import struct
import zlib

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import UsageError
from polar_proxy.gateway.app import find_route
from polar_proxy.intercept.hosts import MODEL_HOSTS, find_path, host_names, rules_for_proxy
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.agents import CHAT, recorded_calls
from tests.gateway.websocket_client import opened

BEDROCK = "bedrock-runtime.eu-central-1.amazonaws.com/model/anthropic.claude-5-v1%3A0"
VERTEX = "us-east5-aiplatform.googleapis.com/v1/projects/p/locations/us-east5/publishers"
CALLS = {
    "api.openai.com/v1/chat/completions": "openai_chat",
    "api.openai.com/v1/responses": "openai_responses",
    "eu.api.openai.com/v1/completions": "openai_completions",
    "chatgpt.com/backend-api/codex/responses": "openai_responses",
    "api.anthropic.com/v1/messages": "anthropic_messages",
    "generativelanguage.googleapis.com/v1beta/models/gemini-3:streamGenerateContent": "google_generate_content",
    f"{VERTEX}/google/models/gemini-3:generateContent": "google_generate_content",
    f"{VERTEX}/anthropic/models/claude-5:streamRawPredict": "anthropic_messages",
    "my-resource.openai.azure.com/openai/deployments/gpt/chat/completions": "openai_chat",
    "my-resource.services.ai.azure.com/openai/v1/responses": "openai_responses",
    "my-resource.services.ai.azure.com/anthropic/v1/messages": "anthropic_messages",
    BEDROCK + "/invoke": "anthropic_messages",
    BEDROCK + "/invoke-with-response-stream": "anthropic_messages",
    "openrouter.ai/api/v1/chat/completions": "openai_chat",
    "api.mistral.ai/v1/chat/completions": "openai_chat",
    "api.githubcopilot.com/chat/completions": "openai_chat",
    "api.business.githubcopilot.com/v1/messages": "anthropic_messages",
}
ANTHROPIC = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("url", CALLS)
def test_every_provider_has_a_route_in_its_dialect(url: str) -> None:
    host, _, path = url.partition("/")
    found = find_path(host, "/" + path)
    assert found is not None
    assert found.route is not None
    assert found.rule is not None
    assert found.rule.passed_on
    route = find_route(found.route, b"")
    assert route is not None
    assert route[0].name == CALLS[url]


def test_every_provider_is_in_the_list_of_calls() -> None:
    """Except those that only take telemetry."""
    found = {found.host.provider for url in CALLS if (found := find_path(url.partition("/")[0], "/")) is not None}
    assert {row.provider for row in MODEL_HOSTS if any(rule.route for rule in row.rules)} == found


@pytest.mark.parametrize("host", ["openai.com.evil.example", "xapi.openai.com.", "evilapi.anthropic.com", "localhost"])
def test_other_hosts_are_no_model_hosts(host: str) -> None:
    assert find_path(host, "/v1/messages") is None


def test_names_for_a_sandbox_are_whole_names() -> None:
    names = host_names()
    assert {"api.openai.com", "api.anthropic.com", "bedrock-runtime.us-east-1.amazonaws.com"} <= set(names)
    assert not [name for name in names if "*" in name]


def test_names_of_the_user_are_added_for_a_sandbox() -> None:
    names = host_names(["My-Resource.openai.azure.com", "api.openai.com"])
    assert names == (*host_names(), "my-resource.openai.azure.com")
    assert find_path("my-resource.openai.azure.com", "/openai/v1/responses", names=host_names()) is None
    assert find_path("my-resource.openai.azure.com", "/openai/v1/responses", names=names) is not None
    with pytest.raises(UsageError, match=r"example\.com in gateway\.model_hosts is not the name of a model host"):
        host_names(["example.com"])


@pytest.mark.parametrize(
    ("path", "to_gateway"),
    [
        ("/v1/chat/completions", True),
        ("/v1/responses", True),
        ("/v1/responses/compact", True),
        ("/v1/responses/resp_1/input_items", True),
        ("/v1/conversations/conv_1/items/msg_1", True),
        ("/v1/models", False),
        ("/v1/responses/resp_1/unknown", False),
        ("/v1/files", False),
    ],
)
def test_only_what_is_passed_on_goes_to_the_gateway_if_the_provider_answers(path: str, to_gateway: bool) -> None:
    (row,) = [row for row in rules_for_proxy(record=True) if row["hosts"][0].startswith("api\\.openai")]
    assert any(re.fullmatch(pattern, path) for pattern in row["paths"]) == to_gateway


@pytest.mark.slow
async def test_an_intercepted_request_is_recorded_in_the_session_of_its_key(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(lambda request: "hi")) as gateway, httpx.AsyncClient() as client:
        path = "/s/my-run/intercept/api.githubcopilot.com/chat/completions"
        assert (await client.post(gateway.url + path, json=CHAT)).status_code == 200
        other = await client.post(gateway.url + "/s/my-run/intercept/example.com/v1/chat/completions", json=CHAT)
        assert (other.status_code, "not a model host" in other.text) == (404, True)
    (call,) = await recorded_calls(store, 1)
    assert (call.status, call.dialect) == ("ok", "openai_chat")


@pytest.mark.slow
async def test_an_intercepted_websocket_to_a_path_without_a_route_is_refused(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway:
        with pytest.raises(InvalidStatus) as refused:
            async with opened(gateway, "/s/my-run/intercept/api.openai.com/v1/realtime"):
                pass
    assert refused.value.response.status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, False])
async def test_an_agent_in_a_sandbox_chooses_among_the_listed_hosts_only(
    serve: Serve, store: Store, by_name: bool
) -> None:
    key, own = new_key(), "my-resource.openai.azure.com"
    await store.sessions.create(key_hash=hash_key(key), label=None, origin="key")
    found = {}
    engine = ScriptedEngine(lambda request: "hi")
    async with serve(engine, model_hosts=[own]) as gateway, httpx.AsyncClient() as client:
        listener = socket.create_server(("127.0.0.1", 0))
        await gateway.serve_on(listener, key=key if by_name else None)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for host in ("api.openai.com", own, "attacker.openai.azure.com", "x-aiplatform.googleapis.com"):
            path = "/openai/v1/chat/completions" if "azure" in host else "/v1/chat/completions"
            path = path if by_name else f"/s/{key}/intercept/{host}{path}"
            found[host] = (await client.post(url + path, json=CHAT, headers={"host": host})).status_code
        await gateway.stop_serving_on(listener)
    others = {"attacker.openai.azure.com": 404, "x-aiplatform.googleapis.com": 404}
    assert found == {"api.openai.com": 200, own: 200, **others}


@pytest.mark.slow
async def test_bedrock_streams_in_amazons_frames_and_vertex_in_anthropics_events(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(lambda request: "hello")) as gateway, httpx.AsyncClient() as client:
        root = f"{gateway.url}/s/my-run/intercept/"
        streamed = await client.post(root + BEDROCK + "/invoke-with-response-stream", json=ANTHROPIC)
        whole = await client.post(root + BEDROCK + "/invoke", json=ANTHROPIC)
        vertex = await client.post(f"{root}{VERTEX}/anthropic/models/claude-5:streamRawPredict", json=ANTHROPIC)
    assert streamed.headers["content-type"].startswith("application/vnd.amazon.eventstream")
    events = read_frames(streamed.content)
    assert [event["type"] for event in events][:: len(events) - 1] == ["message_start", "message_stop"]
    assert "".join(event["delta"].get("text", "") for event in events if "delta" in event) == "hello"
    assert whole.json()["content"] == [{"type": "text", "text": "hello"}]
    assert vertex.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    models = [call.model for call in await recorded_calls(store, 3)]
    assert models == ["anthropic.claude-5-v1:0", "anthropic.claude-5-v1:0", "claude-5"]


def read_frames(body: bytes) -> list[dict[str, object]]:  # type: ignore[misc]
    """Read Amazon's event stream, with its checksums."""
    events = []
    while body:
        total, headers, checksum = struct.unpack(">III", body[:12])
        frame, body = body[:total], body[total:]
        assert checksum == zlib.crc32(frame[:8])
        assert struct.unpack(">I", frame[-4:])[0] == zlib.crc32(frame[:-4])
        events.append(json.loads(base64.b64decode(json.loads(frame[12 + headers : -4])["bytes"])))
    return events
