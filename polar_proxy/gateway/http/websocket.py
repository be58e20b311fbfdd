"""uvicorn's WebSocket protocol, with the same limits as the HTTP protocol (`limits.py`).

* A message has a maximum size, a time limit and a minimum rate, like the body of a request. While a large message
  arrives, the application is sent `asgi.WEBSOCKET_PIECE` messages, and can reserve the memory.
* In each turn of the event loop, a bounded time is spent on parsing one connection, however small its frames are.
* While a client does not read what it is sent, the server reads nothing more from this client. After a time, the server
  disconnects the client.
* A WebSocket on which no request is in progress is closed after a time, or earlier if there are too many connections.
* Compression is not offered, so a message is never larger than the bytes that were received for it.

If a WebSocket must be closed, because of a limit or because the server stops, the application is sent
`asgi.WEBSOCKET_CLOSING`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from polar_proxy.config import GatewayLimits
from polar_proxy.errors import RequestError
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.connections import Connections, LimitedConnection

GOING_AWAY, POLICY_VIOLATION, MESSAGE_TOO_BIG, TRY_AGAIN_LATER = 1001, 1008, 1009, 1013
"""Close codes, with their names in IANA's registry for RFC 6455."""
CLOSE_SECONDS = 1.0
"""How long to wait for the client's answer to a close frame."""
_PIECE_BYTES = 1 << 16
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")


def upgrade_problem(method: bytes, url: bytes, headers: asgi.Headers) -> RequestError | None:
    """Return why a request to open a WebSocket is refused, or None."""
    found = dict(headers)
    if method != b"GET":
        return RequestError("A WebSocket is opened with GET.", status=405)
    if found.get(b"sec-websocket-version") != b"13":
        return RequestError("Only version 13 of the WebSocket protocol is served.", status=426)
    if not _KEY.fullmatch(found.get(b"sec-websocket-key", b"")) or not url.isascii():
        return RequestError(
            "A WebSocket needs an ASCII URL, and a sec-websocket-key of 16 bytes in base64.", status=400
        )
    return None


class LimitedWebSocketProtocol(LimitedConnection, WebSocketsSansIOProtocol):
    """One WebSocket connection, from the request that opens it.

    A text message reaches the application as bytes, because the JSON parser takes bytes and checks their encoding.
    """

    def __init__(
        self, *args: Any, limits: GatewayLimits, max_body_bytes: int, connections: Connections, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.connections_of_listener = connections
        self.limits = limits
        self.close_timeout = CLOSE_SECONDS
        self._max_body_bytes = max_body_bytes
        self._message_bytes = 0
        """Number of bytes received since the message began."""
        self._unreported = 0
        """Number of bytes of the message that were not yet reported to the application by `asgi.WEBSOCKET_PIECE`."""
        self._idle_timer: asyncio.TimerHandle | None = None
        """Runs while no request is in progress on the WebSocket."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connections_of_listener.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_idle_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:  # the HTTP protocol passes the whole head of the request in one call
            WebSocketsSansIOProtocol.data_received(self, data)
            if not self.handshake_initiated:  # larger than the library reads
                self.transport.abort()
        elif not self.handshake_complete:  # a client must wait for the answer
            self.transport.abort()
        else:
            super().data_received(data)
            if not self.writable.is_set():
                self.transport.pause_reading()

    def parse(self, piece: memoryview) -> None:
        if not self._message_bytes:
            self.start_pace("message")
        self._message_bytes += len(piece)
        self._unreported += len(piece)
        self.count_received(len(piece))
        WebSocketsSansIOProtocol.data_received(self, piece)  # type: ignore[arg-type]  # the parser reads any buffer
        if self._message_bytes > self._max_body_bytes:
            problem = f"The message is larger than {self._max_body_bytes} bytes."
            self._close(MESSAGE_TOO_BIG, RequestError(problem, status=413))
        elif self._unreported >= _PIECE_BYTES:
            self._queue({"type": asgi.WEBSOCKET_PIECE, "size": self._unreported})
            self._unreported = 0

    def reads_whole(self) -> bool:
        return False

    def reading_paused(self) -> bool:
        return self.read_paused or not self.writable.is_set()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self._close(GOING_AWAY)
        else:
            super().shutdown()

    async def send(self, message: Any) -> None:
        if message["type"] != asgi.WEBSOCKET_IDLE:
            await super().send(message)
            if message["type"] == "websocket.http.response.body":
                self.handshake_complete = True  # by a refusal; otherwise each one would be logged as an error
        elif self.queue.empty():  # else the next request has come already
            self.connections_of_listener.set_waiting(self, True)
            self._stop_idle_timer()
            self._idle_timer = self.loop.call_later(self.limits.websocket_idle_seconds, self._close, GOING_AWAY)

    # websockets

    def handle_cont(self, event: Any) -> None:
        self.pieces_of_turn += 1
        super().handle_cont(event)

    def handle_ping(self) -> None:
        self._control_frame_ended()
        super().handle_ping()

    def handle_pong(self, event: Any) -> None:
        self._control_frame_ended()
        super().handle_pong(event)

    def _control_frame_ended(self) -> None:
        self.pieces_of_turn += 1
        if not self.frames:
            self._message_ended()

    def send_receive_event_to_app(self) -> None:
        self.pieces_of_turn += 1
        self._message_ended()
        self._stop_idle_timer()
        self.connections_of_listener.set_waiting(self, False)
        data, self.frames = b"".join(self.frames), []
        self._queue({"type": "websocket.receive", self.curr_msg_data_type: data})

    def _message_ended(self) -> None:
        self._message_bytes = self._unreported = 0
        self.stop_pace()

    def _queue(self, message: Any) -> None:
        """Pass a message to the application, and read nothing further until the application has taken it."""
        if self.close_sent or self.closing:
            return
        self.queue.put_nowait(message)
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _close(self, code: int, error: RequestError | None = None) -> None:
        """Ask the application to close the WebSocket. `error`: the client broke a limit; all further data from the
        client is then dropped."""
        self._queue({"type": asgi.WEBSOCKET_CLOSING, "code": code, "error": error})
        self.stop_pace()
        self._stop_idle_timer()
        self.closing = error is not None

    def refuse_body(self, error: RequestError) -> None:
        self._close(POLICY_VIOLATION, error)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
