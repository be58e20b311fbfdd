"""An HTTP/1.1 client for one server, with only what an engine needs: no redirects, no compression, no cookies.

Every model call passes through this client, so it has to be fast. It is a protocol on the event loop's own transport,
and its parser is in C (httptools, which the gateway's server uses too). A general client would cost a fifth of a whole
call (benchmarks/README.md).

Promises:

* A connection carries one request at a time. After a complete response the connection is used again. If an
  `HttpResponse` is closed early, or if the task that waits for the response is cancelled, the connection is closed, so
  the server stops its work.
* Every failure of a valid request is an OSError (ConnectionError, TimeoutError, ...).
* A slow reader slows the server down: reading from the socket pauses while more than `_HIGH_WATER` bytes are unread.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from typing import cast
from urllib.parse import quote, unquote, urlsplit

import httptools

_HIGH_WATER = 1 << 20
_TARGET = re.compile(rb"/[!-~]*")
"""Pattern of a path with its query. It excludes spaces and line breaks, which would end the path in a request."""


class NoResponseError(ConnectionResetError):
    """The server closed the connection before it began to answer."""


class NotSentError(NoResponseError):
    """The connection was already closed, so nothing of the request was sent."""


class HttpResponse:
    """A response whose headers have arrived. Its body is read once, with `read` or `read_some`."""

    def __init__(self, connection: _ClientConnection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Header values by lower-case name."""
        self.complete = False
        """Whether the whole body has arrived. The part that was not read yet can still be read."""
        self.pieces: list[bytes] = []
        """Pieces of the body that arrived and were not read yet. A stream has a piece for each event."""
        self._unread = 0
        self._arrived = asyncio.Event()
        """Set while there is something to read, and at the end of the body."""
        self._connection = connection
        self._error: str | None = None
        """How the connection broke, as text. A stored exception would make a reference cycle, because it refers to its
        frames, and the frames refer to this object."""

    async def read_some(self) -> bytes:
        """Wait for some of the body and return it; empty at the end. Raises ConnectionError if the connection broke."""
        await self._arrived.wait()
        data = b"".join(self.pieces)
        if not data and self._error is not None:
            raise ConnectionResetError(self._error)
        self.pieces.clear()
        if not self._ended:
            self._arrived.clear()
            if self._unread > _HIGH_WATER:
                self._connection.resume_reading()
        self._unread = 0
        return data

    async def read(self) -> bytes:
        """Return the whole body. Raises ConnectionError if the connection broke."""
        parts = []
        while part := await self.read_some():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection if the body is not complete. Safe to call more than once."""
        if not self.complete:
            self._connection.drop()

    # Called by the connection

    def arrived(self, size: int) -> None:
        """Wake the reader of the body, because `size` more bytes have arrived from the socket.

        If more than `_HIGH_WATER` bytes are now unread, pause reading from the socket.
        """
        if self.pieces and not self._ended:
            self._arrived.set()
            self._unread += size
            if self._unread > _HIGH_WATER:
                self._connection.pause_reading()

    def end(self, error: str | None = None) -> None:
        """Wake the reader at the end of the body. If `error` is None, the body is complete."""
        self.complete = error is None
        self._error = error
        self._arrived.set()

    @property
    def _ended(self) -> bool:
        return self.complete or self._error is not None


class _ClientConnection(asyncio.Protocol):
    """One connection of a client's pool."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._response: HttpResponse | None = None
        self._head: asyncio.Future[HttpResponse] | None = None
        self._until_close = False
        self._transport: asyncio.Transport | None = None
        self.idle_since = 0.0

    async def exchange(self, request: list[bytes]) -> HttpResponse:
        """Send a request and wait for the headers. Raises NoResponseError if the connection closes first."""
        if self._transport is None or self._transport.is_closing():
            raise NotSentError("the connection is closed")
        response = self._response = HttpResponse(self)
        self._head = asyncio.get_running_loop().create_future()
        self._transport.writelines(request)
        try:
            return await self._head
        except BaseException:
            if self._response is response:  # a complete response has released the connection, which may be in use again
                self.drop()
            raise

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Called by the reader of a response, possibly after the connection has ended

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # no request is open
            self.drop()
            return
        try:
            self._parser.feed_data(data)
            response.arrived(len(data))
        except httptools.HttpParserError as error:
            self._broken(ConnectionError, f"the response is not HTTP ({error})")
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client.lost(self)
        if self._until_close and error is None:
            self.on_message_complete()
        self._broken(NoResponseError, str(error or "the server closed the connection"))
        del self._parser  # it refers to this connection

    def _broken(self, kind: type[ConnectionError], message: str) -> None:
        """End the open request, if there is one, with an error.

        Before the headers have arrived, `exchange` raises `kind`; after that, reading the body raises ConnectionError.
        """
        response, self._response = self._response, None
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_exception(kind(message))
        elif response is not None:
            response.end(message)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        response = self._response
        if response is None:
            return
        response.status = self._parser.get_status_code()
        if response.status < 200:  # informational: the final response follows
            response.headers.clear()
            return
        headers = response.headers
        self._until_close = "content-length" not in headers and "transfer-encoding" not in headers
        if self._head is not None and not self._head.done():
            self._head.set_result(response)

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.pieces.append(data)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or response.status < 200:
            return
        self._response = self._head = None
        self.resume_reading()
        response.end()
        if self.usable and self._parser.should_keep_alive():
            self._client.release(self)
        else:
            self.drop()


class HttpClient:
    """A pool of connections to the server at `url`; `headers` are sent with every request.

    Raises ValueError for a URL or headers that HTTP cannot carry.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, connect_seconds: float, keep_seconds: float) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError(f"{url!r} has no host name")
        self._host = parts.hostname
        self._host.encode("idna")
        self._ssl = _tls_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._base = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=").encode("ascii")
        fields = {"host": parts.netloc.rpartition("@")[2], **headers}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            fields.setdefault("authorization", "Basic " + b64encode(pair.encode()).decode())
        if any(ord(sign) < 32 for value in fields.values() for sign in value):
            raise ValueError("a header contains a control character")
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("latin-1")
        self._connect_seconds = connect_seconds
        self._keep_seconds = keep_seconds
        self._idle: list[_ClientConnection] = []
        self._open: set[_ClientConnection] = set()
        self._retired = False

    async def request(self, method: str, path: str, body: bytes | None, *, fields: bytes = b"") -> HttpResponse:
        """Send a request, and return the response once the response's headers have arrived.

        `path` is appended to the path of the client's URL. `fields`: further header fields, each with its line break.
        Raises ValueError if `path` is not percent-encoded.
        """
        target = self._base + path.encode("ascii")
        if _TARGET.fullmatch(target) is None:
            raise ValueError("the path of a request contains a space or a control character")
        head = b"%b %b HTTP/1.1\r\n%b%b" % (method.encode("ascii"), target, self._fields, fields)
        parts = [head, b"\r\n"] if body is None else [head, b"content-length: %d\r\n\r\n" % len(body), body]
        connection = self._pooled() or await self._connected()
        return await connection.exchange(parts)

    def close(self) -> None:
        for connection in list(self._open):
            connection.drop()
        self._idle.clear()

    def retire(self) -> None:
        """Close all idle connections, and from now on close each busy one after its response."""
        self._retired = True
        while self._idle:
            self._idle.pop().drop()

    def _pooled(self) -> _ClientConnection | None:
        """Return the connection that became idle last; None if there is none.

        Connections that were idle for so long that the server may close them are dropped.
        """
        limit = time.monotonic() - self._keep_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > limit:
                return connection
            connection.drop()
        return None

    async def _connected(self) -> _ClientConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_seconds):
            _, connection = await loop.create_connection(
                lambda: _ClientConnection(self), self._host, self._port, ssl=self._ssl
            )
        self._open.add(connection)
        return connection

    # Called by connections

    def release(self, connection: _ClientConnection) -> None:
        if self._retired:
            connection.drop()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def lost(self, connection: _ClientConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS context that all clients share. Making a TLS context blocks the event loop for 40 ms."""
    return ssl.create_default_context()
