"""A TCP front between an agent and the gateway: forwards bytes unchanged, counts what passes, cuts where it is told to.

It knows nothing of the pipeline's own bookkeeping: an exchange is complete when HTTP says that the last byte of its
answer has been handed to the client's socket. `Exchange.committed_first` is looked up at that moment, and not later.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools

_CHUNK = 1 << 16
_CUT_AFTER = 400
"""Bytes of a streamed answer that pass before it is cut."""
_ROUTES = ("/chat/completions", "/responses", "/messages", "/completions")


def is_model_route(path: str) -> bool:
    """Whether a POST to `path` asks a model for an answer (counting tokens does not)."""
    path = path.partition("?")[0]
    return path.endswith(_ROUTES) or path.endswith((":generateContent", ":streamGenerateContent"))


@dataclass(slots=True)
class Exchange:
    """One HTTP request and its answer, as they passed."""

    method: str = ""
    path: str = ""
    body: bytearray = field(default_factory=bytearray)
    started_at: float = 0.0
    status: int = 0
    call_id: str | None = None
    """What the answer's `x-polar-call-id` says."""
    streamed: bool = False
    body_bytes: int = 0
    complete: bool = False
    """The whole answer was handed to the client's socket."""
    committed_first: bool = False
    """When the last byte was about to be handed on, the call had been committed already."""
    cut: bool = False
    """The front broke the connection in the middle of the answer."""
    ended_at: float | None = None

    @property
    def model_call(self) -> bool:
        return self.method == "POST" and is_model_route(self.path)


class RecordingProxy:
    """`async with Front(host, port, committed) as front:` listens on a free loopback port, and on more if asked to.

    `committed(call_id)` tells whether that call is in the store. `cut_due(exchange)` is asked of every model request
    and says whether its answer is to be broken.
    """

    def __init__(self, host: str, port: int, committed: Callable[[str], bool]) -> None:
        self._upstream = (host, port)
        self._committed = committed
        self.cut_due: Callable[[Exchange], bool] = lambda exchange: False
        self.exchanges: list[Exchange] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> RecordingProxy:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        await self.serve_on(listener)
        return self

    async def __aexit__(self, *_: Any) -> None:
        for server in self._servers:
            server.close()
        await self.hang_up()

    async def serve_on(self, listener: socket.socket) -> None:
        """Listen on one more socket, such as one inside a sandbox's network. The front closes it."""
        self._servers.append(await asyncio.start_server(self._accept, sock=listener))

    async def hang_up(self) -> None:
        """Close every connection."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await _ProxiedConnection(self, reader, writer).serve(self._upstream)
        except (OSError, asyncio.CancelledError):
            pass  # one side went away: what passed until then is what counts
        finally:
            self._connections.discard(task)
            writer.close()

    def begun(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def is_committed(self, exchange: Exchange) -> bool:
        return exchange.call_id is not None and self._committed(exchange.call_id)


class _RequestObserver:
    """What the parser of a connection's requests calls."""

    def __init__(self, front: RecordingProxy, waiting: deque[Exchange]) -> None:
        self._front = front
        self._waiting = waiting
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._now = Exchange(started_at=time.time())

    def on_url(self, url: bytes) -> None:
        self._now.path += url.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._now.body += data

    def on_message_complete(self) -> None:
        exchange = self._now
        exchange.method = self.parser.get_method().decode()
        if exchange.model_call:
            self._front.begun(exchange)
            exchange.cut = self._front.cut_due(exchange)
        self._waiting.append(exchange)


class _ResponseObserver:
    """What the parser of a connection's answers calls."""

    def __init__(self, waiting: deque[Exchange]) -> None:
        self._waiting = waiting
        self.finished: list[Exchange] = []
        self.restart()

    def restart(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._waiting and name.lower() == b"x-polar-call-id":
            self._waiting[0].call_id = value.decode()
        if self._waiting and name.lower() == b"content-type":
            self._waiting[0].streamed = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        if self._waiting:
            self._waiting[0].status = self.parser.get_status_code()
            if self._waiting[0].method == "HEAD":
                self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        if self._waiting:
            self._waiting[0].body_bytes += len(data)

    def on_message_complete(self) -> None:
        if self._waiting:
            self.finished.append(self._waiting.popleft())


class _ProxiedConnection:
    """One connection of a client with one of the gateway."""

    def __init__(self, front: RecordingProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._front = front
        self._reader = reader
        self._writer = writer
        self._waiting: deque[Exchange] = deque()

    async def serve(self, upstream: tuple[str, int]) -> None:
        up_reader, up_writer = await asyncio.open_connection(*upstream)
        ways = [
            asyncio.create_task(self._requests(up_writer)),
            asyncio.create_task(self._answers(up_reader)),
        ]
        try:
            # Whoever leaves first, the other side is told by a closed connection, as it would be without the front.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.close()
            now = time.time()
            for exchange in self._waiting:
                exchange.ended_at = now

    async def _requests(self, up_writer: asyncio.StreamWriter) -> None:
        parser = _RequestObserver(self._front, self._waiting).parser
        while data := await self._reader.read(_CHUNK):
            parser.feed_data(data)
            up_writer.write(data)
            await up_writer.drain()

    async def _answers(self, up_reader: asyncio.StreamReader) -> None:
        answers = _ResponseObserver(self._waiting)
        while data := await up_reader.read(_CHUNK):
            now = self._waiting[0] if self._waiting else None
            answers.parser.feed_data(data)
            if now is not None and now.cut and (now.body_bytes >= _CUT_AFTER or now in answers.finished):
                answers.finished.clear()
                await self._break(now, data)
                return
            for exchange in answers.finished:
                exchange.committed_first = self._front.is_committed(exchange)
            self._writer.write(data)
            await self._writer.drain()
            for exchange in answers.finished:
                exchange.complete, exchange.ended_at = True, time.time()
                if exchange.method == "HEAD":
                    answers.restart()
            answers.finished.clear()

    async def _break(self, exchange: Exchange, data: bytes) -> None:
        """Half of what came goes out, then the connection is reset."""
        self._writer.write(data[: len(data) // 2])
        await self._writer.drain()
        await asyncio.sleep(0.2)
        client: socket.socket = self._writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        exchange.ended_at = time.time()
        self._writer.transport.abort()
