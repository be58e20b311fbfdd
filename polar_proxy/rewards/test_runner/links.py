"""Messages between the runner's processes."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

MESSAGE_LIMIT = 16 << 20


class LinkClosedError(Exception):
    """The other process ended, or sent something that is not a message."""


class Link:
    """One end of a connection: a message is its length (4 bytes) and JSON."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        write_all(self._writing, struct.pack(">I", len(data)) + data)

    def receive(self) -> Any:
        """Return the next message. Raises LinkClosedError if the other process ended, or sent an invalid message."""
        (length,) = struct.unpack(">I", self._read(4))
        if length > MESSAGE_LIMIT:
            raise LinkClosedError(f"a message has {length} bytes, more than the {MESSAGE_LIMIT} that are allowed")
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise LinkClosedError(f"a message is not JSON: {error}") from None

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = os.read(self._reading, min(length - len(data), 1 << 20))
            if not part:
                raise LinkClosedError("the process at the other end of the connection has ended")
            data += part
        return data


def make_links() -> tuple[Link, Link]:
    """Return the two ends of a connection between this process and one that it forks."""
    (reading, theirs_writing), (theirs_reading, writing) = os.pipe(), os.pipe()
    return Link(reading, writing), Link(theirs_reading, theirs_writing)


def read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
