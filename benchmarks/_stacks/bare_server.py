"""The control of a gateway under attack: a server that answers an honest session, and reads and drops all else.

The latency of the honest session at this server is due to the machine alone: the attacker, the server and the honest
process share its processors, whatever the server does.

    python -m benchmarks._stacks.bare_server PORT
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Literal, cast

import uvloop

from benchmarks._stacks.shared_gateway import HONEST_KEY

_WORD = re.compile(rb"nonce-[0-9a-f]+-[0-9]+")
_LINGER_SECONDS = 1.0
_REFUSAL = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BareProtocol(asyncio.Protocol):
    def __init__(self) -> None:
        self._client: Literal["new", "honest", "refused"] = "new"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        if self._client == "new" and HONEST_KEY.encode() in data:
            self._client = "honest"
        if self._client == "honest" and (word := _WORD.search(data)):  # the body comes after the head
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(word[0]), word[0]))
        elif self._client == "new":
            self._client = "refused"
            self._transport.write(_READY if data.startswith(b"GET /ready") else _REFUSAL)
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._transport.close)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(BareProtocol, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
