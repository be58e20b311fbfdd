"""An httpx transport to an ASGI application in this process. A response body arrives in pieces, as the application
sends it.

httpx's own `ASGITransport` collects the whole body first, so an endless stream of events would never arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx

AsgiMessage = MutableMapping[str, Any]
AsgiApplication = Callable[
    [AsgiMessage, Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]], Awaitable[None]
]


class InProcessTransport(httpx.AsyncBaseTransport):
    """A transport for `AsyncClient("http://in-process", transport=...)`. Raises what the application raises."""

    def __init__(self, application: AsgiApplication) -> None:
        self._application = application

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = InProcessResponse(self._application, request, await request.aread())
        try:
            status, headers = await response.start()
        except BaseException:
            await response.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=response)


class InProcessResponse(httpx.AsyncByteStream):
    """The application's response to one request. Iterating over it yields the body in pieces."""

    def __init__(self, application: AsgiApplication, request: httpx.Request, body: bytes) -> None:
        scope: AsgiMessage = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "path": request.url.path,
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
        }
        self._request: list[AsgiMessage] = [{"type": "http.request", "body": body, "more_body": False}]
        self._sent: asyncio.Queue[AsgiMessage | None] = asyncio.Queue(maxsize=16)
        self._task = asyncio.create_task(self._run(application, scope), name="polar-in-process")

    async def _run(self, application: AsgiApplication, scope: AsgiMessage) -> None:
        try:
            await application(scope, self._receive, self._sent.put)
        except Exception:
            await self._sent.put(None)
            raise
        await self._sent.put(None)

    async def _receive(self) -> AsgiMessage:
        if self._request:
            return self._request.pop()
        return await asyncio.Future()  # never disconnects: `aclose` cancels the task instead

    async def start(self) -> tuple[int, list[tuple[bytes, bytes]]]:
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

    async def _next(self) -> AsgiMessage:
        message = await self._sent.get()
        if message is None:
            await self._task  # raises the application's error, if any
            raise httpx.RemoteProtocolError("the application ended before its response was complete")
        return message
