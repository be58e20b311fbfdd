"""Answers that come line by line, server-sent events and newline-delimited JSON: bytes in, values out, no network.

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

_KNOWN = frozenset(get_args(EventName))


class StreamDecoder(Protocol[T_co]):
    """One stream, over all the connections that it takes."""

    @property
    def ended(self) -> bool:
        """Nothing more comes."""
        ...

    @property
    def resumable(self) -> bool:
        """Another connection can take the stream up where this one broke."""
        ...

    def headers(self) -> dict[str, str]:
        """With which the stream is asked for from where it stands."""
        ...

    def feed(self, data: bytes) -> Iterator[T_co]:
        """The values that these bytes complete."""
        ...

    def closed(self) -> None:
        """The answer ended in order."""
        ...

    def broken(self) -> None:
        """The connection was lost: what was begun on it is forgotten."""
        ...


@dataclass(slots=True)
class LineSplitter:
    """Cut at line feeds only: what is a line end to `str.splitlines` may stand inside a JSON string."""

    rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.removesuffix(b"\r") for line in lines]


@dataclass(slots=True)
class RowDecoder:
    """Newline-delimited JSON. What broke off in the middle cannot be taken up again."""

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

    def closed(self) -> None:
        self.ended = True

    def broken(self) -> None:
        self._lines = LineSplitter()


@dataclass(slots=True)
class EventDecoder:
    """Server-sent events. A connection that ends is followed by another, from the last event that was whole."""

    last_id: str | None = None
    ended: bool = False
    resumable: bool = True
    _lines: LineSplitter = field(default_factory=LineSplitter)
    _id: str | None = None
    _event: str = ""
    _data: list[bytes] = field(default_factory=list)

    def headers(self) -> dict[str, str]:
        where = {} if self.last_id is None else {"last-event-id": self.last_id}
        return {"accept": "text/event-stream", "cache-control": "no-store", **where}

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
            # A comment has no name: it keeps the connection alive and says nothing.

    def closed(self) -> None:
        """Not the end of the events: a server stopped, and another takes over."""
        self.broken()

    def broken(self) -> None:
        self._lines, self._id, self._event, self._data = LineSplitter(), None, "", []

    def _complete(self) -> Event | None:
        name, data = self._event, b"\n".join(self._data)
        # The id counts with its whole event only: one that was begun and not ended comes again.
        self.last_id = self._id or self.last_id
        self._id, self._event, self._data = None, "", []
        if name not in _KNOWN or not data:
            return None  # of a newer server
        self.ended = name == "end"
        return Event.model_validate({"id": self.last_id or "", "event": name, "data": orjson.loads(data)})
