"""The HTTP side of an engine behind an OpenAI-shaped server: connections, error translation, server-sent events.

A model call may take as long as it takes, so there is no time-out but the one for opening the connection.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

import orjson

from polar_proxy.engines.http_client import HttpClient, HttpResponse, NoResponseError
from polar_proxy.errors import EngineError, PolarError, RequestError
from polar_proxy.types import Json

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 3.0
"""Less than the five seconds after which uvicorn, and so vLLM, closes an idle connection under our hands."""
RETRY_WITHIN_SECONDS = 1.0
FINISH_SECONDS = 1.0

_CONTEXT_LENGTH = re.compile(r"maximum context length|longer than the maximum model length", re.IGNORECASE)


class OpenAIClient:
    """Connections to one server. Everything it raises is an `EngineError` or a `RequestError`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is the server's root, with or without `/v1`; `api_key` goes out as a bearer token."""
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"The engine's URL must begin with http:// or https://, got {url!r}.")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json", "accept": "*/*", "user-agent": "polar-proxy"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        try:
            self._client = HttpClient(
                self.url, headers, connect_seconds=CONNECT_SECONDS, keep_seconds=KEEPALIVE_SECONDS
            )
        except ValueError as error:
            raise RequestError(f"The engine's URL or its key cannot be used: {error}.") from error
        self._open = False

    async def open(self) -> None:
        self._open = True

    async def close(self) -> None:
        self._open = False
        self._client.close()

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._client.connections

    async def send(self, method: str, path: str, body: Json | None = None) -> HttpResponse:
        """The response as soon as its headers are there, whatever its status. The caller closes it.

        A server may close an idle connection at the moment we write to it; such a request never reached a handler
        and is sent once more, on a fresh connection.
        """
        if not self._open:
            raise EngineError("The engine is not open: use it as `async with engine:`.", status=500)
        raw = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        started = time.monotonic()
        for last in (False, True):
            try:
                return await self._client.request(method, path, raw)
            except NoResponseError as error:
                if last or time.monotonic() - started > RETRY_WITHIN_SECONDS:
                    raise self.lost(error) from error
            except OSError as error:  # TimeoutError is one
                raise EngineError(f"The engine at {self.url} cannot be reached: {_reason(error)}.") from error
        raise AssertionError("unreachable")

    async def post(self, path: str, body: Json) -> HttpResponse:
        """As `send`, but anything except 200 raises."""
        response = await self.send("POST", path, body)
        if response.status != 200:
            raise await self.failure(response)
        return response

    async def json(self, method: str, path: str, body: Json | None = None) -> Any:
        """The decoded answer of a route that answers in one piece."""
        response = await self.send(method, path, body)
        if response.status != 200:
            raise await self.failure(response)
        return parse_json(await self.read(response), self.url)

    async def read(self, response: HttpResponse) -> bytes:
        """The whole body. A caller that is cancelled drops the connection, so that the server stops its work."""
        try:
            raw = await response.read()
        except OSError as error:
            raise self.lost(error) from error
        finally:
            response.close()
        return raw

    async def read_some(self, response: HttpResponse) -> bytes:
        """What has arrived of a streamed body; empty at its end."""
        try:
            return await response.read_some()
        except OSError as error:
            raise self.lost(error) from error

    async def finish(self, response: HttpResponse) -> None:
        """Takes the end of a body whose content is complete, so that its connection can be used again."""
        if response.complete:
            return
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await response.read()
        except OSError:
            response.close()  # the answer is complete; only the connection is lost

    async def failure(self, response: HttpResponse) -> PolarError:
        """The typed error for an answer other than 200; the response is used up."""
        raw = await self.read(response)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = raw.decode(errors="replace")[:300]
        error = api_error(body, response.status, f"The engine at {self.url}")
        error.retry_after = response.headers.get("retry-after")
        return error

    def lost(self, error: BaseException) -> EngineError:
        return EngineError(f"The connection to the engine at {self.url} broke off: {_reason(error)}.")


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


def parse_json(raw: bytes, url: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        start = raw[:80].decode(errors="replace")
        raise EngineError(f"The engine at {url} sent malformed JSON ({error}): {start!r}.") from error


def api_error(body: Any, status: int, who: str) -> PolarError:
    """The typed error for an OpenAI error body.

    A 400, 404, 413 or 422 is the request's own fault and keeps status, `param` and `code`. A refused key or an
    unknown route is a fault of the set-up, which the agent can do nothing about: 502. Overload (429, 503) is told to
    the agent as it is, so that it waits and tries again.
    """
    error = body.get("error", body) if isinstance(body, Mapping) else {}
    if isinstance(error, Mapping):
        text = str(error.get("message") or error.get("detail") or "")
        param, code = error.get("param"), error.get("code")
    else:  # some servers answer {"error": "text"}
        text, param, code = str(error), None, None
    text = text or (body if isinstance(body, str) else "") or f"HTTP {status}"
    if status in (401, 403):
        return EngineError(f"{who} refused the key it was given ({status}): {text} Set the engine's API key.")
    if status == 404 and param is None and "model" not in text.lower():
        return EngineError(f"{who} does not have this route (404 {text}). Is it an OpenAI-compatible server?")
    if status in (429, 503):
        return EngineError(f"{who} is overloaded ({status}): {text}", status=status)
    if 400 <= status < 500:
        # vLLM repeats the status in `code`; agents know a conversation that is too long by OpenAI's own code.
        name = code if isinstance(code, str) else None
        if _CONTEXT_LENGTH.search(text):
            name = "context_length_exceeded"
        return RequestError(text, status=status, param=param if isinstance(param, str) else None, code=name)
    return EngineError(f"{who} failed ({status}): {text}")


class SseDecoder:
    """Turns the bytes of an event stream into decoded JSON, as many events at a time as one read of the socket holds.

    One pass of `bytes.split` and one call of the JSON parser per read: a stream of one event per token would
    otherwise cost more than everything else that is done with the token.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._rest = b""
        self.done = False
        """`data: [DONE]` was seen."""

    def feed(self, data: bytes) -> list[Json]:
        """The events which `data` completes. Raises EngineError for malformed JSON."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n")
        if end < 0:
            self._rest = data
            return []
        block, self._rest = data[:end], data[end + 2 :]
        payloads = [payload for event in block.split(b"\n\n") if (payload := _payload(event))]
        if payloads and payloads[-1] == b"[DONE]":
            payloads.pop()
            self.done = True
        if not payloads:
            return []
        try:
            events: list[Json] = orjson.loads(b"[" + b",".join(payloads) + b"]")
        except orjson.JSONDecodeError:
            for payload in payloads:
                parse_json(payload, self._url)  # says which one
            raise
        return events


def _payload(event: bytes) -> bytes:
    """The data of one event; empty for a comment or another field."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
