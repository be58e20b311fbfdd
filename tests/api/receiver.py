"""A receiver of callbacks on a free port, which answers with prescribed statuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class CallbackReceiver:
    url: str = ""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, in order; then 204."""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    async def until(self, count: int, seconds: float = 120) -> None:
        async with asyncio.timeout(seconds):
            while len(self.got) < count:
                await asyncio.sleep(0.02)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((headers, body))
        status = self.statuses.pop(0) if self.statuses else 204
        more = "location: http://127.0.0.1:1/elsewhere\r\n" if status == 302 else ""
        writer.write(f"HTTP/1.1 {status} X\r\n{more}content-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def callback_receiver(*statuses: int) -> AsyncIterator[CallbackReceiver]:
    receiver = CallbackReceiver(statuses=list(statuses))
    server = await asyncio.start_server(receiver._serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/callbacks"
    try:
        yield receiver
    finally:
        server.close()
