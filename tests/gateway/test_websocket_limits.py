"""One client cannot stop the gateway for the others through a WebSocket: each limit, and that others are served."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.gateway.http.websocket import LimitedWebSocketProtocol
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client, new_session, only_call
from tests.gateway.websocket_client import create, next_event, opened, read_answer, request
from tests.until import until

pytestmark = pytest.mark.slow


def begin_message(websocket: ClientConnection, size: int, sent: int) -> None:
    """Send the header of a masked text frame of `size` bytes, and the first of them."""
    websocket.transport.write(b"\x81\xff" + struct.pack("!Q", size) + b"\0\0\0\0" + b" " * sent)


async def closed_with(websocket: ClientConnection) -> int | None:
    """Return the code with which the server closes the WebSocket."""
    with pytest.raises(ConnectionClosed) as closed:
        async with asyncio.timeout(60):
            await websocket.recv()
    return None if closed.value.rcvd is None else closed.value.rcvd.code


async def assert_others_are_served(gateway: Gateway) -> None:
    async with client(gateway.url, "another") as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200


async def test_slow_message_is_refused(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"body_window_seconds": 0.2}) as gateway, opened(gateway) as websocket:
        begin_message(websocket, 1000, 10)
        error = await next_event(websocket)
        assert (error["status"], "more slowly than" in error["error"]["message"]) == (408, True)
        assert await closed_with(websocket) == 1008


async def test_pings_are_not_a_slow_message(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"body_window_seconds": 0.05}) as gateway, opened(gateway) as websocket:
        for _ in range(20):
            await (await websocket.ping())
            await asyncio.sleep(0.01)
        assert (await create(websocket, input="hi"))[-1]["type"] == "response.completed"


async def test_idle_websocket_is_closed(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"websocket_idle_seconds": 0.2}) as gateway, opened(gateway) as websocket:
        assert await closed_with(websocket) == 1001


async def test_websocket_that_is_answered_is_not_idle(serve: Serve) -> None:
    engine = ScriptedEngine(lambda request: "x" * 30, pace=0.02, tokens_per_event=1)
    async with serve(engine, limits={"websocket_idle_seconds": 0.2}) as gateway, opened(gateway) as websocket:
        assert (await create(websocket, input="hi"))[-1]["type"] == "response.completed"
        assert await closed_with(websocket) == 1001


async def test_idle_websockets_make_room_for_new_connections(serve: Serve) -> None:
    async with serve(ScriptedEngine(), limits={"connections": 1}) as gateway, opened(gateway) as websocket:
        await assert_others_are_served(gateway)
        assert await closed_with(websocket) is None


async def test_answered_websockets_keep_their_connection(serve: Serve) -> None:
    engine = ScriptedEngine(lambda request: "x" * 30, pace=0.02, tokens_per_event=1)
    async with serve(engine, limits={"connections": 1}) as gateway, opened(gateway) as websocket:
        await websocket.send(request(input="hi"))
        await until(lambda: engine.sampled)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 429 ")
        writer.close()
        assert (await read_answer(websocket))[-1]["type"] == "response.completed"


async def test_unfinished_messages_share_the_budget_for_bodies(serve: Serve) -> None:
    """The largest unfinished message is refused, so that a smaller one is read."""
    async with serve(ScriptedEngine(), limits={"bodies_mb": 1}) as gateway, opened(gateway) as large:
        begin_message(large, 1 << 20, 900 << 10)
        async with opened(gateway, key="k2") as small:
            events = asyncio.create_task(read_answer(large))
            text = "x" * (200 << 10)
            while not events.done():
                await create(small, input=text)
        (error,) = await events
        assert error["status"] == 429
        assert await closed_with(large) == 1013


async def test_a_client_that_reads_nothing_is_disconnected(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(lambda request: "word " * 40_000, pace=0.005, tokens_per_event=2000)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by accepted connections
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await new_session(store, "known")
    async with serve(engine, limits={"unread_seconds": 0.2}, retry_grace_seconds=0) as gateway:
        await gateway.serve_on(listener)
        async with opened(url, key="known", receive_buffer=4096) as websocket:
            websocket.transport.pause_reading()
            await websocket.send(request(input="hi"))
            call = await only_call(store)
    assert call.status == "client_gone"


async def test_a_client_that_reads_no_pongs_is_disconnected(serve: Serve) -> None:
    ping = b"\x89\xfd\0\0\0\0" + b"x" * 125
    async with serve(ScriptedEngine(), limits={"unread_seconds": 0.2}) as gateway:
        async with opened(gateway, receive_buffer=4096) as websocket:
            websocket.transport.pause_reading()
            async with asyncio.timeout(60):
                while not websocket.transport.is_closing():
                    websocket.transport.write(ping * 100)
                    await asyncio.sleep(0.001)
        await assert_others_are_served(gateway)


async def test_small_frames_are_parsed_in_many_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = list[int]()
    handle_ping = LimitedWebSocketProtocol.handle_ping

    def counted_ping(self: LimitedWebSocketProtocol) -> None:
        handle_ping(self)
        parsed.append(self.pieces_of_turn)

    monkeypatch.setattr(LimitedWebSocketProtocol, "handle_ping", counted_ping)
    async with serve(ScriptedEngine()) as gateway, opened(gateway) as websocket:
        websocket.transport.write(b"\x89\x80\0\0\0\0" * 20_000)
        await until(lambda: len(parsed) == 20_000)
        assert max(parsed) < 400
        assert (await create(websocket, input="hi"))[-1]["type"] == "response.completed"


@pytest.mark.parametrize("junk", [b"\x81\x05hello", b"\xff\xff\xff\xff", b"\x83\x80\0\0\0\0", b"\x80\x80\0\0\0\0"])
async def test_broken_frames_close_the_websocket(serve: Serve, junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(ScriptedEngine()) as gateway:
        async with opened(gateway) as websocket:
            websocket.transport.write(junk)
            assert await closed_with(websocket) == 1002
        await assert_others_are_served(gateway)
    assert caplog.records == []


@pytest.mark.parametrize("size", [200, 9_000, 40_000])
async def test_large_upgrades_do_no_harm(serve: Serve, size: int, caplog: pytest.LogCaptureFixture) -> None:
    head = (
        "GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
        "connection: upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        f"x: {'y' * size}\r\n\r\n"
    )
    async with serve(ScriptedEngine()) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + b"\x81" * 5000)  # junk before the server's answer
        writer.write_eof()
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
        await assert_others_are_served(gateway)
    assert caplog.records == []
