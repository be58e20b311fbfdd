"""The ASGI edge of the hot path: reading bodies, writing answers and streams, noticing that the client has gone.

Raw ASGI instead of request and response classes, because these lines run for every call and every token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

from polar_proxy.errors import RequestError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

INSIDE_SANDBOX = "polar_inside_sandbox"
"""In the state of each request that comes by a socket which is served inside a sandbox."""


class ClientDisconnected(Exception):
    """The client went away before its request was complete."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole request body. RequestError 413 above `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        if chunk:
            size += len(chunk)
            if size > limit:
                raise RequestError(f"The request body is larger than {limit} bytes.", status=413)
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def respond(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """One JSON answer."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def refuse_websocket(receive: Receive, send: Send) -> None:
    """Codex tries a WebSocket first. At 426 it falls back to HTTP at once; at any other status after seven tries."""
    await receive()
    body = b"Polar answers over HTTP, not over a WebSocket."
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "websocket.http.response.start", "status": 426, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


class StreamWriter:
    """A streamed answer: headers at once or with the first bytes, then chunks, heartbeats while it is silent."""

    def __init__(
        self,
        send: Send,
        media_type: str,
        headers: Headers,
        *,
        heartbeat: bytes | None,
        every: float,
        patience: float,
    ) -> None:
        self._send = send
        self._headers = [
            (b"content-type", media_type.encode() + b"; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *headers,
        ]
        self._heartbeat = heartbeat
        self._every = every
        self._lock = asyncio.Lock()
        self._last = time.monotonic()
        self._closed = False
        self._beating: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(patience, self._begin_beating)
        self.started = False

    def _begin_beating(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            async with self._lock:
                if self._closed:
                    return
                if not self.started:
                    await self._start()
                elif self._heartbeat and time.monotonic() - self._last >= self._every:
                    await self._body(self._heartbeat)
            await asyncio.sleep(self._every)

    async def _start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        # The headers only leave the server with the first body bytes.
        await self._body(b"")

    async def _body(self, data: bytes, more: bool = True) -> None:
        self._last = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def write(self, data: bytes) -> None:
        if not data:
            return
        async with self._lock:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._body(data)

    async def finish(self, data: bytes) -> None:
        """The last bytes of the stream."""
        async with self._lock:
            if not self.started:
                await self._start()
            self._closed = True
            await self._body(data, more=False)

    def close(self) -> None:
        """Stop the heartbeat. Safe to call more than once."""
        self._timer.cancel()
        self._closed = True
        if self._beating is not None:
            self._beating.cancel()


class ClientWatch:
    """While open, cancels the current task as soon as the client disconnects.

    That cancellation ends with the block (`gone` is then True); one that comes from elsewhere passes through. `lost` is
    awaited in between: it returns when the task is no longer worth going on with.
    """

    def __init__(self, receive: Receive, lost: Callable[[], Awaitable[None]] | None = None) -> None:
        self._receive = receive
        self._lost = lost
        self.gone = False

    async def __aenter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._target = task
        self._task = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._lost is not None:
            await self._lost()
        self.gone = True
        self._target.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._task.cancel()
        if not self.gone:
            return False
        if kind is None:  # cancelled on the last step: take the cancellation here, not in the commit that follows
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                pass
        others = self._target.uncancel()
        return kind is asyncio.CancelledError and others == 0
