"""What one client makes the event loop do in one turn is bounded, so that the turns of the others come soon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.gateway.http.limits import LimitedHttpProtocol
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.agents import CHAT, client, only_call
from tests.gateway.test_limits import HEAD, connection, read_answer, send
from tests.loop_watch import watched

pytestmark = pytest.mark.slow

CHUNKED = HEAD.format(path="/v1/chat/completions") + "connection: close\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_small_chunks_are_parsed_in_many_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({**CHAT, "user": "x" * 20_000}).encode()
    pieces, parse = Counter[int](), HttpToolsProtocol.on_body
    async with serve(ScriptedEngine()) as gateway:
        with watched() as watch:

            def on_body(self: HttpToolsProtocol, data: bytes) -> None:
                pieces[watch.turns] += 1
                parse(self, data)

            monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)
            status, _ = await send(gateway, CHUNKED + "".join(f"1\r\n{byte:c}\r\n" for byte in body) + "0\r\n\r\n")
    assert status == 200
    assert pieces.total() == len(body)
    assert max(pieces.values()) < 1024


async def test_a_body_of_known_length_is_parsed_in_one_piece(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    parse = HttpToolsProtocol.on_body

    def on_body(self: HttpToolsProtocol, data: bytes) -> None:
        sizes.append(len(data))
        parse(self, data)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={**CHAT, "user": "x" * 60_000})
    assert answer.status_code == 200
    assert len(sizes) < 10


async def test_no_header_is_parsed_after_the_last_that_is_allowed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, parse = 0, HttpToolsProtocol.on_header

    def on_header(self: HttpToolsProtocol, name: bytes, value: bytes) -> None:
        nonlocal parsed
        parsed += 1
        parse(self, name, value)

    monkeypatch.setattr(HttpToolsProtocol, "on_header", on_header)
    async with serve(ScriptedEngine()) as gateway:
        status, _ = await send(gateway, HEAD.format(path="/v1/messages") + "a: b\r\n" * 30_000)
        assert (status, parsed) == (431, 201)
        parsed = 0
        status, _ = await send(gateway, CHUNKED + "0\r\n" + "a: b\r\n" * 30_000)
        assert (status, parsed) == (431, 201)


async def test_a_refused_client_is_read_once_a_turn(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """libuv reads a socket up to 32 times a turn, unless reading is paused."""
    receive, goes_on = LimitedHttpProtocol.data_received, list[bool]()

    def data_received(self: LimitedHttpProtocol, data: bytes) -> None:
        receive(self, data)
        goes_on.append(self.transport.is_reading())

    monkeypatch.setattr(LimitedHttpProtocol, "data_received", data_received)
    async with serve(ScriptedEngine()) as gateway:
        status, _ = await send(gateway, HEAD.format(path="/v1/messages"), *["x: " + "a" * 1_000_000] * 20)
    assert status == 431
    assert len(goes_on) > 20
    assert not any(goes_on[1:])


async def test_requests_of_a_session_are_placed_in_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests that come together; another session's request need not wait for all of them."""
    placed, place = list[tuple[int, str]](), SessionState.place
    body = json.dumps(CHAT)
    head = HEAD.format(path="/v1/chat/completions") + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    async with serve(ScriptedEngine()) as gateway, contextlib.AsyncExitStack() as stack:
        await send(gateway, head + body)
        await send(gateway, head.replace("Bearer k", "Bearer other") + body)
        opened = [await stack.enter_async_context(connection(gateway)) for _ in range(21)]
        with watched() as watch, monkeypatch.context() as patch:

            def counted(self: SessionState, *args: object, **kwargs: object) -> object:
                placed.append((watch.turns, self.session_id))
                return place(self, *args, **kwargs)  # type: ignore[arg-type]

            patch.setattr(SessionState, "place", counted)
            for number, (_, writer) in enumerate(opened):
                name = "Bearer other" if number == 20 else "Bearer k"
                writer.write((head.replace("Bearer k", name) + body).encode())
            answers = await asyncio.gather(*(read_answer(reader) for reader, _ in opened))
    assert [status for status, _ in answers] == [200] * 21
    assert len(placed) == 21
    assert max(Counter(placed).values()) == 1
    last = max(turn for turn, _ in placed)
    (other,) = [turn for turn, session_id in placed if session_id != placed[0][1]]
    assert other < last


def connect_with_small_buffers(gateway: Gateway) -> socket.socket:
    gateway._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by accepted connections
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.connect(("127.0.0.1", urlsplit(gateway.url).port))
    return opened


def long_stream() -> bytes:
    body = json.dumps({**CHAT, "stream": True})
    head = HEAD.format(path="/v1/chat/completions") + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def test_a_call_ends_whose_answer_is_never_read(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(lambda request: "word " * 40_000, tokens_per_event=5000)
    async with serve(engine, limits={"unread_seconds": 0.2}, retry_grace_seconds=0) as gateway:
        with connect_with_small_buffers(gateway) as opened:
            opened.sendall(long_stream())
            call = await only_call(store)
    assert call.status == "client_gone"


async def test_a_client_that_reads_slowly_gets_its_answer(serve: Serve) -> None:
    engine = ScriptedEngine(lambda request: "word " * 100_000, tokens_per_event=5000)
    async with serve(engine, limits={"unread_seconds": 0.2}) as gateway:
        with connect_with_small_buffers(gateway) as opened:
            opened.setblocking(False)
            opened.sendall(long_stream())
            loop, data = asyncio.get_running_loop(), b""
            while piece := await loop.sock_recv(opened, 1 << 14):
                data += piece
                await asyncio.sleep(0.01)
    assert data.count(b"word") == 100_000
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
