"""One client cannot stop the gateway for the others: each limit, and a second client that is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import RequestError
from polar_proxy.gateway import Gateway
from polar_proxy.gateway.http.asgi import count_values
from polar_proxy.gateway.http.limits import BodyBudget
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client, new_session
from tests.until import GUARD_SECONDS

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
    return await send_bytes(gateway, "".join(parts).encode())


async def send_bytes(gateway: Gateway, request: bytes) -> tuple[int, dict[str, object]]:
    """Send a request in pieces of 64 KiB, because writing megabytes at once would block the loop that is tested."""
    async with connection(gateway) as (reader, writer):
        with contextlib.suppress(ConnectionError):  # the server may answer and close before everything is sent
            for start in range(0, len(request), 1 << 16):
                writer.write(request[start : start + (1 << 16)])
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


@pytest.mark.parametrize("path", [*ERROR_TEXT, "/api/v1/jobs"])
async def test_refuses_a_body_that_comes_too_slowly(serve: Serve, path: str) -> None:
    limits = {"body_window_seconds": 0.4, "body_rate_kb": 1}
    async with serve(ScriptedEngine(), limits=limits) as gateway, connection(gateway) as (reader, writer):
        writer.write((HEAD.format(path=path) + "content-length: 100000\r\n\r\n{").encode())
        trickle = asyncio.create_task(send_slowly(writer))
        status, body = await read_answer(reader)
        trickle.cancel()
    if path in ERROR_TEXT:
        assert (status, "1 KiB/s for 0.4 seconds" in ERROR_TEXT[path](body)) == (408, True)
    else:  # this gateway has no such route, and needs no body to say so
        assert status == 404


async def send_slowly(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b" ")
        await asyncio.sleep(0.05)


async def test_refuses_a_body_that_takes_too_long(serve: Serve) -> None:
    limits = {"body_window_seconds": 0.2, "body_rate_kb": 0, "body_seconds": 0.4}
    async with serve(ScriptedEngine(), limits=limits) as gateway, connection(gateway) as (reader, writer):
        writer.write((HEAD.format(path="/v1/messages") + "content-length: 100000\r\n\r\n{").encode())
        trickle = asyncio.create_task(send_slowly(writer))
        status, body = await read_answer(reader)
        trickle.cancel()
    assert (status, "longer than 0.4 seconds" in ERROR_TEXT["/v1/messages"](body)) == (408, True)


@pytest.mark.parametrize("path", ERROR_TEXT)
async def test_refuses_a_large_body_by_its_announced_length(serve: Serve, path: str) -> None:
    async with serve(ScriptedEngine()) as gateway:
        status, body = await send(gateway, HEAD.format(path=path) + f"content-length: {1 << 40}\r\n\r\n")
        assert (status, "larger than 33554432 bytes" in ERROR_TEXT[path](body)) == (413, True)


@pytest.mark.parametrize("junk", ["1;" + "e" * 300_000, "0\r\nx-trailer: " + "t" * 300_000, "0" * 300_000])
async def test_refuses_what_is_no_content_of_a_chunked_body(serve: Serve, junk: str) -> None:
    async with serve(ScriptedEngine()) as gateway:
        status, _ = await send(gateway, HEAD.format(path="/v1/messages") + "transfer-encoding: chunked\r\n\r\n", junk)
        assert status in (400, 431)
        await assert_others_are_served(gateway)


async def test_a_refused_client_is_not_asked_for_its_body(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    expects = HEAD.format(path="/v1/messages") + "expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
    chat = json.dumps(CHAT)
    known = HEAD.format(path="/v1/chat/completions") + f"content-length: {len(chat)}\r\nconnection: close\r\n\r\n{chat}"
    async with serve(ScriptedEngine()) as gateway:
        assert (await send(gateway, known))[0] == 200  # so that the next request need not wait for its session
        assert (await send(gateway, expects))[0] == 400
        await assert_others_are_served(gateway)
    assert [record.message for record in caplog.records if record.exc_info] == []


async def test_refuses_connect_and_too_many_pipelined_requests(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway:
        status, _ = await send(gateway, "CONNECT evil.example:443 HTTP/1.1\r\nhost: evil.example\r\n\r\n")
        assert status == 405
        async with connection(gateway) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        await assert_others_are_served(gateway)


async def test_unfinished_connections_keep_nobody_out(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"connections": 20}) as gateway, contextlib.AsyncExitStack() as stack:
        for _ in range(100):
            _, writer = await stack.enter_async_context(connection(gateway))
            writer.write(HEAD.format(path="/v1/messages").encode())
        await assert_others_are_served(gateway)


async def test_connections_from_a_sandbox_take_no_place_of_others(serve: Serve) -> None:
    body = json.dumps(CHAT)
    chat = HEAD.format(path="/v1/chat/completions") + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    limits = {"connections": 12, "sandbox_connections": 4}
    async with serve(ScriptedEngine(), limits=limits) as gateway, contextlib.AsyncExitStack() as stack:
        reader, writer = await stack.enter_async_context(connection(gateway))
        listener = socket.create_server(("127.0.0.1", 0))
        await gateway.serve_on(listener)
        for _ in range(20):
            _, unfinished = await asyncio.open_connection(*listener.getsockname())
            stack.callback(unfinished.close)
        writer.write(chat.encode())
        assert (await read_answer(reader))[0] == 200


def test_the_limit_of_descriptors_is_raised_as_far_as_the_system_allows() -> None:
    script = (
        "import resource; from polar_proxy.gateway.http.limits import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["512", "512"]


async def test_a_connection_that_is_answered_is_not_closed_for_a_new_one(serve: Serve) -> None:
    release = asyncio.Event()

    class WaitingEngine(ScriptedEngine):
        async def weight_version(self) -> str | None:
            await release.wait()
            return None

    body = json.dumps(CHAT)
    chat = HEAD.format(path="/v1/chat/completions") + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    async with serve(WaitingEngine(), limits={"connections": 2}) as gateway, contextlib.AsyncExitStack() as stack:
        answered = [await stack.enter_async_context(connection(gateway)) for _ in range(2)]
        for _, writer in answered:
            writer.write(chat.encode())
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


@pytest.mark.parametrize("inside_sandbox", [False, True])
async def test_a_kept_connection_without_a_request_is_closed(serve: Serve, store: Store, inside_sandbox: bool) -> None:
    await new_session(store, "k")
    async with serve(ScriptedEngine(), limits={"keep_alive_seconds": 0.3}) as gateway:
        address = ("127.0.0.1", gateway.port)
        if inside_sandbox:
            listener = socket.create_server(("127.0.0.1", 0))
            await gateway.serve_on(listener)
            address = listener.getsockname()
        reader, writer = await asyncio.open_connection(*address)
        await answered(reader, writer)
        await answered(reader, writer)
        async with asyncio.timeout(GUARD_SECONDS):
            assert await reader.read() == b""
        writer.close()


async def test_empty_lines_are_no_request(serve: Serve) -> None:
    """The server ignores them before a request, so they must not keep a connection open."""
    async with (
        serve(ScriptedEngine(), limits={"head_seconds": 0.3}) as gateway,
        connection(gateway) as (reader, writer),
    ):
        await answered(reader, writer)
        writer.write(b"\r\n")
        status, _ = await read_answer(reader)
    assert status == 408


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a request, and return once its answer was received. The connection is kept."""
    body = json.dumps(CHAT)
    writer.write(f"{HEAD.format(path='/v1/chat/completions')}content-length: {len(body)}\r\n\r\n{body}".encode())
    async with asyncio.timeout(GUARD_SECONDS):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    assert b"connection: close" not in head


async def test_refuses_too_many_values_before_parsing_them(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"body_values": 1000}) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={**CHAT, "tools": [{}] * 2000})
        assert answer.status_code == 413
        assert "1000 JSON values" in answer.json()["error"]["message"]
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200


async def test_refuses_too_many_messages_and_tools(serve: Serve) -> None:
    limits = {"messages": 100, "tools": 10}
    async with serve(ScriptedEngine(), limits=limits) as gateway, client(gateway.url) as http:
        many = await http.post("/chat/completions", json={**CHAT, "messages": CHAT["messages"] * 101})
        tools = await http.post("/messages", json={**CHAT, "max_tokens": 1, "tools": [{"name": "t"}] * 11})
        prompts = await http.post("/completions", json={"model": "m", "prompt": ["a"] * 101})
        ids = await http.post("/completions", json={"model": "m", "prompt": [104] * 200, "max_tokens": 1})
    assert [answer.status_code for answer in (many, tools, prompts, ids)] == [413, 413, 413, 200]
    assert "'messages' has 101 items" in many.json()["error"]["message"]


def test_a_long_text_is_not_many_values() -> None:
    text = json.dumps({"text": r"a, b; [{\"\" " * 1000})
    assert count_values(text.encode(), 100) == 2
    assert count_values(json.dumps({"list": [1] * 1000, "text": text}).encode(), 100) == 1003
    assert count_values(b'",' * 1000, 100) > 100


async def test_bodies_share_a_budget() -> None:
    budget = BodyBudget(100)
    with budget.reserve("one") as first:
        first.refusable = False
        first.take(90)
        with budget.reserve("other") as second, pytest.raises(RequestError) as error:
            second.take(20)
        assert error.value.status == 429
        with budget.reserve("one") as third, pytest.raises(RequestError):
            third.take(1)  # a session may hold a quarter
        first.take(50)  # it is alone again
    assert budget.held == 0


async def test_the_largest_unfinished_body_makes_room_for_smaller_ones() -> None:
    budget = BodyBudget(100)

    async def read_forever() -> None:
        with budget.reserve("large") as large:
            large.take(90)
            await asyncio.sleep(60)

    reading = asyncio.create_task(read_forever())
    await asyncio.sleep(0)
    with budget.reserve("small") as small:
        small.take(20)
        with pytest.raises(RequestError) as error:
            await reading
    assert error.value.status == 429
    assert not reading.cancelled()
    assert budget.held == 0
