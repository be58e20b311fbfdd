"""The supervisor: the process between the owner and the programs of one `process` or `bubblewrap` sandbox.

The owner's Python runs it as a separate program (`-I -S`, standard library only, single-threaded), so nothing has to be
installed inside. The supervisor starts bwrap, enters the namespaces of bwrap and drops the privileges that it does not
need. It stays outside of the process namespace, so that programs inside can neither see nor signal it.

* When the control socket closes (the owner closed it, or died, even by `kill -9`), everything ends.
* Each command runs below a *shim*: a fork of the supervisor that is the subreaper of the command's process tree.
  Processes that the command detaches (double fork, setsid, cleaned environment) remain descendants of the shim, so that
  a kill finds them.

Messages are JSON after an 8-byte header (length, number of file descriptors); the descriptors are sent with the header.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

HEADER = struct.Struct("!II")
MAX_MESSAGE = 64 << 20
MAX_FDS = 16


def frame(message: dict[str, Any], fds: Sequence[int] = ()) -> tuple[bytes, list[tuple[int, int, Any]]]:
    """Return a message as the arguments of `sendmsg`."""
    body = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return HEADER.pack(len(body), len(fds)) + body, rights


class Channel:
    """One end of the socket. `feed` reads the available bytes, `next` returns whole messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        data, ancillary = frame(message, fds)
        sent = self.sock.sendmsg([data], ancillary)
        self.sock.sendall(data[sent:])

    def feed(self) -> bool:
        """Receive once: bytes, and the descriptors sent with them. Return False at the end of the stream."""
        data, ancillary, _flags, _addr = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * MAX_FDS))
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                for fd in fds:
                    os.set_inheritable(fd, False)
                self._fds.extend(fds)
        self._buffer += data
        return bool(data)

    def next(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and the descriptors sent with it, or None if it has not arrived completely.

        The caller must close the descriptors.
        """
        if len(self._buffer) < HEADER.size:
            return None
        length, count = HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE or count > MAX_FDS:
            raise ValueError("malformed message on the control socket")
        if len(self._buffer) < HEADER.size + length or len(self._fds) < count:
            return None
        body = bytes(self._buffer[HEADER.size : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        return json.loads(body), [self._fds.popleft() for _ in range(count)]
