"""ASGI helpers of the hot path: read a body, send a response or an error, notice that the client has disconnected.

Plain ASGI instead of request and response classes, because this code runs for every call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import orjson

from polar_proxy.dialects.base import Dialect
from polar_proxy.errors import EngineError, ProviderError, RequestError
from polar_proxy.types import Json, new_id

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

INSIDE_SANDBOX = "polar_inside_sandbox"
"""Key that the scope's `state` has if the request came through a socket inside a sandbox."""
SANDBOX_KEY = "polar_sandbox_key"
"""Key under which the scope's `state` holds the API key of the sandbox's session. Set only if the request came through
a socket that takes the place of the model hosts."""
PROVIDER_PATH = "polar_provider_path"
"""Key under which the scope's `state` holds the (host, path with query) to which an intercepted request was sent."""
PROVIDER_EXCHANGE = "polar_provider_exchange"
"""Key under which the scope's `state` holds the function that sends a request over the WebSocket to the provider
(`ProviderRequest.exchange`)."""
CONNECTION = "polar_connection"
"""Key of the connection's random id in the scope's `state`."""
WEBSOCKET_PIECE = "polar.websocket.piece"
"""Type of a message that reports that `size` more bytes of an incomplete WebSocket message have arrived."""
WEBSOCKET_CLOSING = "polar.websocket.closing"
"""Type of a message that asks the application to close a WebSocket with `code`. If `error` is set, send it first."""
WEBSOCKET_IDLE = "polar.websocket.idle"
"""Type of a message with which the application reports that no request of the WebSocket is in progress."""
_PIECE = 1 << 17
"""Number of bytes that are searched at a time when values are counted, so that the GIL is not held for long."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


def path_without_key(scope: Scope) -> str:
    """Return the path as it was sent, percent-encoded, without the prefix `/s/{key}`."""
    path: str = scope["raw_path"].decode("latin-1")
    return "/" + path[3:].partition("/")[2] if path.startswith("/s/") else path


def read_headers(scope: Scope) -> dict[str, str]:
    """Return the request headers by lower-case name."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(receive: Receive, take: Callable[[int], None]) -> list[bytes]:
    """Return the parts of the whole request body. `take` is called with the size of each part, before the part is
    kept."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        if chunk:
            take(len(chunk))
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks


def count_values(body: bytes, limit: int) -> int:
    """Estimate the number of JSON values in `body`, to find out whether there are more than `limit`.

    Values are counted by their separators, and an empty array or object counts as two. The first count includes
    separators inside strings, so it is an upper bound, and is returned if it does not exceed `limit`. Otherwise a
    second count skips strings, and stops above `limit`. The body is not parsed, because parsed values take up to a
    hundred times the memory of their text, and parsing holds up all other requests.
    """
    values = 1 + sum(map(_count_separators, _pieces(body)))
    if values <= limit:
        return values
    values, quotes = 1, 0
    for piece in _pieces(body):
        texts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        values += _count_separators(b"".join(texts[quotes % 2 :: 2]))
        quotes += len(texts) - 1
        if values > limit or quotes > 4 * limit:  # keys and values have two quotes each
            return max(values, quotes // 4)
    return values


def _count_separators(body: bytes) -> int:
    signs = np.frombuffer(body, np.uint8)  # numpy compares many bytes at a time
    return int(np.count_nonzero((signs == ord(",")) | (signs == ord("[")) | (signs == ord("{"))))


def _pieces(body: bytes) -> Iterator[bytes]:
    """Yield the body in pieces, so that searching one piece does not hold the GIL for long. No escape sequence is
    split."""
    start = 0
    while piece := body[start : start + _PIECE]:
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + _PIECE + 1]
        yield piece
        start += len(piece)


def parse_json_object(body: bytes) -> Json:
    """Return the JSON object in `body`. Raises RequestError if `body` is not a JSON object."""
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if rb"\ud" not in body and rb"\uD" not in body:
            raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
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


_REQUEST_ID_NAMES = frozenset({b"x-request-id", b"request-id"})
_request_id: ContextVar[str | None] = ContextVar("polar_request_id", default=None)


def request_id_headers(request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the request id under the header names of OpenAI (`x-request-id`) and Anthropic (`request-id`)."""
    return [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]


class ErrorFormat(Protocol):
    """The format in which a provider or the HTTP API reports errors."""

    def error_body(self, error: RequestError, request_id: str) -> bytes:
        """Return the response body of an error. `request_id`: the id that is also in the response's headers."""


def error_response(
    error: RequestError, form: ErrorFormat, *, request_id: str | None = None
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of the response for an error.

    `request_id`: by default the id that `with_request_id` has set for this request, or else a new one.
    """
    request_id = request_id or _request_id.get() or new_id("req")
    headers = [(b"content-type", b"application/json"), *request_id_headers(request_id)]
    # Clients such as Codex give up at once on a 429 without a retry-after header.
    after = error.retry_after or ("1" if error.status in (429, 503) else None)
    if after is not None:
        headers.append((b"retry-after", after.encode("latin-1", "replace")))
    body = form.error_body(error, request_id)
    return [*headers, (b"content-length", b"%d" % len(body))], body


def with_request_id(send: Send, request_id: str) -> Send:
    """Return a `send` that adds the request id to the headers of a response, unless the response has one already."""
    _request_id.set(request_id)

    async def identified_send(message: Any) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            headers = list(message.get("headers", ()))
            if _REQUEST_ID_NAMES.isdisjoint([name for name, _ in headers]):
                message = {**message, "headers": headers + request_id_headers(request_id)}
        await send(message)

    return identified_send


def refuse_upgrade(send: Send) -> Send:
    """Return a `send` for an HTTP response that refuses to open the requested WebSocket."""

    async def send_refusal(message: Any) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return send_refusal


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    length = str(len(body)).encode()
    described = [(b"content-type", b"application/json"), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": described})
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send,
    error: RequestError | EngineError,
    form: ErrorFormat,
    headers: Headers = (),
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
    own, body = error_response(error, form, request_id=call_id)
    await send({"type": "http.response.start", "status": error.status, "headers": [*headers, *own]})
    await send({"type": "http.response.body", "body": body})


async def send_wrong_method(
    send: Send, form: ErrorFormat, method: str, taken: Sequence[str], route: str = "This route"
) -> None:
    """Send error 405 with the methods that the route takes."""
    error = RequestError(f"{route} takes {' and '.join(taken)}, not {method}.", status=405)
    await send_error(send, error, form, [(b"allow", ", ".join(taken).encode())])


async def send_stream(send: Send, body: bytes, dialect: Dialect, headers: Headers = ()) -> None:
    """Send a stream whose whole body is known already."""
    described = [(b"content-type", dialect.stream_media_type.encode() + b"; charset=utf-8"), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": described})
    await send({"type": "http.response.body", "body": body})


class ClientWatch:
    """A context manager that cancels the current task if the client disconnects before the block ends.

    After the disconnect, the task runs on until `on_disconnect` returns. Then `gone` becomes True, and the task is
    cancelled. The block absorbs this cancellation, but no other one.
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
        # A cancelled task refers to its frames, and so to this object: a cycle that would keep the whole request until
        # the next garbage collection.
        del self._task
        if not self.gone:
            return False
        if kind is None:  # cancelled on the last step: consume the cancellation here, not in the commit that follows
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                pass
        others = self._target.uncancel()
        return kind is asyncio.CancelledError and others == 0
