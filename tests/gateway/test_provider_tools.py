"""Tools that a provider would run: listed with each call, and removed or refused by setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polar_proxy.engines.scripted import INFO, ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.traces.grades import excluded_calls
from tests.conftest import Serve
from tests.gateway.agents import chat_request, client, only_call

pytestmark = pytest.mark.slow

USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {}}
REQUESTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "chat": (
        "/chat/completions",
        {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "look"}}, {"type": "web_search_preview"}],
            "web_search_options": {"search_context_size": "low"},
        },
        ["web_search_preview", "web_search_options"],
    ),
    "responses": (
        "/responses",
        {
            "input": "hi",
            "tools": [
                {"type": "function", "name": "look", "parameters": SCHEMA},
                {"type": "web_search"},
                {"type": "code_interpreter", "container": {"type": "auto"}},
                {"type": "mcp", "server_label": "s", "server_url": "https://example.org"},
                {"type": "computer_use_preview"},
                {"type": "web_search"},
            ],
        },
        ["web_search", "code_interpreter", "mcp", "computer_use_preview"],
    ),
    "messages": (
        "/messages",
        {
            "max_tokens": 9,
            "messages": USER,
            "tools": [
                {"name": "look", "input_schema": SCHEMA},
                {"type": "web_search_20250305", "name": "web_search"},
                {"type": "code_execution_20250825", "name": "code_execution"},
                {"type": "bash_20250124", "name": "bash"},
            ],
            "mcp_servers": [{"type": "url", "url": "https://example.org", "name": "s"}],
        },
        ["web_search_20250305", "code_execution_20250825", "mcp_servers"],
    ),
    "google": (
        "beta/models/m:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            "tools": [
                {"functionDeclarations": [{"name": "look"}], "googleSearch": {}},
                {"code_execution": {}},
                {"urlContext": {}},
            ],
        },
        ["googleSearch", "codeExecution", "urlContext"],
    ),
}


def offered(engine: ScriptedEngine) -> list[str]:
    return [tool["function"]["name"] for tool in chat_request(engine).tools]


@pytest.mark.parametrize("dialect", REQUESTS)
@pytest.mark.parametrize("setting", ["remove", "allow"])
async def test_lists_and_removes_them(serve: Serve, store: Store, dialect: str, setting: str) -> None:
    path, body, names = REQUESTS[dialect]
    engine = ScriptedEngine()
    async with serve(engine, provider_tools=setting) as gateway, client(gateway.url) as http:
        answer = await http.post(f"{gateway.url}/v1{path}", json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    call = await only_call(store)
    assert call.sampling["provider_tools"] == {"action": "removed", "names": names}
    assert offered(engine) == (["look", "bash"] if dialect == "messages" else ["look"])
    assert excluded_calls([call]) == {}


@pytest.mark.parametrize("dialect", REQUESTS)
async def test_refuses_them_by_setting(serve: Serve, store: Store, dialect: str) -> None:
    path, body, names = REQUESTS[dialect]
    engine = ScriptedEngine()
    async with serve(engine, provider_tools="refuse") as gateway, client(gateway.url) as http:
        refused = await http.post(f"{gateway.url}/v1{path}", json={"model": "m", **body})
        tools = [tool for tool in body["tools"] if "look" in str(tool)][:1]
        without = {name: value for name, value in body.items() if name not in ("web_search_options", "mcp_servers")}
        if dialect == "google":
            tools = [{"functionDeclarations": [{"name": "look"}]}]
        answered = await http.post(f"{gateway.url}/v1{path}", json={"model": "m", **without, "tools": tools})
    assert refused.status_code == 400
    assert all(name in refused.json()["error"]["message"] for name in names)
    assert answered.status_code == 200, answered.text
    assert len(engine.requests) == 1
    assert "provider_tools" not in (await only_call(store)).sampling


async def test_never_trains_answers_of_an_engine_that_passes_them_on(serve: Serve, store: Store) -> None:
    path, body, names = REQUESTS["responses"]
    info = replace(INFO, capabilities=INFO.capabilities | {"provider_tools"})
    async with serve(ScriptedEngine(info=info), provider_tools="allow") as gateway, client(gateway.url) as http:
        await http.post(f"{gateway.url}/v1{path}", json={"model": "m", **body})
    call = await only_call(store)
    assert call.sampling["provider_tools"] == {"action": "allowed", "names": names}
    assert excluded_calls([call]) == {call.call_id: "provider_tools"}
