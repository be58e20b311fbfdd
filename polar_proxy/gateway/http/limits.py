"""Limits that keep one client from stopping the gateway for all others.

* The head of a request (URL and headers) is bounded in size, in its number of headers, and in the time that it takes.
* The size of a body and the time that it takes are bounded, and it must not come too slowly. Chunk sizes and trailers
  are bounded like a head.
* In each turn of the event loop, a bounded time is spent on parsing one connection, however small its headers and
  chunks are.
* A client that stops reading its answer is disconnected, so that its call ends.
* The number of connections is bounded. If a new connection is one too many, the connection that has waited longest for
  the head of a request is closed, so that unfinished connections cannot keep others out. If no connection waits for a
  head, the new connection is refused.
* All bodies together are bounded in size, from their first byte until their requests are answered. If a body does not
  fit, larger bodies that are still being read are refused to make room for it.

A refusal has the format of the dialect that the URL belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from polar_proxy.config import GatewayLimits
from polar_proxy.errors import RequestError
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.connections import Connections, LimitedConnection
from polar_proxy.gateway.http.websocket import LimitedWebSocketProtocol, upgrade_problem

_LINGER_SECONDS = 1.0
"""How long to read and drop what a refused client still sends."""
_BODY = "request body"
_PIPELINED = 8
"""Maximum number of a connection's requests that wait while an earlier request is answered."""
_SESSION_SHARE = 4
"""The bodies of one session may together hold 1 / `_SESSION_SHARE` of the budget for all bodies."""


def raise_descriptor_limit() -> int:
    """Increase this process's limit of open descriptors as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse their own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


@dataclass(eq=False)
class BodyReservation:
    """The part of the budget that one request holds until the end of the `with` block. `task` reads its body."""

    budget: BodyBudget
    session_id: str
    task: asyncio.Task[Any] | None = None
    size: int = 0
    refusable: bool = True
    """True until the parsing of the body begins. After that, the body is never refused to make room for others."""
    refused: bool = False

    def take(self, size: int) -> None:
        """Reserve more bytes for this body. Raises RequestError 429 if the budget or the session's part of it is full.

        The only body of a session may exceed the session's part, and the only body in the gateway may exceed the
        budget. If the budget is full, larger bodies that are still being read are refused first. This body is refused
        if that does not make enough room.
        """
        self.budget.take(self, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.budget.free(self)
        if kind is asyncio.CancelledError and self.refused and self.task is not None and not self.task.uncancel():
            raise _too_many_bodies() from None


class BodyBudget:
    """A limit on the bytes of all request bodies that are held at a time.

    A parsed body takes several times its size in memory; the caller that parses it reserves that memory, too.
    """

    def __init__(self, limit: int) -> None:
        self.held = 0
        self._limit = limit
        self._reservations: set[BodyReservation] = set()
        self._of_session: Counter[str] = Counter()

    def reserve(self, session_id: str) -> BodyReservation:
        """Return a reservation in this budget, empty at first, for a request body of this session."""
        reservation = BodyReservation(self, session_id, asyncio.current_task())
        self._reservations.add(reservation)
        return reservation

    def free(self, reservation: BodyReservation) -> None:
        self._reservations.remove(reservation)
        self.held -= reservation.size
        self._of_session[reservation.session_id] -= reservation.size
        if not self._of_session[reservation.session_id]:
            del self._of_session[reservation.session_id]

    def take(self, wanting: BodyReservation, size: int) -> None:
        of_session = self._of_session[wanting.session_id]
        if of_session > wanting.size and of_session + size > self._limit // _SESSION_SHARE:
            raise _too_many_bodies()
        if self.held + size > self._limit and self.held > wanting.size:
            self._make_room(wanting, size)
        wanting.size += size
        self.held += size
        self._of_session[wanting.session_id] += size

    def _make_room(self, wanting: BodyReservation, size: int) -> None:
        """Refuse larger bodies that are still being read, until `wanting` can take `size` more bytes.

        The largest body is refused first. A body is larger if it is longer than `wanting` with the `size` bytes added.
        Raises RequestError 429 if refusing all larger bodies frees too little."""
        missing = self.held + size - self._limit
        for largest in sorted(self._reservations, key=lambda one: one.size, reverse=True):
            if missing <= 0 or largest.size <= wanting.size + size:
                break
            if largest.refusable and largest.task is not None and largest is not wanting:
                missing -= largest.size
                if not largest.refused:
                    largest.refused = True
                    largest.task.cancel()
        if missing > 0:
            raise _too_many_bodies()


def _too_many_bodies() -> RequestError:
    return RequestError("The gateway holds too many large requests. Try again soon.", status=429)


class _RefusedError(Exception):
    """Stops the parser of a connection that is refused."""


class LimitedHttpProtocol(LimitedConnection, HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on connections, on the head of a request and on its body."""

    def __init__(
        self,
        *args: Any,
        limits: GatewayLimits,
        max_body_bytes: int,
        connections: Connections,
        error_format: Callable[[str], asgi.ErrorFormat],
        **kwargs: Any,
    ) -> None:
        """`error_format` returns the format of errors for the path of a URL."""
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, asgi.CONNECTION: secrets.token_hex(8)}
        self.connections_of_listener = connections
        self.ws_protocol_class = partial(  # type: ignore[assignment]  # any factory serves
            LimitedWebSocketProtocol, limits=limits, max_body_bytes=max_body_bytes, connections=connections
        )
        self.url = b""
        self.limits = limits
        self._max_body_bytes = max_body_bytes
        self._error_format = error_format
        self._refusal: RequestError | None = None
        self._reading: Literal["head", "body"] | None = "head"
        self._bytes_since_progress = 0
        """Number of bytes received since the last progress. Progress is the end of a head, a part of a body, or the end
        of a request."""
        self._body_bytes = 0
        self._chunked = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._timed: Literal["head", "body"] | None = None
        """The part of a request that the timer is for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.connections_of_listener.add(self):
            self._set_timer("head")
        else:
            self._refuse(RequestError("The gateway has too many connections. Try again soon.", status=429))

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        super().connection_lost(exc)

    def parse(self, piece: memoryview) -> None:
        self._bytes_since_progress += len(piece)
        HttpToolsProtocol.data_received(self, piece)  # type: ignore[arg-type]  # the parser reads any buffer
        if self._reading and self._bytes_since_progress > self.limits.head_kb << 10 and not self.closing:
            self._refuse(self._head_problem())

    def parse_held(self) -> None:
        super().parse_held()
        if self._reading != self._timed and not self.closing:
            self._set_timer(self._reading)

    def reads_whole(self) -> bool:
        return self._reading == "body" and not self._chunked

    def reading_paused(self) -> bool:
        return self.flow.read_paused

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser, or one of its callbacks, refused."""
        self._refuse(self._refusal or RequestError("The request is not valid HTTP/1.1.", status=400))

    # httptools

    def on_message_begin(self) -> None:
        self._reading = "head"
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.limits.headers:
            self._stop(self._head_problem())

    def on_headers_complete(self) -> None:
        fields = dict(self.headers)
        problem = self._head_problem() if self._head_is_too_large() else self._request_problem(fields)
        if problem is not None:
            self._stop(problem)
        self._reading, self._bytes_since_progress = "body", 0
        self._chunked = b"transfer-encoding" in fields
        self._body_bytes = 0
        if self._timed == "body":  # that of the request before
            self.start_pace(_BODY)
        self.connections_of_listener.set_waiting(self, False)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_since_progress = 0
        self.pieces_of_turn += 1
        self._body_bytes += len(body)
        self.count_received(len(body))
        if self._body_bytes > self._max_body_bytes:
            self._stop(self._body_too_large())
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading = None
        self._bytes_since_progress = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self.closing = True  # the WebSocket protocol takes over the connection, so nothing more is parsed here
        self._set_timer(None)
        self.connections_of_listener.remove(self)
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        self.connections_of_listener.set_waiting(self, True)
        super().on_response_complete()
        if self._reading is None:
            self._reading = "head"  # what comes now begins the next request, even if it is an empty line
        if self._reading == "body" and self.cycle.response_complete and not self.closing:  # nobody wants the rest
            self._close_soon()

    # Refusals

    def _stop(self, refusal: RequestError) -> None:
        """Refuse the request from within a callback of the parser."""
        self._refusal = refusal
        raise _RefusedError

    def _head_is_too_large(self) -> bool:
        limits = self.limits
        if len(self.url) > limits.url_kb << 10:
            return True
        if self._bytes_since_progress <= limits.head_kb << 10:
            return False
        # What came includes the beginning of the body.
        return sum(len(name) + len(value) for name, value in self.headers) > limits.head_kb << 10

    def _head_problem(self) -> RequestError:
        limits = self.limits
        if self._reading == "head" and len(self.url) > limits.url_kb << 10:
            return RequestError(f"The URL is longer than {limits.url_kb} KiB.", status=414)
        if len(self.headers or ()) > limits.headers:
            return RequestError(f"The request has more than {limits.headers} headers.", status=431)
        part = "headers" if self._reading == "head" else "trailers and chunk headers"
        return RequestError(f"The request's {part} are larger than {limits.head_kb} KiB.", status=431)

    def _request_problem(self, fields: Mapping[bytes, bytes]) -> RequestError | None:
        """Return why a request with this head is not served here. `fields`: its headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            return RequestError("The gateway is no proxy for other hosts: CONNECT is not served.", status=405)
        if len(self.pipeline) >= _PIPELINED:
            return RequestError("Too many requests on one connection before the first answer.", status=429)
        # Digits only, and sent once, which the parser has made sure of.
        if int(fields.get(b"content-length", 0)) > self._max_body_bytes:
            return self._body_too_large()
        if b"upgrade" in fields and self._should_upgrade():
            if self.cycle is not None and not self.cycle.response_complete:
                return RequestError("A WebSocket cannot be opened before the last answer is complete.", status=400)
            return upgrade_problem(method, self.url, self.headers)
        return None

    def _body_too_large(self) -> RequestError:
        return RequestError(f"The request body is larger than {self._max_body_bytes} bytes.", status=413)

    def _set_timer(self, part: Literal["head", "body"] | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.stop_pace()
        self._timed = part
        if part == "head":
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_timed_out)
        elif part == "body":
            self.start_pace(_BODY)
            self.count_received(self._body_bytes)

    def _head_timed_out(self) -> None:
        message = f"The request's headers took longer than {self.limits.head_seconds:g} seconds."
        self._refuse(RequestError(message, status=408))

    def refuse_body(self, error: RequestError) -> None:
        self._refuse(error)

    def _refuse(self, error: RequestError) -> None:
        """Answer with an error and close the connection, without running the application further."""
        path = self.url.split(b"?", 1)[0].decode("latin-1")
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self.pipeline or self._reading == "head":
                self.closing = True
                self.transport.close()  # an earlier answer on this connection is still being sent
                return
            cycle.disconnected = True  # the application waits for the body of this request
            cycle.message_event.set()
        headers, body = asgi.error_response(error, self._error_format(path))
        lines = [b"%b: %b\r\n" % header for header in [*headers, (b"connection", b"close")]]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self._close_soon()

    def _close_soon(self) -> None:
        """Close the connection, but first read for a moment: the client may still be sending. If a connection is closed
        with unread data, it is reset, and the client may lose the answer."""
        self.closing = True
        if self.cycle is not None:
            self.cycle.waiting_for_100_continue = False  # a client that expects "100 Continue" keeps its body
        self._set_timer(None)
        self._unset_keepalive_if_required()
        if self not in self.connections_of_listener.open:  # nor may it take the place of others
            self.transport.close()
            return
        self.connections_of_listener.set_waiting(self, True)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
