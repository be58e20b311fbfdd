"""Connections to a server that speaks the OpenAI API, and the base class of the engines that use such a server.

There is a time-out for connecting, and one for GET requests, which ask about the server itself. Model calls have no
time-out here, because the gateway has time-outs for them (`gateway/engine_timeouts.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Protocol, Self

import orjson

from polar_proxy.engines.base import Engine
from polar_proxy.engines.http_client import HttpClient, HttpResponse, NoResponseError, NotSentError
from polar_proxy.engines.openai_stream import SseDecoder, api_error, parse_json
from polar_proxy.errors import EngineDroppedError, EngineError, PolarError, RequestError
from polar_proxy.offload import OffloadThread
from polar_proxy.types import EngineInfo, Json, Message, SampleEvent, Sampling

CONNECT_SECONDS = 5.0
KEEPALIVE_SECONDS = 3.0
"""How long an idle connection is kept. It must be less than five seconds: after this time uvicorn, on which vLLM runs,
closes idle connections."""
ANSWER_SECONDS = 30.0
"""Time-out of a GET request, from its start to the headers of the response."""
RETRY_WITHIN_SECONDS = 1.0
FINISH_SECONDS = 1.0


class AnswerDecoder(Protocol):
    """Turns the JSON objects of one answer into events."""

    def feed(self, chunks: Iterable[Json]) -> list[SampleEvent]:
        """Return the events that these objects complete. Raises EngineError or RequestError for an error object."""

    def end(self) -> list[SampleEvent]:
        """Return the last events. Raises EngineError if the answer is not complete."""


ErrorReader = Callable[[Any, int, str], PolarError]
"""Returns the typed error for a failed response. Arguments: the body (JSON or text), the status, the server's name."""


class OpenAIClient:
    """Connections to one server. Every error it raises is an `EngineError` or a `RequestError`."""

    missing_field_hint: ClassVar[str] = ""
    """Added to the error about a field that is missing in an answer."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        keep_alive: bool = True,
        auth: tuple[str, str] = ("authorization", "Bearer "),
        headers: Mapping[str, str] = MappingProxyType({}),
        read_error: ErrorReader = api_error,
    ) -> None:
        """`url` is the server's root, with or without `/v1`. `api_key` is sent in the header `auth[0]`, after the text
        `auth[1]`.

        `keep_alive=False` opens a connection for each request. `headers` are sent with every request.
        """
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"The engine's URL must begin with http:// or https://, got {url!r}.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.thread = OffloadThread("polar-engine-requests")
        self.opened = False
        """True while the engine's `async with` block runs. Requests are sent only then."""
        self.name = f"The engine at {self.url}"
        """Name of the server in error messages."""
        self._key = api_key
        self._read_error = read_error
        sent = {"content-type": "application/json", "accept": "*/*", "user-agent": "polar-proxy", **headers}
        if not keep_alive:
            sent["connection"] = "close"
        if api_key:
            sent[auth[0]] = auth[1] + api_key
        try:
            self._http = HttpClient(self.url, sent, connect_seconds=CONNECT_SECONDS, keep_seconds=KEEPALIVE_SECONDS)
        except ValueError as error:
            raise RequestError(f"The engine's URL or its key cannot be used: {error}.") from error

    def close(self) -> None:
        self.opened = False
        self._http.close()
        self.thread.close()

    async def send(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        samples: bool = False,
        large: bool = False,
        fields: bytes = b"",
    ) -> HttpResponse:
        """Send a request and return the response once its headers are there, whatever its status. The caller closes it.
        With `large`, the body is encoded in a separate thread. `fields`: further header fields, each with its line
        break.

        A server may close an idle connection just when the request is written to it. If the connection closes without
        an answer within RETRY_WITHIN_SECONDS, the request is therefore sent once more. A sampling request (`samples`)
        is not sent again if the server may have received bytes of it. EngineDroppedError is raised instead, because the
        server may have sampled an answer, and this must be recorded as a call.
        """
        if not self.opened:
            raise not_open()
        raw = None
        if body is not None:
            raw = await self.thread.run(large, orjson.dumps, body, option=orjson.OPT_SERIALIZE_NUMPY)
        started = time.monotonic()
        for last in (False, True):
            try:
                async with asyncio.timeout(ANSWER_SECONDS) if method == "GET" else contextlib.nullcontext():
                    return await self._http.request(method, path, raw, fields=fields)
            except NoResponseError as error:
                if last or time.monotonic() - started > RETRY_WITHIN_SECONDS:
                    raise self._broken(error) from error
                if samples and not isinstance(error, NotSentError):
                    raise EngineDroppedError(str(self._broken(error))) from error
            except OSError as error:  # includes TimeoutError
                raise EngineError(f"{self.name} cannot be reached: {_describe(error)}.") from error
        raise AssertionError("unreachable")

    async def post(self, path: str, body: Json, *, large: bool = False, fields: bytes = b"") -> HttpResponse:
        """Send a sampling request (see `send`). For any status except 200, raise the error that `failure` returns."""
        response = await self.send("POST", path, body, samples=True, large=large, fields=fields)
        if response.status != 200:
            raise await self.failure(response)
        return response

    async def json(self, method: str, path: str, body: Json | None = None) -> Any:
        """Send a request and return its decoded JSON answer. For any status except 200, raise as `post` does."""
        response = await self.send(method, path, body)
        if response.status != 200:
            raise await self.failure(response)
        return parse_json(await self.read(response), self.url)

    def field(self, answer: Any, name: str) -> Any:
        """Return a field of an answer. Raises EngineError if it is missing."""
        value = answer.get(name) if isinstance(answer, dict) else None
        if value is None:
            raise EngineError(f"{self.name} sent an answer without {name!r}.{self.missing_field_hint}")
        return value

    async def events(
        self, response: HttpResponse, decoder: AnswerDecoder, *, stream: bool
    ) -> AsyncGenerator[list[SampleEvent], None]:
        """Yield the events of an answer as they arrive. Closing the iterator early makes the server stop generating."""
        try:
            if stream:
                lines = SseDecoder(self.url)
                while not lines.done and (data := await self._read_some(response)):
                    yield decoder.feed(lines.feed(data))
            else:
                yield decoder.feed([parse_json(await self.read(response), self.url)])
            yield decoder.end()
            await self._finish(response)
        finally:
            response.close()

    async def health(self) -> str | None:
        """Return None if `/health` of a vLLM or llama.cpp server reports success, else the reason why it does not."""
        try:
            response = await self.send("GET", "/health")
            await self.read(response)
        except EngineError as error:
            return str(error)
        return None if response.status == 200 else f"{self.name} answers {response.status} to /health."

    async def read(self, response: HttpResponse) -> bytes:
        """Return the whole body. Cancelling the caller drops the connection, so that the server stops its work."""
        try:
            raw = await response.read()
        except OSError as error:
            raise self._broken(error) from error
        finally:
            response.close()
        return raw

    async def _finish(self, response: HttpResponse) -> None:
        """Read the rest of the body after the last event, so that the connection can be used again.

        The rest is HTTP framing, such as the last chunk. If it does not arrive in time, close the connection.
        """
        if response.complete:
            return
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await response.read()
        except OSError:
            response.close()  # the answer is complete; only the connection is lost

    async def failure(self, response: HttpResponse) -> PolarError:
        """Read the body of a response with a status other than 200, and return the typed error for it."""
        raw = await self.read(response)
        if self._key:  # some servers quote the key, and the agent must not read it
            raw = raw.replace(self._key.encode(), b"[secret removed]")
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = raw.decode(errors="replace")[:300]
        error = self._read_error(body, response.status, self.name)
        error.retry_after = response.headers.get("retry-after") or error.retry_after
        return error

    async def _read_some(self, response: HttpResponse) -> bytes:
        try:
            return await response.read_some()
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: BaseException) -> EngineError:
        return EngineError(f"The connection to the engine at {self.url} broke off: {_describe(error)}.")


def not_open() -> EngineError:
    return EngineError("The engine is not open: use it as `async with engine:`.", status=500)


def _describe(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


def sampling_fields(sampling: Sampling, names: Sequence[str], *, stream: bool) -> Json:
    """Return the sampling fields of a request body: n, stop, logit_bias, `stream`, and the parameters `names`.

    Parameters that the request does not set are left out.
    """
    body: Json = {name: value for name in names if (value := getattr(sampling, name)) is not None}
    if sampling.n != 1:
        body["n"] = sampling.n
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = dict(sampling.logit_bias)
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body


def server_message(message: Message) -> Json:
    """Return a message as servers with a chat template accept it.

    Servers refuse a conversation in which the arguments of a tool call are not JSON, even if their own model wrote
    these arguments. Such arguments are sent as a JSON string, which servers accept and templates print unchanged.
    Reasoning is sent under both of its names, `reasoning` and `reasoning_content`: the chat route of vLLM accepts
    either, but vLLM's `/tokenize` (0.32) drops `reasoning_content`; older and other servers accept only
    `reasoning_content`.
    """
    out = message.to_openai()
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    for call in out.get("tool_calls", ()):
        function = call["function"]
        if not _is_json(function["arguments"]):
            function["arguments"] = orjson.dumps(function["arguments"]).decode()
    return out


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


class ServerEngine(Engine):
    """An engine behind a server that speaks the OpenAI API."""

    client: OpenAIClient
    _info: EngineInfo | None = None

    @abstractmethod
    async def _connect(self) -> EngineInfo:
        """Find out what the server can do. Raises EngineError if the server cannot be used."""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise not_open()
        return self._info

    async def __aenter__(self) -> Self:
        self.client.opened = True
        try:
            self._info = await self._connect()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    async def health(self) -> str | None:
        return await self.client.health()
