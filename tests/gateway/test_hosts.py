"""A gateway on loopback takes no requests that a page in a browser makes."""

from __future__ import annotations

import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8399"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1.evil.example"},
    ],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/models"])
async def test_refuses_foreign_hosts_and_origins(serve: Serve, headers: dict[str, str], path: str) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        method = "GET" if path == "/models" else "POST"
        answer = await http.request(method, path, json=CHAT, headers=headers)
    assert answer.status_code == 403
    assert "gateway.allowed_hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:1"},
        {"host": "[::1]:8399"},
        {"host": "127.0.0.5"},
        {"host": "host.docker.internal:8399"},
        {"host": "my.name"},
        {"origin": "http://localhost:3000"},
    ],
)
async def test_takes_names_of_this_machine_and_allowed_ones(serve: Serve, headers: dict[str, str]) -> None:
    hosts = ["my.name", "host.docker.internal"]
    async with serve(ScriptedEngine(), allowed_hosts=hosts) as gateway, client(gateway.url) as http:
        assert (await http.post("/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_a_gateway_for_other_machines_takes_any_name(serve: Serve) -> None:
    async with serve(ScriptedEngine(), host="0.0.0.0") as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json=CHAT, headers={"host": "polar.example"})
    assert answer.status_code == 401  # no known key
