"""A TCP proxy between an agent and the gateway: it forwards bytes unchanged, records exchanges, and can cut answers.

It is independent of the gateway's own records: an exchange is complete when the last byte of its HTTP answer has been
handed to the client's socket. Just before that, `Exchange.committed_first` records whether the call is in the store.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

_CHUNK = 1 << 16
_CUT_AFTER = 400
"""Number of bytes of a streamed answer that pass before it is cut."""
_ROUTES = ("/chat/completions", "/responses", "/messages", "/completions", ":generateContent", ":streamGenerateContent")


def is_model_route(path: str) -> bool:
    """Return whether a POST to `path` asks a model for an answer (counting tokens does not)."""
    return path.partition("?")[0].endswith(_ROUTES)


@dataclass(slots=True)
class Exchange:
    """One HTTP request and its answer, as they passed through the proxy."""

    method: str = ""
    path: str = ""
    body: bytearray = field(default_factory=bytearray)
    status: int = 0
    call_id: str | None = None
    """The answer's header `x-polar-call-id`."""
    body_bytes: int = 0
    complete: bool = False
    """Whether the whole answer was handed to the client's socket."""
    committed_first: bool = False
    """Whether the call was already in the store when the last byte was about to be sent."""
    cut: bool = False
    """Whether the proxy shall break the connection in the middle of the answer."""

    @property
    def model_call(self) -> bool:
        return self.method == "POST" and is_model_route(self.path)


class RecordingProxy:
    """A proxy that listens on a free loopback port.

    `committed(call_id)` returns whether that call is in the store. `should_cut(exchange)` is called for every model
    request and returns whether the connection shall be broken in the middle of the answer.
    """

    def __init__(
        self, host: str, port: int, committed: Callable[[str], bool], should_cut: Callable[[Exchange], bool]
    ) -> None:
        self._upstream = (host, port)
        self.committed = committed
        self.should_cut = should_cut
        self.exchanges: list[Exchange] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> RecordingProxy:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        await self.serve_on(listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def serve_on(self, listener: socket.socket) -> None:
        """Listen on one more socket, such as one inside a sandbox's network. The socket is closed at the end of the
        proxy."""
        self._servers.append(await asyncio.start_server(self._accept, sock=listener))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await _ProxiedConnection(self, reader, writer).serve(self._upstream)
        except (OSError, asyncio.CancelledError):
            pass  # one side disconnected: the exchange ends with the data that passed until then
        finally:
            self._connections.discard(task)
            writer.close()


class _RequestObserver:
    """Makes an `Exchange` of each request of a connection. Its methods are callbacks of the HTTP parser."""

    def __init__(self, proxy: RecordingProxy, pending: deque[Exchange]) -> None:
        self._proxy = proxy
        self._pending = pending
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._exchange = Exchange()

    def on_url(self, url: bytes) -> None:
        self._exchange.path += url.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._exchange.body += data

    def on_message_complete(self) -> None:
        exchange = self._exchange
        exchange.method = self.parser.get_method().decode()
        if exchange.model_call:
            self._proxy.exchanges.append(exchange)
            exchange.cut = self._proxy.should_cut(exchange)
        self._pending.append(exchange)


class _ResponseObserver:
    """Adds each response of a connection to its `Exchange`. Its methods are callbacks of the HTTP parser."""

    def __init__(self, pending: deque[Exchange]) -> None:
        self._pending = pending
        self.finished: list[Exchange] = []
        self.restart()

    def restart(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._pending and name.lower() == b"x-polar-call-id":
            self._pending[0].call_id = value.decode()

    def on_headers_complete(self) -> None:
        if self._pending:
            self._pending[0].status = self.parser.get_status_code()
            if self._pending[0].method == "HEAD":
                self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        if self._pending:
            self._pending[0].body_bytes += len(data)

    def on_message_complete(self) -> None:
        if self._pending:
            self.finished.append(self._pending.popleft())


class _ProxiedConnection:
    """A client's connection to the proxy, together with the proxy's connection to the gateway."""

    def __init__(self, proxy: RecordingProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._pending: deque[Exchange] = deque()

    async def serve(self, upstream: tuple[str, int]) -> None:
        up_reader, up_writer = await asyncio.open_connection(*upstream)
        directions = [
            asyncio.create_task(self._requests(up_writer)),
            asyncio.create_task(self._responses(up_reader)),
        ]
        try:
            # When one side leaves, the other sees a closed connection, as it would without the proxy.
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            up_writer.close()

    async def _requests(self, up_writer: asyncio.StreamWriter) -> None:
        parser = _RequestObserver(self._proxy, self._pending).parser
        while data := await self._reader.read(_CHUNK):
            parser.feed_data(data)
            up_writer.write(data)
            await up_writer.drain()

    async def _responses(self, up_reader: asyncio.StreamReader) -> None:
        responses = _ResponseObserver(self._pending)
        while data := await up_reader.read(_CHUNK):
            current = self._pending[0] if self._pending else None
            responses.parser.feed_data(data)
            cut = current if current is not None and current.cut else None
            if cut is not None and (cut.body_bytes >= _CUT_AFTER or cut in responses.finished):
                await self._cut(data)
                return
            for exchange in responses.finished:
                exchange.committed_first = exchange.call_id is not None and self._proxy.committed(exchange.call_id)
            self._writer.write(data)
            await self._writer.drain()
            for exchange in responses.finished:
                exchange.complete = True
                if exchange.method == "HEAD":
                    responses.restart()
            responses.finished.clear()

    async def _cut(self, data: bytes) -> None:
        """Send half of the data, then reset the connection."""
        self._writer.write(data[: len(data) // 2])
        await self._writer.drain()
        await asyncio.sleep(0.2)
        client: socket.socket = self._writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
