"""A transport into an ASGI application of this process: no socket, and answers come in pieces as they are made.

httpx has one too (`ASGITransport`), which hands an answer on when all of it is there: a stream of events would never
come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class InProcessTransport(httpx.AsyncBaseTransport):
    """`AsyncClient("http://in-process", transport=InProcess(app))`. What the application raises comes out."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = InProcessResponse(self._application, request, await request.aread())
        try:
            status, headers = await exchange.started()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=exchange)


class InProcessResponse(httpx.AsyncByteStream):
    """One request to the application, and what it says to it."""

    def __init__(self, application: Application, request: httpx.Request, body: bytes) -> None:
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port or 80),
            "client": ("in-process", 0),
        }
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._said: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=16)
        self._task = asyncio.create_task(self._run(application, scope), name="polar-in-process")

    async def _run(self, application: Application, scope: Message) -> None:
        try:
            await application(scope, self._receive, self._said.put)
        except Exception:
            await self._said.put(None)
            raise
        await self._said.put(None)

    async def _receive(self) -> Message:
        if self._request:
            return self._request.pop()
        return await asyncio.Future()  # the client goes by ending the task

    async def started(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        message = await self._next()
        return message["status"], list(message.get("headers", ()))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._next()
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        await self._task

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _next(self) -> Message:
        message = await self._said.get()
        if message is None:
            await self._task  # raises what the application did
            raise httpx.RemoteProtocolError("the application ended before its answer did")
        return message
