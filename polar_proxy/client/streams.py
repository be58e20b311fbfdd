"""Decoders of the two stream formats, server-sent events and newline-delimited JSON: bytes in, values out, no network.

Format of events: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, get_args

import orjson

from polar_proxy.api_models import Event, EventName
from polar_proxy.types import Json

T_co = TypeVar("T_co", covariant=True)

_EVENT_NAMES = frozenset(get_args(EventName))


class StreamDecoder(Protocol[T_co]):
    """Decode one stream, across all its connections."""

    @property
    def ended(self) -> bool:
        """The stream is complete."""
        ...

    @property
    def resumable(self) -> bool:
        """A new connection can continue the stream where the last one broke."""
        ...

    def headers(self) -> dict[str, str]:
        """Return the request headers of the next connection."""
        ...

    def feed(self, data: bytes) -> Iterator[T_co]:
        """Yield the values that these bytes complete."""
        ...

    def response_ended(self) -> None:
        """The response ended without an error."""
        ...

    def connection_lost(self) -> None:
        """The connection broke: drop the incomplete value."""
        ...


@dataclass(slots=True)
class LineSplitter:
    r"""Split bytes at `\n` only. `str.splitlines` also splits at characters that JSON strings may contain."""

    rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.removesuffix(b"\r") for line in lines]


@dataclass(slots=True)
class RowDecoder:
    """Decode newline-delimited JSON. A stream that broke after its first byte cannot be resumed."""

    ended: bool = False
    resumable: bool = True
    _lines: LineSplitter = field(default_factory=LineSplitter)

    def headers(self) -> dict[str, str]:
        return {"accept": "application/x-ndjson"}

    def feed(self, data: bytes) -> Iterator[Json]:
        self.resumable = False
        for line in self._lines.feed(data):
            if line:
                yield orjson.loads(line)

    def response_ended(self) -> None:
        self.ended = True

    def connection_lost(self) -> None:
        self._lines = LineSplitter()


@dataclass(slots=True)
class EventDecoder:
    """Decode server-sent events. A new connection continues after the last complete event."""

    last_id: str | None = None
    ended: bool = False
    resumable: bool = True
    _lines: LineSplitter = field(default_factory=LineSplitter)
    _id: str | None = None
    _event: str = ""
    _data: list[bytes] = field(default_factory=list)

    def headers(self) -> dict[str, str]:
        position = {} if self.last_id is None else {"last-event-id": self.last_id}
        return {"accept": "text/event-stream", "cache-control": "no-store", **position}

    def feed(self, data: bytes) -> Iterator[Event]:
        for line in self._lines.feed(data):
            if not line:
                if (event := self._complete()) is not None:
                    yield event
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"event":
                self._event = value.decode()
            elif name == b"id":
                self._id = value.decode()
            # A line without a name is a comment, sent to keep the connection alive.

    def response_ended(self) -> None:
        """Accept the end of a response before the end of the stream: the server stopped, and the next one continues."""
        self.connection_lost()

    def connection_lost(self) -> None:
        self._lines, self._id, self._event, self._data = LineSplitter(), None, "", []

    def _complete(self) -> Event | None:
        name, data = self._event, b"\n".join(self._data)
        # Advance the id only with a complete event, so that an interrupted event is sent again.
        self.last_id = self._id or self.last_id
        self._id, self._event, self._data = None, "", []
        if name not in _EVENT_NAMES or not data:
            return None  # an event of a newer server
        self.ended = name == "end"
        return Event.model_validate({"id": self.last_id or "", "event": name, "data": orjson.loads(data)})
