"""The passthrough engine: it sends each request to its provider unchanged, and streams the answer back to the agent.

Promises:

* The agent gets the provider's status and every byte of its body, in order, whether Polar can read them or not. An
  answer that Polar cannot read completely is recorded up to the unreadable chunk, with the finish reason `unread`.
* The agent's own key is held in memory only, in the request's headers, for the time of the call.
* A request is sent once. Retries are left to the agent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

import orjson

from polar_proxy.engines.base import Engine, ExactPrompt
from polar_proxy.engines.hosted.base import hosted_info
from polar_proxy.engines.http_client import HttpClient, HttpResponse
from polar_proxy.engines.openai_client import CONNECT_SECONDS, KEEPALIVE_SECONDS
from polar_proxy.engines.passthrough.answers import BodyReader, error_in, is_end, make_decoder
from polar_proxy.errors import EngineError, ProviderError, RequestError
from polar_proxy.provider_calls import ProviderPiece, ProviderRequest
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent

log = logging.getLogger(__name__)

T = TypeVar("T")

PROVIDER_HOSTS = {
    "anthropic_messages": "api.anthropic.com",
    "google_generate_content": "generativelanguage.googleapis.com",
}
"""The provider's host by dialect. If an agent's base URL is Polar's own, the agent's requests name no provider, and are
sent to this host. Dialects that are not in this table have `OPENAI_HOST`."""
OPENAI_HOST = "api.openai.com"
_CONTEXT_LENGTH = 200_000
"""The context length in tokens that is reported to harnesses, because the model is not known before a request."""
_NOT_SENT = frozenset(
    {b"host", b"connection", b"content-length", b"transfer-encoding", b"accept-encoding", b"content-encoding"}
    | {b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-authorization", b"proxy-connection", b"expect"}
)
"""Request headers that are not passed on: headers that concern only the connection to the agent, and
`accept-encoding`, because Polar cannot read a compressed answer."""
_KEYS_OF_POLAR = ("sk-polar-", "polar-admin-", "polar-trainer-", "polar_view=")
"""Texts by which Polar's own keys are recognised: the prefixes of session and API keys, and the web page's cookie."""
_MOST_HOSTS = 64
"""Maximum number of hosts whose connections are kept, because agents can name any number of hosts."""
_NOT_RETURNED = frozenset({"connection", "content-length", "transfer-encoding", "keep-alive", "trailer", "upgrade"})
_INFO = hosted_info("passthrough", "1", "the-provider's", _CONTEXT_LENGTH, "provider_tools")


class PassthroughEngine(Engine):
    def __init__(self, url: str | None = None) -> None:
        """`url`: send all requests to this server instead of the providers' own hosts."""
        self._url = None if url is None else url.rstrip("/")
        self._clients: dict[str, HttpClient] = {}

    @property
    def info(self) -> EngineInfo:
        return _INFO

    async def __aexit__(self, *error: object) -> None:
        for client in self._clients.values():
            client.close()

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        raw = request.raw
        if raw is None:
            raise RequestError("The passthrough engine samples nothing: only agents' requests can be passed on.")
        answer = _AnswerReader(raw, request)
        pieces = self._over_http(raw) if raw.exchange is None else raw.exchange(self.url_of(raw.host), raw)
        async for piece in pieces:
            for event in answer.feed(piece):
                yield event
            yield SampleEvent(raw=replace(piece, last=answer.ended))
            if answer.error is not None:
                raise ProviderError(f"{raw.host} failed: {answer.error.get('message') or answer.error}", status=502)
        for event in answer.end():
            yield event

    async def _over_http(self, raw: ProviderRequest) -> AsyncIterator[ProviderPiece]:
        """Send a request, and yield the pieces of its answer: the first has the headers, and the last is empty.

        Raises ProviderError for an error status, and EngineError if the connection breaks.
        """
        async with contextlib.aclosing(self.forward("POST", raw)) as pieces:
            first = await anext(pieces)
            status, headers = first.status, first.headers
            if status >= 400:
                body = b"".join([piece.data async for piece in pieces])
                raise ProviderError(_message(body, status), status=status, headers=headers, body=body)
            yield first
            async for piece in pieces:
                yield piece
            yield ProviderPiece(b"", last=True)

    async def forward(self, method: str, raw: ProviderRequest) -> AsyncGenerator[ProviderPiece, None]:
        """Send a request, and yield the pieces of its response, whatever the status.

        The first piece has the status and the headers. Raises EngineError if the connection breaks.
        """
        response = await self._send(method, raw)
        try:
            yield ProviderPiece(b"", headers=_returned_headers(response), status=response.status)
            while data := await response.read_some():
                yield ProviderPiece(data)
        except OSError as error:
            raise EngineError(f"The connection to {raw.host} broke off: {error}.") from error
        finally:
            response.close()

    async def _send(self, method: str, raw: ProviderRequest) -> HttpResponse:
        fields = b"".join(b"%b: %b\r\n" % field for field in headers_to_send(raw))
        body = raw.body if raw.body or method == "POST" else None
        try:
            return await self._client(raw.host).request(method, raw.target, body, fields=fields)
        except OSError as error:
            raise EngineError(f"{raw.host} cannot be reached: {error or type(error).__name__}.") from error

    def _client(self, host: str) -> HttpClient:
        url = self.url_of(host)
        if url not in self._clients:
            if len(self._clients) >= _MOST_HOSTS:
                self._clients.pop(next(iter(self._clients))).retire()
            self._clients[url] = HttpClient(url, {}, connect_seconds=CONNECT_SECONDS, keep_seconds=KEEPALIVE_SECONDS)
        return self._clients[url]

    def url_of(self, host: str) -> str:
        return self._url or f"https://{host}"

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        raise RequestError("A provider does not return a prompt's tokens.", status=501, code="unsupported")

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        raise RequestError("A provider does not accept token ids.", status=501, code="unsupported")

    async def health(self) -> str | None:
        return None


class _AnswerReader:
    """Reads the pieces of a provider's answer for the record, up to the first piece that Polar cannot read.

    After that piece, the reader only looks for errors and for the end of the answer. The agent gets all pieces.
    """

    def __init__(self, raw: ProviderRequest, request: EngineRequest) -> None:
        self._host = raw.host
        self._body: BodyReader | None = None
        self._decoder = make_decoder(raw, request)
        self._unread = False
        self.ended = False
        """Whether the answer ends in the latest piece given to `feed`."""
        self.error: Json | None = None
        """The error that the provider reports in the latest piece given to `feed`, or None."""

    def feed(self, piece: ProviderPiece) -> list[SampleEvent]:
        if self._body is None:  # the first piece has the headers
            self._body = BodyReader(dict(piece.headers), self._host)
        chunks = self._read(partial(self._body.feed, piece.data, last=piece.last))
        self.ended = piece.last or any(map(is_end, chunks))
        self.error = next(filter(None, map(error_in, chunks)), None)
        if self._unread or self.error is not None or not chunks:
            return []
        return self._read(partial(self._decoder.feed, chunks))

    def end(self) -> list[SampleEvent]:
        events = [] if self._unread else self._read(self._decoder.end)
        return [SampleEvent(finish_reason="unread")] if self._unread else events

    def _read(self, read: Callable[[], list[T]]) -> list[T]:
        try:
            return read()
        except (EngineError, RequestError) as error:
            if not self._unread:
                log.warning("an answer of %s was passed on, but could not be read: %s", self._host, error)
            self._unread = True
            return []


def headers_to_send(raw: ProviderRequest) -> list[tuple[bytes, bytes]]:
    """Return the request's headers, except those that concern only the connection between agent and Polar.

    Raises RequestError if the agent sent a key of Polar instead of its own.
    """
    kept = [(name, value) for name, value in raw.headers if name not in _NOT_SENT and not name.startswith(b"sec-web")]
    sent = (unquote(raw.target), *(value.decode("latin-1") for _, value in kept))
    if any(key in text for text in sent for key in _KEYS_OF_POLAR):
        raise RequestError(
            "This server passes calls on to the provider, which needs the agent's own key, but the agent sent a key of "
            "Polar: give the agent its own key, and start it with `polar intercept`.",
            status=401,
            code="invalid_api_key",
        )
    return kept


def _returned_headers(response: HttpResponse) -> tuple[tuple[bytes, bytes], ...]:
    """Return a response's headers, except those that concern only the connection to the provider."""
    kept = [(name, value) for name, value in response.headers.items() if name not in _NOT_RETURNED]
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in kept)


def _message(body: bytes, status: int) -> str:
    """Return the error message in an error body, at most 2000 characters."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")[:300] or f"HTTP {status}"
    value = value[0] if isinstance(value, list) and value else value
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message") or error)[:2000] if isinstance(error, dict) else str(error)[:2000]
