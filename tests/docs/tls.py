"""A TLS server in front of a plain one, as the nginx of examples/deploy is in front of a gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from polar_proxy.intercept.certificates import CertificateAuthority


@contextlib.asynccontextmanager
async def tls_in_front_of(url: str, authority: CertificateAuthority) -> AsyncIterator[str]:
    """Yield the https URL of a server on this machine that passes all bytes on to `url`."""
    target = urlsplit(url)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(target.hostname, target.port)
        async with asyncio.TaskGroup() as copying:
            copying.create_task(_copy(reader, inner_writer))
            copying.create_task(_copy(inner_reader, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=authority.server_context(["localhost"]))
    async with server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
