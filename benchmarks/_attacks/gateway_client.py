"""The attacker of a shared gateway: raw connections, and the statuses that they get."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CLOSED = 0
"""The status of a connection that was closed without an answer."""


@dataclass(frozen=True)
class Attacker:
    port: int
    key: str
    """The key of the attacker's own session."""
    victims_session: str
    """The id of another session, which is not secret."""

    def head(
        self, path: str = "/v1/chat/completions", *lines: str, method: str = "POST", key: str | None = None
    ) -> bytes:
        fields = ["host: localhost", f"authorization: Bearer {self.key if key is None else key}", *lines]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *fields, "", ""]).encode("latin-1")

    def request(self, body: bytes, path: str = "/v1/chat/completions", *lines: str, key: str | None = None) -> bytes:
        return self.head(path, "connection: close", f"content-length: {len(body)}", *lines, key=key) + body

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def send(self, *parts: bytes, pause: float = 0.0) -> int:
        """Send the parts and return the status of the answer."""
        return (await self.exchange(*parts, pause=pause))[0]

    async def exchange(self, *parts: bytes, pause: float = 0.0) -> tuple[int, bytes]:
        """Send the parts on one connection, and return the status and bytes of everything that comes back."""
        try:
            async with self.connection() as (reader, writer):
                with suppress(OSError):  # the gateway may answer and close before everything is sent
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                        if pause:
                            await asyncio.sleep(pause)
                return await read(reader)
        except OSError:
            return CLOSED, b""

    async def statuses(self, messages: Iterable[bytes], together: int = 16) -> Counter[int]:
        """Send each message on its own connection, and count the statuses."""
        room = asyncio.Semaphore(together)

        async def one(message: bytes) -> int:
            async with room:
                return await self.send(message)

        return Counter(await asyncio.gather(*(one(message) for message in messages)))

    async def hold(self, count: int, first: bytes, again: bytes = b"", seconds: float = 2.5) -> str:
        """Open connections, send `first` on each, and hold them open. Send `again` on each five times a second."""
        async with AsyncExitStack() as stack:
            opened = []
            for _ in range(count):
                with suppress(OSError):
                    opened.append(await stack.enter_async_context(self.connection()))
            for _, writer in opened:
                writer.write(first)
            for _ in range(int(seconds * 5)):
                await asyncio.sleep(0.2)
                for _, writer in opened:
                    if again and not writer.is_closing():
                        writer.write(again)
            closed = sum(reader.at_eof() or reader.exception() is not None for reader, _ in opened)
        return f"{len(opened)} connections, {closed} closed by the gateway"


async def read(reader: asyncio.StreamReader, limit: int = 1 << 20) -> tuple[int, bytes]:
    """Return the status and the first bytes of what arrives within ten seconds."""
    data = b""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(10):
            while len(data) < limit and (piece := await reader.read(1 << 16)):
                data += piece
    words = data.split(b" ", 2)
    status = int(words[1]) if len(words) > 2 and words[0].startswith(b"HTTP/1") and words[1].isdigit() else CLOSED
    return status, data


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset."""
    found = writer.get_extra_info("socket")
    if found is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def chat(content: Any = "hi", **fields: Any) -> bytes:
    return json.dumps({"model": "echo", "messages": [{"role": "user", "content": content}], **fields}).encode()
