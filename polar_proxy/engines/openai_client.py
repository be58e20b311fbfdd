"""Connections to a server that speaks the OpenAI API: requests, typed errors, server-sent events.

Only opening a connection has a timeout, because a model call may take any time.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson

from polar_proxy.engines.http_client import HttpClient, HttpResponse, NoResponseError
from polar_proxy.errors import EngineError, PolarError, RequestError
from polar_proxy.types import Json

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 3.0
"""Less than the five seconds after which uvicorn, and therefore vLLM, closes an idle connection."""
RETRY_WITHIN_SECONDS = 1.0
FINISH_SECONDS = 1.0

_CONTEXT_LENGTH = re.compile(r"maximum context length|longer than the maximum model length", re.IGNORECASE)


class OpenAIClient:
    """Connections to one server. Every error it raises is an `EngineError` or a `RequestError`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is the server's root, with or without `/v1`; `api_key` is sent as a bearer token."""
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"The engine's URL must begin with http:// or https://, got {url!r}.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"The engine at {self.url}"
        """Name of the server in error messages."""
        headers = {"content-type": "application/json", "accept": "*/*", "user-agent": "polar-proxy"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        try:
            self._http = HttpClient(self.url, headers, connect_seconds=CONNECT_SECONDS, keep_seconds=KEEPALIVE_SECONDS)
        except ValueError as error:
            raise RequestError(f"The engine's URL or its key cannot be used: {error}.") from error
        self._open = False

    async def open(self) -> None:
        self._open = True

    async def close(self) -> None:
        self._open = False
        self._http.close()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return self._http.connections

    async def send(self, method: str, path: str, body: Json | None = None) -> HttpResponse:
        """Send a request and return the response once its headers are there, whatever its status. The caller closes it.

        A server may close an idle connection at the moment we write to it. Such a request never reached a handler, and
        is sent once more on a fresh connection.
        """
        if not self._open:
            raise EngineError("The engine is not open: use it as `async with engine:`.", status=500)
        raw = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        started = time.monotonic()
        for last in (False, True):
            try:
                return await self._http.request(method, path, raw)
            except NoResponseError as error:
                if last or time.monotonic() - started > RETRY_WITHIN_SECONDS:
                    raise self._broken(error) from error
            except OSError as error:  # includes TimeoutError
                raise EngineError(f"{self.name} cannot be reached: {_describe(error)}.") from error
        raise AssertionError("unreachable")

    async def post(self, path: str, body: Json) -> HttpResponse:
        """Send a POST request; raise for any status except 200."""
        response = await self.send("POST", path, body)
        if response.status != 200:
            raise await self.failure(response)
        return response

    async def json(self, method: str, path: str, body: Json | None = None) -> Any:
        """Send a request and return its decoded JSON answer; raise for any status except 200."""
        response = await self.send(method, path, body)
        if response.status != 200:
            raise await self.failure(response)
        return parse_json(await self.read(response), self.url)

    async def chunks(self, response: HttpResponse, *, stream: bool) -> AsyncGenerator[list[Json], None]:
        """Yield the chunks of an answer as they arrive; an answer that is not streamed is one chunk."""
        if not stream:
            yield [parse_json(await self.read(response), self.url)]
            return
        decoder = SseDecoder(self.url)
        while not decoder.done and (data := await self._read_some(response)):
            yield decoder.feed(data)

    async def read(self, response: HttpResponse) -> bytes:
        """Return the whole body. Cancelling the caller drops the connection, so that the server stops its work."""
        try:
            raw = await response.read()
        except OSError as error:
            raise self._broken(error) from error
        finally:
            response.close()
        return raw

    async def finish(self, response: HttpResponse) -> None:
        """Read the end of a body whose content is complete, so that its connection can be used again."""
        if response.complete:
            return
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await response.read()
        except OSError:
            response.close()  # the answer is complete; only the connection is lost

    async def failure(self, response: HttpResponse) -> PolarError:
        """Return the typed error for a response other than 200, whose body it reads."""
        raw = await self.read(response)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = raw.decode(errors="replace")[:300]
        error = api_error(body, response.status, self.name)
        error.retry_after = response.headers.get("retry-after")
        return error

    async def _read_some(self, response: HttpResponse) -> bytes:
        try:
            return await response.read_some()
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: BaseException) -> EngineError:
        return EngineError(f"The connection to the engine at {self.url} broke off: {_describe(error)}.")


def _describe(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


def parse_json(raw: bytes, url: str) -> Any:
    """Decode JSON that the engine at `url` sent. Raises EngineError."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        start = raw[:80].decode(errors="replace")
        raise EngineError(f"The engine at {url} sent malformed JSON ({error}): {start!r}.") from error


def api_error(body: Any, status: int, name: str) -> PolarError:
    """Return the typed error for an OpenAI error body; `name` is the server's name in its text.

    A 400, 404, 413 or 422 is the request's own fault and keeps status, `param` and `code`. A refused key or an unknown
    route is a fault of the set-up, which the agent cannot fix: 502. Overload (429, 503) is passed to the agent as it
    is, so that it waits and tries again.
    """
    error = body.get("error", body) if isinstance(body, Mapping) else {}
    if isinstance(error, Mapping):
        text = str(error.get("message") or error.get("detail") or "")
        param, code = error.get("param"), error.get("code")
    else:  # some servers send {"error": "text"}
        text, param, code = str(error), None, None
    text = text or (body if isinstance(body, str) else "") or f"HTTP {status}"
    if status in (401, 403):
        return EngineError(f"{name} refused the API key it was given ({status}): {text} Set the engine's API key.")
    if status == 404 and param is None and "model" not in text.lower():
        return EngineError(f"{name} does not have this route (404 {text}). Is it an OpenAI-compatible server?")
    if status in (429, 503):
        return EngineError(f"{name} is overloaded ({status}): {text}", status=status)
    if 400 <= status < 500:
        # vLLM repeats the status in `code`; agents recognise a conversation that is too long by OpenAI's own code.
        error_code = code if isinstance(code, str) else None
        if _CONTEXT_LENGTH.search(text):
            error_code = "context_length_exceeded"
        return RequestError(text, status=status, param=param if isinstance(param, str) else None, code=error_code)
    return EngineError(f"{name} failed ({status}): {text}")


class SseDecoder:
    """Decode the bytes of an event stream into JSON, as many events at a time as one read of the socket holds.

    One `bytes.split` and one call of the JSON parser per read: with one event per token, decoding each event by itself
    would cost more than all other work on the token.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._rest = b""
        self.done = False
        """`data: [DONE]` has arrived."""

    def feed(self, data: bytes) -> list[Json]:
        """Return the events that `data` completes. Raises EngineError for malformed JSON."""
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
                parse_json(payload, self._url)  # raises for the malformed one
            raise
        return events


def _payload(event: bytes) -> bytes:
    """Return the data of one event; empty for a comment or another field."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
