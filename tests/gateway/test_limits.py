"""One client cannot stop the gateway for the others: each limit, and a second client that is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import RequestError
from polar_proxy.gateway import Gateway
from polar_proxy.gateway.asgi import parse_json_object
from polar_proxy.gateway.limits import BodyBudget
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client

pytestmark = pytest.mark.slow

HEAD = "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
ERROR_TEXT = {
    "/v1/chat/completions": lambda body: body["error"]["message"],
    "/v1/responses": lambda body: body["error"]["message"],
    "/v1/messages": lambda body: body["error"]["message"] if body["type"] == "error" else "",
    "/v1beta/models/m:generateContent": lambda body: body["error"]["message"] if body["error"]["status"] else "",
}


@contextlib.asynccontextmanager
async def connection(gateway: Gateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    """Return the status and the JSON of an answer after which the server closed the connection."""
    async with asyncio.timeout(30):
        data = await reader.read()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def send(gateway: Gateway, *parts: str) -> tuple[int, dict[str, object]]:
    async with connection(gateway) as (reader, writer):
        with contextlib.suppress(ConnectionError):  # the server may answer and close before everything is sent
            for part in parts:
                writer.write(part.encode())
                await writer.drain()
        return await read_answer(reader)


async def assert_others_are_served(gateway: Gateway) -> None:
    async with asyncio.timeout(10), client(gateway.url, "other") as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("path", ERROR_TEXT)
async def test_refuses_too_many_headers_in_the_dialects_format(serve: Serve, path: str) -> None:
    async with serve(ScriptedEngine()) as gateway:
        status, body = await send(gateway, HEAD.format(path=path), "".join(f"x-{n}: 1\r\n" for n in range(5000)))
        assert status == 431
        assert "more than 200 headers" in ERROR_TEXT[path](body)
        await assert_others_are_served(gateway)


@pytest.mark.parametrize("path", ERROR_TEXT)
async def test_refuses_an_endless_header(serve: Serve, path: str) -> None:
    async with serve(ScriptedEngine()) as gateway:
        status, body = await send(gateway, HEAD.format(path=path), "x-long: ", *["a" * 10_000] * 50)
        assert (status, "64 KiB" in ERROR_TEXT[path](body)) == (431, True)
        await assert_others_are_served(gateway)


async def test_refuses_an_endless_url(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway:
        status, body = await send(gateway, "POST /v1/chat/completions?", *["a" * 10_000] * 50)
        assert (status, "URL" in ERROR_TEXT["/v1/chat/completions"](body)) == (414, True)
        await assert_others_are_served(gateway)


async def test_refuses_slow_headers(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"head_seconds": 0.2}) as gateway:
        status, body = await send(gateway, HEAD.format(path="/v1/messages"))
        assert (status, "0.2 seconds" in ERROR_TEXT["/v1/messages"](body)) == (408, True)


@pytest.mark.parametrize("path", ERROR_TEXT)
async def test_refuses_a_body_that_pauses(serve: Serve, path: str) -> None:
    async with serve(ScriptedEngine(), limits={"body_pause_seconds": 0.2}) as gateway:
        async with connection(gateway) as (reader, writer):
            writer.write((HEAD.format(path=path) + "content-length: 100\r\n\r\n{").encode())
            async with asyncio.timeout(30):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
        assert int(head.split()[1]) == 408
        assert "0.2 seconds" in ERROR_TEXT[path](body)


async def test_unfinished_connections_keep_nobody_out(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"connections": 20}) as gateway, contextlib.AsyncExitStack() as stack:
        for _ in range(100):
            _, writer = await stack.enter_async_context(connection(gateway))
            writer.write(HEAD.format(path="/v1/messages").encode())
        await assert_others_are_served(gateway)


async def test_a_connection_that_is_answered_is_not_closed_for_a_new_one(serve: Serve) -> None:
    release = asyncio.Event()

    class WaitingEngine(ScriptedEngine):
        async def health(self) -> str | None:
            await release.wait()
            return None

    async with serve(WaitingEngine(), limits={"connections": 2}) as gateway, contextlib.AsyncExitStack() as stack:
        answered = [await stack.enter_async_context(connection(gateway)) for _ in range(2)]
        for _, writer in answered:
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(0.2)
        status, _ = await send(gateway, "")
        assert status == 429
        release.set()
        assert [(await read_answer(reader))[0] for reader, _ in answered] == [200, 200]


async def test_a_kept_connection_serves_many_requests(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"head_seconds": 0.3}) as gateway, client(gateway.url) as http:
        for _ in range(4):
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
            await asyncio.sleep(0.2)


async def test_refuses_too_many_values_before_parsing_them(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"body_values": 1000}) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={**CHAT, "tools": [{}] * 2000})
        assert answer.status_code == 413
        assert "1000 JSON values" in answer.json()["error"]["message"]
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200


def test_a_long_text_is_not_many_values() -> None:
    limit = GatewaySettings().limits.body_values
    text = "a, b; " * limit
    assert parse_json_object(json.dumps({"text": "x" * 3 * limit}).encode(), limit)["text"]
    with pytest.raises(RequestError) as error:
        parse_json_object(json.dumps({"text": text[: 3 * limit].replace(" ", ",")}).encode(), limit // 2)
    assert error.value.status == 413


def test_bodies_share_a_budget() -> None:
    budget = BodyBudget(100)
    with budget.reserve() as first:
        first(90)
        with budget.reserve() as second, pytest.raises(RequestError) as error:
            second(20)
        assert error.value.status == 429
        first(50)  # it is alone again
    assert budget.held == 0
