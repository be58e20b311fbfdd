"""Replies: how an answer reaches the agent, streamed or in one piece, in the dialect of its request."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import Answer, Dialect, Encoder, TokenCount
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway import asgi
from polar_proxy.types import SampleEvent


async def send_error(
    send: asgi.Send, error: RequestError | EngineError, shape: Dialect | TokenCount, headers: asgi.Headers = ()
) -> None:
    """Send an error as the whole response, in the format of `shape`."""
    # Clients such as Codex give up at once on a 429 without a retry-after header.
    after = error.retry_after or ("1" if error.status in (429, 503) else None)
    retry = [] if after is None else [(b"retry-after", after.encode("latin-1", "replace"))]
    if isinstance(error, EngineError):
        error = RequestError(str(error), status=error.status, code="engine_error")
    await asgi.send_json(send, error.status, shape.error_body(error), [*headers, *retry])


class Reply(ABC):
    """The response to one request, written while its calls are sampled."""

    @abstractmethod
    async def write(self, request_index: int, event: SampleEvent) -> None:
        """Pass on an event of the engine request number `request_index`."""

    @abstractmethod
    async def finish(self, answers: list[Answer]) -> None:
        """Send what is left of the answer, up to its last byte."""

    @abstractmethod
    async def fail(self, error: RequestError | EngineError) -> None:
        """Send an error, as the whole response or at the end of a stream that has begun."""

    @abstractmethod
    def close(self) -> None:
        """Stop timers. Safe to call more than once."""


class WholeReply(Reply):
    """One JSON response, sent when everything is sampled and committed."""

    def __init__(self, send: asgi.Send, dialect: Dialect, encoder: Encoder, headers: asgi.Headers) -> None:
        self._send = send
        self._dialect = dialect
        self._encoder = encoder
        self._headers = headers

    async def write(self, request_index: int, event: SampleEvent) -> None:
        pass

    async def finish(self, answers: list[Answer]) -> None:
        await asgi.send_json(self._send, 200, self._encoder.respond(answers), self._headers)

    async def fail(self, error: RequestError | EngineError) -> None:
        await send_error(self._send, error, self._dialect, self._headers)

    def close(self) -> None:
        pass


class StreamedReply(Reply):
    """A stream: headers with the first bytes or after a short wait, then chunks, and heartbeats while it is silent.

    The wait lets an error that comes early keep its own HTTP status.
    """

    def __init__(
        self, send: asgi.Send, dialect: Dialect, encoder: Encoder, headers: asgi.Headers, settings: GatewaySettings
    ) -> None:
        self._send = send
        self._dialect = dialect
        self._encoder = encoder
        self._headers = headers
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._lock = asyncio.Lock()
        self._last_sent = time.monotonic()
        self._started = False
        self._closed = False
        self._heartbeats: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(settings.headers_after_seconds, self._start_heartbeats)

    async def write(self, request_index: int, event: SampleEvent) -> None:
        data = self._encoder.feed(request_index, event)
        if not data:
            return
        async with self._lock:
            if not self._started:
                await self._send_headers()
            await self._send_body(data)

    async def finish(self, answers: list[Answer]) -> None:
        await self._finish(self._encoder.end(answers))

    async def fail(self, error: RequestError | EngineError) -> None:
        self.close()
        if self._started:
            await self._finish(self._encoder.fail(str(error), error.status))
        else:
            await send_error(self._send, error, self._dialect, self._headers)

    def close(self) -> None:
        self._timer.cancel()
        self._closed = True
        if self._heartbeats is not None:
            self._heartbeats.cancel()

    async def _finish(self, data: bytes) -> None:
        async with self._lock:
            if not self._started:
                await self._send_headers()
            self._closed = True
            await self._send_body(data, more=False)

    def _start_heartbeats(self) -> None:
        self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        heartbeat = self._dialect.heartbeat
        while True:
            async with self._lock:
                if self._closed:
                    return
                if not self._started:
                    await self._send_headers()
                    await self._send_body(b"")  # the headers leave the server with the first body bytes
                elif heartbeat and time.monotonic() - self._last_sent >= self._heartbeat_seconds:
                    await self._send_body(heartbeat)
            await asyncio.sleep(self._heartbeat_seconds)

    async def _send_headers(self) -> None:
        self._started = True
        headers = [
            (b"content-type", self._dialect.stream_media_type.encode() + b"; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_body(self, data: bytes, more: bool = True) -> None:
        self._last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
