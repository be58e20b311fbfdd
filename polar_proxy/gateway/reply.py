"""Replies: how an answer reaches the agent, streamed or in one piece, in the dialect of its request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects.base import Answer, Dialect
from polar_proxy.errors import EngineError, ProviderError, RequestError
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.recording import PendingCall, RequestContext
from polar_proxy.types import SampleEvent


async def send_error(
    send: asgi.Send,
    error: RequestError | EngineError,
    form: asgi.ErrorFormat,
    headers: asgi.Headers = (),
    *,
    call_id: str | None = None,
) -> None:
    """Send an error as the whole response. `call_id`: the id of the call that failed."""
    if isinstance(error, ProviderError) and error.body is not None:
        own = [field for field in error.headers if field[0] != b"content-length"]
        own.append((b"content-length", b"%d" % len(error.body)))
        await send({"type": "http.response.start", "status": error.status, "headers": [*headers, *own]})
        await send({"type": "http.response.body", "body": error.body})
        return
    if isinstance(error, EngineError):
        failure, error = error, RequestError(str(error), status=error.status, code=error.code or "engine_error")
        error.retry_after = failure.retry_after
    own, body = asgi.error_response(error, form, request_id=call_id)
    await send({"type": "http.response.start", "status": error.status, "headers": [*headers, *own]})
    await send({"type": "http.response.body", "body": body})


async def send_wrong_method(
    send: asgi.Send, form: asgi.ErrorFormat, method: str, taken: Sequence[str], route: str = "This route"
) -> None:
    """Send error 405 with the methods that the route takes."""
    error = RequestError(f"{route} takes {' and '.join(taken)}, not {method}.", status=405)
    await send_error(send, error, form, [(b"allow", ", ".join(taken).encode())])


async def send_stream(send: asgi.Send, body: bytes, dialect: Dialect, headers: asgi.Headers = ()) -> None:
    """Send a stream whose whole body is known already."""
    described = [(b"content-type", dialect.stream_media_type.encode() + b"; charset=utf-8"), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": described})
    await send({"type": "http.response.body", "body": body})


class Reply:
    """The response to one request: a JSON body that is sent after the sampling, or a stream that is sent during it.

    A stream's headers are sent with its first bytes, at the latest after `headers_after_seconds`. An error before the
    headers keeps its own HTTP status. While no events arrive, heartbeats are sent.
    """

    def __init__(self, send: asgi.Send, request: RequestContext, call: PendingCall, settings: GatewaySettings) -> None:
        """`call`: the first call of the request."""
        self._send = send
        self._dialect = request.dialect
        self._call_id = call_id = call.call_id
        self._encoder = request.parsed.encoder(call_id, int(request.started_at), sampled=call.request)
        session_id = request.session.session_id
        self._polar_headers = [(b"x-polar-call-id", call_id.encode()), (b"x-polar-session-id", session_id.encode())]
        self._headers = [*self._polar_headers, *asgi.request_id_headers(call_id)]
        self._stream = request.parsed.stream
        self._started = False
        self._closed = False
        self._lock = asyncio.Lock()
        self._last_sent = time.monotonic()
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._heartbeats: asyncio.Task[None] | None = None
        if self._stream:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(settings.headers_after_seconds, self._start_heartbeats)

    @property
    def started(self) -> bool:
        """True once a part of the response was sent."""
        return self._started

    async def write(self, request_index: int, event: SampleEvent) -> None:
        """Send an event of the engine request number `request_index`, if the response is a stream."""
        if not self._stream:
            return
        data = self._encoder.feed(request_index, event)
        if data:
            async with self._lock:
                if not self._started:
                    await self._send_headers()
                await self._send_body(data)

    async def finish(self, answers: list[Answer]) -> None:
        """Send the rest of the answer, up to its last byte."""
        if self._stream:
            await self._finish_stream(self._encoder.end(answers))
        else:
            await asgi.send_json(self._send, 200, self._encoder.respond(answers), self._headers)

    async def fail(self, error: RequestError | EngineError) -> None:
        """Send an error, as the whole response or at the end of a stream that has begun."""
        self.close()
        if self._started:
            await self._finish_stream(self._encoder.fail(str(error), error.status))
        else:
            await send_error(self._send, error, self._dialect, self._polar_headers, call_id=self._call_id)

    def close(self) -> None:
        """Stop the heartbeats. Safe to call more than once."""
        self._closed = True
        if self._stream:
            self._timer.cancel()
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None  # a cancelled task refers to its frames, and so to this object

    async def _finish_stream(self, data: bytes) -> None:
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
                    await self._send_body(b"")  # the server sends the headers together with the first body message
                elif heartbeat and time.monotonic() - self._last_sent >= self._heartbeat_seconds:
                    await self._send_body(heartbeat)
                if not heartbeat:
                    return
            await asyncio.sleep(max(0.0, self._last_sent + self._heartbeat_seconds - time.monotonic()))

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


class BackgroundReply(Reply):
    """The response to a request for an answer in the background: the unfinished response object, sent at once."""

    async def begin(self) -> None:
        await asgi.send_json(self._send, 200, self._encoder.unfinished("queued"), self._headers)

    def unfinished(self) -> bytes:
        """Return the response object as it is before the answer is complete."""
        return self._encoder.unfinished("in_progress")

    async def finish(self, answers: list[Answer]) -> None:
        """Do nothing: the client retrieves the answer later."""

    async def fail(self, error: RequestError | EngineError) -> None:
        """Do nothing: the record says how the call ended."""
