"""Open connections: a limit on their number, parsing in slices, and time limits for clients that do not read.

`LimitedConnection` is the base class for both protocols of the gateway: HTTP (`limits.py`) and WebSocket
(`websocket.py`).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from dataclasses import dataclass, field

from polar_proxy.config import GatewayLimits
from polar_proxy.errors import RequestError

_SLICE_BYTES, _SLICE_PIECES = 1024, 64
"""Received bytes are parsed in slices of `_SLICE_BYTES`. One turn of the event loop parses about `_SLICE_PIECES` pieces
of content (parts of a body, or frames of a WebSocket). The rest waits for later turns, so that other connections get
their turns."""
_NOTHING = memoryview(b"")


@dataclass
class Connections:
    """The open connections of one or more listeners."""

    limit: int
    parent: Connections | None = None
    """The connections of all listeners together."""
    open: dict[LimitedConnection, None] = field(default_factory=dict)
    waiting: dict[LimitedConnection, None] = field(default_factory=dict)
    """Connections without a request in progress, longest-waiting first."""

    def add(self, connection: LimitedConnection) -> bool:
        """Add a connection. At the limit, make room: close the connection that has waited longest for a request.

        Return False if there is no room, because every connection has a request.
        """
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

    def remove(self, connection: LimitedConnection) -> None:
        self.open.pop(connection, None)
        self.waiting.pop(connection, None)
        if self.parent is not None:
            self.parent.remove(connection)

    def are_idle(self) -> bool:
        """Return whether no connection has a request in progress."""
        return len(self.waiting) == len(self.open)

    def set_waiting(self, connection: LimitedConnection, waiting: bool) -> None:
        self.waiting.pop(connection, None)
        if waiting and connection in self.open:
            self.waiting[connection] = None
        if self.parent is not None:
            self.parent.set_waiting(connection, waiting)


class BodyPace:
    """Measures how fast a body arrives. Call `problem` at the end of each time window."""

    def __init__(self, limits: GatewayLimits, subject: str) -> None:
        """`subject`: the name of the body in errors."""
        self.received = 0
        """Number of bytes that came in the current time window."""
        self._limits = limits
        self._subject = subject
        self._windows = 0

    def problem(self) -> str | None:
        """Return why the body is too slow; None if it is fast enough."""
        limits, seconds = self._limits, self._limits.body_window_seconds
        received, self.received = self.received, 0
        self._windows += 1
        if received < limits.body_rate_kb * seconds * 1024:
            return f"The {self._subject} came more slowly than {limits.body_rate_kb:g} KiB/s for {seconds:g} seconds."
        if self._windows * seconds >= limits.body_seconds:
            return f"The {self._subject} took longer than {limits.body_seconds:g} seconds."
        return None


class LimitedConnection(asyncio.Protocol):
    """A connection whose requests are parsed in slices, so that other connections get their turns.

    The connection is closed if its client does not read the answers.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    connections_of_listener: Connections
    limits: GatewayLimits

    closing = False
    """True once nothing more is parsed. Bytes that arrive afterwards are dropped."""
    pieces_of_turn = 0
    """Number of pieces of content that were parsed in this turn of the event loop. Subclasses count them."""
    _held = _NOTHING
    """Received bytes that wait for a later turn of the event loop."""
    _unread_answer = 0
    """Number of bytes of the answer that the client had not read at the last check."""
    _answer_timer: asyncio.TimerHandle | None = None
    _pace: BodyPace | None = None
    """Measures how fast the current body arrives; None while nothing is measured."""
    _pace_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def parse(self, piece: memoryview) -> None:
        """Parse the next bytes."""

    @abstractmethod
    def reads_whole(self) -> bool:
        """Return whether the next bytes need no slicing, because all of them belong to one piece of content."""

    @abstractmethod
    def reading_paused(self) -> bool:
        """Return whether the application has paused reading."""

    @abstractmethod
    def refuse_body(self, error: RequestError) -> None:
        """Refuse a body that comes too slowly."""

    def data_received(self, data: bytes) -> None:
        if self._held:
            self._held = memoryview(bytes(self._held) + data)
            self.transport.pause_reading()
        else:
            self._held = memoryview(data)
            self.parse_held()

    def parse_held(self) -> None:
        """Parse as many of the received bytes as this turn of the event loop allows, and leave the rest to the next
        turns."""
        self.pieces_of_turn = 0
        while self._held and not self.closing and self.pieces_of_turn < _SLICE_PIECES:
            piece = self._held if self.reads_whole() else self._held[:_SLICE_BYTES]
            self._held = self._held[len(piece) :]
            self.parse(piece)
        if self.closing:
            self._held = _NOTHING
        if (self._held or self.closing) and not self.transport.is_closing():
            self.transport.pause_reading()  # what a refused client still sends is read in turns, too
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._held:
            self.parse_held()
        if not self._held and not self.reading_paused() and not self.transport.is_closing():
            self.transport.resume_reading()

    def start_pace(self, subject: str) -> None:
        """Measure from now on how fast a body arrives, and refuse a body that is too slow.

        `subject`: the name of the body in errors.
        """
        self.stop_pace()
        self._pace = BodyPace(self.limits, subject)
        self._check_pace_later(self._pace)

    def stop_pace(self) -> None:
        if self._pace_timer is not None:
            self._pace_timer.cancel()
            self._pace = self._pace_timer = None

    def count_received(self, size: int) -> None:
        """Count received bytes of the current body, if its speed is measured."""
        if self._pace is not None:
            self._pace.received += size

    def _check_pace_later(self, pace: BodyPace) -> None:
        self._pace_timer = self.loop.call_later(self.limits.body_window_seconds, self._check_pace, pace)

    def _check_pace(self, pace: BodyPace) -> None:
        problem = None if self.reading_paused() else pace.problem()
        if problem is not None:
            self.refuse_body(RequestError(problem, status=408))
        else:
            self._check_pace_later(pace)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_answer = self.transport.get_write_buffer_size()
        self._answer_timer = self.loop.call_later(self.limits.unread_seconds, self._check_answer)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_answer_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._stop_answer_timer()
        self.stop_pace()
        self.connections_of_listener.remove(self)
        super().connection_lost(exc)

    def _check_answer(self) -> None:
        """Disconnect a client that has read nothing of its answer since the last check."""
        before, self._unread_answer = self._unread_answer, self.transport.get_write_buffer_size()
        if self._unread_answer >= before:
            self.transport.abort()
        else:
            self._answer_timer = self.loop.call_later(self.limits.unread_seconds, self._check_answer)

    def _stop_answer_timer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None
