"""WebSocket handshakes get the status that makes Codex fall back to HTTP at once."""

from __future__ import annotations

import asyncio

from polar_proxy.engines.scripted import ScriptedEngine
from tests.conftest import Serve

UPGRADE = (
    "GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nauthorization: Bearer k\r\n"
    "openai-beta: responses_websockets=2026-02-06\r\n\r\n"
)


async def ask(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(UPGRADE.format(path=path).encode())
    async with asyncio.timeout(120):
        answer = await reader.read()  # to the end: the connection is closed
    writer.close()
    return answer


async def test_answers_an_upgrade_with_426(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway:
        for path in ("/v1/responses", "/responses", "/s/some-key/v1/responses"):
            answer = await ask(gateway.port, path)
            assert answer.startswith(b"HTTP/1.1 426 "), answer
            assert answer.count(b"HTTP/1.1") == 1
