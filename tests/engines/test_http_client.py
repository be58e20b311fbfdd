"""The HTTP client against a server that sends prescribed bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from polar_proxy.engines import openai_client
from polar_proxy.engines.http_client import HttpClient, NoResponseError
from polar_proxy.engines.openai_client import OpenAIClient
from polar_proxy.errors import EngineError, RequestError

pytestmark = pytest.mark.slow

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CLOSE = b"<close>"


class Server:
    """Answer each request with the next pieces of bytes of `plan`; `CLOSE` closes the connection."""

    def __init__(self, plan: list[list[bytes]]) -> None:
        self.plan = plan
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Event()
        """A client left in the middle of an answer."""
        self.sent = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                self.bodies.append(await reader.readexactly(length[0]) if length else b"")
                for piece in self.plan.pop(0):
                    if piece == CLOSE:
                        return
                    writer.write(piece)
                    await writer.drain()
                    self.sent += len(piece)
                    await asyncio.sleep(0.005)
                if not self.plan:
                    await reader.read()
                    self.left.set()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(*plan: list[bytes], keep: float = 3600.0) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(list(plan))
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        server.url = f"http://127.0.0.1:{port}"
        client = HttpClient(server.url + "/base", {"x-key": "k"}, connect_seconds=60, keep_seconds=keep)
        try:
            async with asyncio.timeout(120):
                yield server, client
        finally:
            client.close()


async def test_reuses_a_connection() -> None:
    async with serving([OK], [OK], [OK]) as (server, client):
        for body in (b"{}", None, b"[1]"):
            response = await client.request("POST", "/v1/x", body)
            assert (response.status, await response.read(), response.complete) == (200, b"hi", True)
            response.close()
        assert server.connections == 1
        assert server.bodies == [b"{}", b"", b"[1]"]
        assert server.heads[0].startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-key: k\r\n" in server.heads[0]


async def test_does_not_reuse_an_idle_or_closing_connection() -> None:
    last = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"
    async with serving([OK], [last], [OK], keep=0.0) as (server, client):
        for _ in range(3):
            assert await (await client.request("GET", "/", None)).read() == b"hi"
        assert server.connections == 3
    async with serving([last], [OK]) as (server, client):
        for _ in range(2):
            assert await (await client.request("GET", "/", None)).read() == b"hi"
        assert server.connections == 2


async def test_concurrent_requests_use_separate_connections() -> None:
    async with serving([OK], [OK]) as (server, client):
        both = await asyncio.gather(client.request("GET", "/", None), client.request("GET", "/", None))
        assert [await one.read() for one in both] == [b"hi", b"hi"]
        assert server.connections == 2


@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
async def test_decodes_chunked_bodies_cut_anywhere(cut: int) -> None:
    raw = (
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    )
    pieces = [raw[at : at + cut] for at in range(0, len(raw), cut)]
    async with serving(pieces, [OK]) as (server, client):
        response = await client.request("GET", "/", None)
        assert (response.status, response.headers) == (200, {"transfer-encoding": "chunked", "x-a": "1"})
        got = []
        while data := await response.read_some():
            got.append(data)
        assert b"".join(got) == b"hello world"
        assert await (await client.request("GET", "/", None)).read() == b"hi"
        assert server.connections == 1


async def test_body_may_end_with_its_connection() -> None:
    async with serving([b"HTTP/1.1 200 OK\r\n\r\nall ", b"of it", CLOSE]) as (_, client):
        response = await client.request("GET", "/", None)
        assert await response.read() == b"all of it"
        assert response.complete


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nhalf", CLOSE],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", CLOSE],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n"],
    ],
)
async def test_truncated_response_is_an_error(pieces: list[bytes]) -> None:
    async with serving(pieces) as (_, client):
        response = await client.request("GET", "/", None)
        with pytest.raises(ConnectionError):
            await response.read()
        assert not response.complete


@pytest.mark.parametrize(
    ("pieces", "error"), [([CLOSE], NoResponseError), ([b"SSH-2.0-OpenSSH\r\n\r\n"], ConnectionError)]
)
async def test_connection_without_response_is_an_error(pieces: list[bytes], error: type[Exception]) -> None:
    async with serving(pieces) as (_, client):
        with pytest.raises(error):
            await client.request("GET", "/", None)


async def test_closing_a_response_closes_the_connection() -> None:
    async with serving([b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nhalf"]) as (server, client):
        response = await client.request("GET", "/", None)
        assert await response.read_some() == b"half"
        response.close()
        await server.left.wait()
        with pytest.raises(ConnectionError):
            await response.read_some()


@pytest.mark.parametrize("begun", [True, False])
async def test_cancelling_a_request_closes_the_connection(begun: bool) -> None:
    async with serving([b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nhalf"] if begun else [b"HTTP/1.1 "]) as (
        server,
        client,
    ):

        async def ask() -> None:
            response = await client.request("GET", "/", None)
            try:
                await response.read()
            finally:
                response.close()

        task = asyncio.create_task(ask())
        while not server.sent:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.left.wait()


@pytest.mark.parametrize("turns", range(8))
async def test_a_loop_of_requests_ends_when_it_is_cancelled(turns: int) -> None:
    """Also when an answer arrives in the same moment: the owner of such a loop waits for its end."""
    async with serving(*[[OK]] * 100) as (server, _):
        client = OpenAIClient(server.url)
        client.opened = True

        async def ask_forever() -> None:
            while True:
                await client.read(await client.send("GET", "/health"))

        loop = asyncio.create_task(ask_forever())
        while server.sent < 2 * len(OK):
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        loop.cancel()
        assert (await asyncio.wait([loop], timeout=10))[0]
        loop.cancel()
        client.close()


async def test_slow_reader_slows_the_server_down() -> None:
    size = 64 << 20
    piece = bytes(1 << 20)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    async with serving([head, *([piece] * 64)], [OK]) as (server, client):
        response = await client.request("GET", "/", None)
        await asyncio.sleep(0.8)
        assert server.sent < size // 2
        assert len(await response.read()) == size
        assert await (await client.request("GET", "/", None)).read() == b"hi"
        assert server.connections == 1


async def test_retries_once_if_an_idle_connection_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_client, "KEEPALIVE_SECONDS", 3600.0)
    monkeypatch.setattr(openai_client, "RETRY_WITHIN_SECONDS", 3600.0)
    async with serving([OK], [CLOSE], [OK]) as (server, _):
        http = OpenAIClient(server.url)
        http.opened = True
        for _ in range(2):
            assert await http.read(await http.send("GET", "/health")) == b"hi"
        http.close()
        assert server.connections == 2
    async with serving([CLOSE], [CLOSE]) as (server, _):
        http = OpenAIClient(server.url)
        http.opened = True
        with pytest.raises(EngineError, match="broke off"):
            await http.send("GET", "/health")
        http.close()


@pytest.mark.parametrize("url", ["http://", "http://h:port", "http://h\u00e4st\u2028/"])
def test_rejects_unusable_urls(url: str) -> None:
    with pytest.raises(RequestError):
        OpenAIClient(url)


@pytest.mark.parametrize("path", ["/a b", "/a\rb", "/a\r\nx: y", "/a\tb", "x"])
async def test_rejects_a_path_that_would_end_the_request_line(path: str) -> None:
    client = HttpClient("http://127.0.0.1:9", {}, connect_seconds=1, keep_seconds=1)
    with pytest.raises(ValueError, match="control character"):
        await client.request("POST", path, b"")


async def test_a_retired_client_keeps_no_connection() -> None:
    async with serving([OK], [OK]) as (server, client):
        await (await client.request("GET", "/", None)).read()
        client.retire()
        await (await client.request("GET", "/", None)).read()
        assert server.connections == 2
        assert not client._idle


def test_rejects_api_key_with_a_line_break() -> None:
    with pytest.raises(RequestError):
        OpenAIClient("http://h", "key\r\nx-other: 1")


async def test_a_hanging_server_fails_a_question_about_itself_and_not_a_model_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_client, "ANSWER_SECONDS", 0.1)
    async with serving([], []) as (server, _):
        client = OpenAIClient(server.url)
        client.opened = True
        with pytest.raises(EngineError, match="cannot be reached: TimeoutError"):
            await client.send("GET", "/health")
        call = asyncio.create_task(client.post("/v1/completions", {}))
        assert not (await asyncio.wait([call], timeout=0.5))[0]
        call.cancel()
        client.close()
