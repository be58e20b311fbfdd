"""A client of the Responses API over a WebSocket, for tests of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect

from polar_proxy.gateway import Gateway
from polar_proxy.types import Json

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "error")


@contextlib.asynccontextmanager
async def opened(
    gateway: Gateway | str,
    path: str = "/v1/responses",
    key: str = "k1",
    *,
    headers: Mapping[str, str] | None = None,
    receive_buffer: int = 0,
) -> AsyncIterator[ClientConnection]:
    """Yield a WebSocket to a gateway or its base URL. `receive_buffer`: bytes that the system receives unread."""
    url = urlsplit(gateway if isinstance(gateway, str) else gateway.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((url.hostname, url.port))
    connection.setblocking(False)
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    sent = {**authorization, **(headers or {})}
    async with connect(f"ws://{url.netloc}{path}", sock=connection, additional_headers=sent, max_size=None) as opening:
        yield opening


def request(**fields: Any) -> str:
    return json.dumps({"type": "response.create", "model": "m", **fields})


async def next_event(connection: ClientConnection) -> Json:
    """Return the next event, after the SDK's model of it has accepted it."""
    async with asyncio.timeout(60):
        frame = await connection.recv()
    assert isinstance(frame, str)
    event: Json = json.loads(frame)
    _EVENTS.validate_python(event)
    return event


async def read_answer(connection: ClientConnection) -> list[Json]:
    """Return the events up to the end of an answer, or an error."""
    events = [await next_event(connection)]
    while events[-1]["type"] not in LAST_EVENTS:
        events.append(await next_event(connection))
    return events


async def create(connection: ClientConnection, **fields: Any) -> list[Json]:
    await connection.send(request(**fields))
    return await read_answer(connection)
