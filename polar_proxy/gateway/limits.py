"""Limits that keep one client from stopping the gateway for all others.

* The head of a request (URL and headers) is bounded in size, in its number of headers, and in the time that it takes.
* Connections are bounded. If there are too many, the one that has waited longest for the head of a request is closed,
  so that unfinished connections cannot keep others out. If all of them are being answered, the new one is refused.
* Each body is bounded in size and in the time between two of its parts. All bodies together are bounded in size.

A refusal has the format of the dialect that the URL belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from polar_proxy.config import GatewayLimits
from polar_proxy.errors import RequestError

RefusalBody = Callable[[str, RequestError], bytes]
"""Returns the response body of an error for a client that requested this path."""

_LINGER_SECONDS = 1.0
"""How long to read and drop what a refused client still sends."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open descriptors as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse their own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


@dataclass
class Connections:
    """The open connections of one or more listeners."""

    limit: int
    parent: Connections | None = None
    """The connections of all listeners together."""
    open: dict[LimitedHttpProtocol, None] = field(default_factory=dict)
    waiting: dict[LimitedHttpProtocol, None] = field(default_factory=dict)
    """Those that wait for the head of a request; the one that has waited longest is first."""

    def add(self, connection: LimitedHttpProtocol) -> bool:
        """Add a connection. If there are too many, close the one that waited longest; return False if none waits."""
        if self.parent is not None and not self.parent.add(connection):
            return False
        if len(self.open) >= self.limit:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                if self.parent is not None:
                    self.parent.remove(connection)
                return False
            oldest.transport.abort()
            oldest.connections_of_listener.remove(oldest)
        self.open[connection] = self.waiting[connection] = None
        return True

    def remove(self, connection: LimitedHttpProtocol) -> None:
        for table in self._tables():
            table.open.pop(connection, None)
            table.waiting.pop(connection, None)

    def set_waiting(self, connection: LimitedHttpProtocol, waiting: bool) -> None:
        for table in self._tables():
            table.waiting.pop(connection, None)
            if waiting and connection in table.open:
                table.waiting[connection] = None

    def _tables(self) -> Iterator[Connections]:
        yield self
        if self.parent is not None:
            yield self.parent


@dataclass
class BodyBudget:
    """A limit on the bytes of all request bodies that are held at a time."""

    limit: int
    held: int = 0

    @contextlib.contextmanager
    def reserve(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves more bytes for one body. The end of the block frees them.

        The function raises RequestError 429 if the limit would be passed, unless no other body is held.
        """
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held + size > self.limit and self.held > mine:
                raise RequestError("The gateway is reading too many large requests. Try again soon.", status=429)
            self.held += size
            mine += size

        try:
            yield take
        finally:
            self.held -= mine


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on connections and on the head of a request."""

    def __init__(
        self, *args: Any, limits: GatewayLimits, connections: Connections, refusal_body: RefusalBody, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.connections_of_listener = connections
        self._limits = limits
        self._refusal_body = refusal_body
        self._refusal: RequestError | None = None
        self._head_complete = False
        self._head_size = 0
        self._header_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self.url = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.connections_of_listener.add(self):
            self._refuse(RequestError("The gateway has too many connections. Try again soon.", status=429))
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.connections_of_listener.remove(self)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._stop_head_timer()
        self.connections_of_listener.remove(self)
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if not self._head_complete:
            self._head_size += len(data)
        super().data_received(data)
        if self._refusal is None and not self._head_complete and self.parser is not None:
            if self._head_size > self._limits.head_kb << 10:
                self._refusal = self._head_too_large()
            elif self._head_timer is None:
                self._start_head_timer()
        if self._refusal is not None:
            self._refuse(self._refusal)

    def on_message_begin(self) -> None:
        self._head_complete, self._head_size, self._header_bytes = False, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > self._limits.url_kb << 10:
            self._refusal = RequestError(f"The URL is longer than {self._limits.url_kb} KiB.", status=414)
        else:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self._limits.head_kb << 10:
            self._refusal = self._head_too_large()
        elif len(self.headers) >= self._limits.headers:
            message = f"The request has more than {self._limits.headers} headers."
            self._refusal = RequestError(message, status=431)
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_complete = True
        self._stop_head_timer()
        self.connections_of_listener.set_waiting(self, False)
        if self._refusal is None:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.connections_of_listener.set_waiting(self, True)
        super().on_response_complete()

    def _head_too_large(self) -> RequestError:
        message = f"The request's headers are larger than {self._limits.head_kb} KiB."
        return RequestError(message, status=431)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        message = f"The request's headers took longer than {self._limits.head_seconds:g} seconds."
        self._refuse(RequestError(message, status=408))

    def _refuse(self, error: RequestError) -> None:
        """Answer with an error and close the connection, without running the application."""
        self._refusal = error
        self._stop_head_timer()
        self.connections_of_listener.remove(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an earlier answer on this connection is still being sent
        else:
            path = self.url.split(b"?", 1)[0].decode("latin-1")
            body = self._refusal_body(path, error)
            head = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
            if error.status == 429:
                head.append(b"retry-after: 1\r\n")
            head.append(b"content-length: %d\r\n\r\n" % len(body))
            self.transport.write(b"".join([*head, body]))
            # Closing at once would reset the connection if the client still sends, and it might lose the answer.
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
