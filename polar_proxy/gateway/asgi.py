"""ASGI helpers of the hot path: read a body, send a response, notice that the client has disconnected.

Plain ASGI instead of request and response classes, because this code runs for every call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.types import Json

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

INSIDE_SANDBOX = "polar_inside_sandbox"
"""Key that the scope's `state` has if the request came through a socket inside a sandbox."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


def read_headers(scope: Scope) -> dict[str, str]:
    """Return the request headers by lower-case name."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(receive: Receive, limit: int, pause_seconds: float, take: Callable[[int], None]) -> bytes:
    """Return the whole request body.

    `take` is called with the size of each part, before the part is kept. Raises RequestError 413 above `limit` bytes
    and 408 if no part arrives for `pause_seconds`.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(pause_seconds):
                message = await receive()
        except TimeoutError:
            message_text = f"No part of the request body arrived for {pause_seconds:g} seconds."
            raise RequestError(message_text, status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        if chunk:
            size += len(chunk)
            if size > limit:
                raise RequestError(f"The request body is larger than {limit} bytes.", status=413)
            take(len(chunk))
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def parse_json_object(body: bytes, max_values: int) -> Json:
    """Return the JSON object in `body`. Raises RequestError if it is not one, or has more than `max_values` values.

    The values are counted by their separators before anything is parsed: a parsed value takes about a hundred times
    the memory of its shortest text, and blocks all other requests while it is made.
    """
    if len(body) > 2 * max_values and sum(map(body.count, (b",", b"[", b"{"))) > max_values:
        raise RequestError(f"The request body has more than {max_values} JSON values.", status=413)
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _replace_lone_surrogates(body, error)
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_type")
    return value


def _replace_lone_surrogates(body: bytes, error: orjson.JSONDecodeError) -> object:
    """Parse JSON that orjson refused, with each lone surrogate replaced by a question mark.

    JavaScript clients that cut a text inside an emoji send one half of it, escaped. No model can read that half.
    Raises RequestError if the body is not JSON at all.
    """
    try:
        value = json.loads(body, parse_constant=_reject_constant)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    await _send_response(send, "http", status, b"application/json", body, headers)


async def refuse_websocket(receive: Receive, send: Send) -> None:
    """Answer a WebSocket handshake with 426. Codex then uses HTTP at once; with another status it first tries again
    seven times."""
    await receive()
    body = b"Polar answers over HTTP, not over a WebSocket."
    await _send_response(send, "websocket.http", 426, b"text/plain", body, [(b"connection", b"close")])


async def _send_response(
    send: Send, protocol: str, status: int, media_type: bytes, body: bytes, headers: Headers
) -> None:
    described = [(b"content-type", media_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": f"{protocol}.response.start", "status": status, "headers": described})
    await send({"type": f"{protocol}.response.body", "body": body})


class ClientWatch:
    """A context manager that cancels the current task if the client disconnects before the block ends.

    This cancellation ends with the block, and `gone` is then True. A cancellation from elsewhere passes through.
    After a disconnect, `on_disconnect` is awaited first; it returns when the task is no longer worth continuing.
    """

    def __init__(self, receive: Receive, on_disconnect: Callable[[], Awaitable[None]] | None = None) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect
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
        if self._on_disconnect is not None:
            await self._on_disconnect()
        self.gone = True
        self._target.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> bool:
        self._task.cancel()
        if not self.gone:
            return False
        if kind is None:  # cancelled on the last step: consume the cancellation here, not in the commit that follows
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                pass
        others = self._target.uncancel()
        return kind is asyncio.CancelledError and others == 0
