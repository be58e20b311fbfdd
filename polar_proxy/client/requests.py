"""Network-free parts of both clients: API calls as values, the retry budget, and reading of streams.

Each API method is one function from arguments to an `ApiCall`. The descriptors `api_method` and `api_stream` turn it
into a method that returns the response on `Client` and a coroutine on `AsyncClient`, so every route is written once.
"""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload
from urllib.parse import quote

import httpx
import orjson

from polar_proxy.api_models import API_PREFIX
from polar_proxy.client.errors import UnreachableError, error_from_response
from polar_proxy.client.streams import StreamDecoder
from polar_proxy.types import Json

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
MAX_TRIES = 5
MAX_PAUSE_SECONDS = 10.0
RECONNECT_SECONDS = 0.5
_RETRY_STATUSES = frozenset({429, 503})
"""Retried if the response has the header `Retry-After`, because the server then did nothing."""


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request and the function that reads its response."""

    method: str
    path: str
    """Below `/api/v1`, percent-encoded."""
    read: Callable[[bytes], T]
    params: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Query parameters; None omits the parameter."""
    json: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = False
    """Retry when no response arrives."""
    server_wait: float = 0.0
    """Seconds for which the server may delay its response on purpose, added to the read timeout."""

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        content_type = {} if self.json is None else {"content-type": "application/json"}
        return http.build_request(
            self.method,
            API_PREFIX + self.path,
            params={name: value for name, value in self.params.items() if value is not None},
            headers={**content_type, **self.headers},
            content=None if self.json is None else orjson.dumps(self.json),
            timeout=httpx.Timeout(TIMEOUT_SECONDS, read=TIMEOUT_SECONDS + self.server_wait),
        )


@dataclass(frozen=True, slots=True)
class ApiStream(Generic[T]):
    """A request whose response is a stream of values."""

    path: str
    decoder: Callable[[], StreamDecoder[T]]
    params: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


def quote_segment(value: str) -> str:
    """Encode an id as one path segment, whatever characters it has."""
    return quote(value, safe="")


@dataclass(slots=True)
class RetryBudget:
    """Decide for each reply to a request: accept it, raise a typed error, or try again after a pause."""

    tries: int
    idempotent: bool
    _tried: int = 0

    def pause(self, reply: httpx.Response | httpx.TransportError) -> float | None:
        """Return the seconds until the next try, or None if this reply is the response.

        The body of an error response must have been read. Raises the typed error of a refusal.
        """
        self._tried += 1
        if isinstance(reply, httpx.TransportError):
            # Without a connection the server did not see the request, so that any request may be sent again.
            unsent = isinstance(reply, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
            if self._tried < self.tries and (self.idempotent or unsent):
                return self._backoff()
            raise UnreachableError(
                f"No answer from {_origin(reply)}: {reply or type(reply).__name__}. Is `polar serve` running there?"
            ) from reply
        if reply.status_code < 400:
            return None
        wait = reply.headers.get("retry-after", "")
        if self._tried < self.tries and reply.status_code in _RETRY_STATUSES and wait.isdecimal():
            return float(wait)
        raise error_from_response(reply.status_code, reply.content)

    def _backoff(self) -> float:
        return float(min(MAX_PAUSE_SECONDS, 0.2 * 2**self._tried) * random.uniform(0.5, 1.0))


def _origin(error: httpx.TransportError) -> str:
    try:
        return f"{error.request.url.scheme}://{error.request.url.netloc.decode()}"
    except RuntimeError:  # the transport did not attach the request
        return "the server"


class StreamReader(Generic[T]):
    """One stream across all its connections: decoding, and when to connect again."""

    def __init__(self, stream: ApiStream[T], tries: int) -> None:
        self._stream = stream
        self._decoder = stream.decoder()
        self._tries = tries
        self._budget = RetryBudget(tries, idempotent=True)
        self.pause = 0.0
        """Seconds until the next connection."""

    @property
    def ended(self) -> bool:
        return self._decoder.ended

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        headers = self._decoder.headers()
        return ApiCall("GET", self._stream.path, bytes, self._stream.params, headers=headers).request(http)

    def opened(self, response: httpx.Response) -> bool:
        """Return whether the response has a stream to read. Raises the typed error of a refusal."""
        pause = self._budget.pause(response)
        self.pause = RECONNECT_SECONDS if pause is None else pause
        return pause is None

    def feed(self, data: bytes) -> Iterator[T]:
        self._budget = RetryBudget(self._tries, idempotent=True)  # a later disconnect starts a fresh retry budget
        return self._decoder.feed(data)

    def response_ended(self) -> None:
        self._decoder.response_ended()

    def connection_lost(self, error: httpx.TransportError) -> None:
        """Raises UnreachableError if the stream cannot be resumed."""
        if not self._decoder.resumable:
            raise UnreachableError(f"The answer from {_origin(error)} broke off: {error or type(error).__name__}")
        self.pause = self._budget.pause(error) or RECONNECT_SECONDS
        self._decoder.connection_lost()


class SyncTransport(Protocol):
    def send(self, call: ApiCall[T]) -> T: ...
    def stream(self, stream: ApiStream[T]) -> Iterator[T]: ...


class AsyncTransport(Protocol):
    async def send(self, call: ApiCall[T]) -> T: ...
    def stream(self, stream: ApiStream[T]) -> AsyncIterator[T]: ...


class api_method(Generic[P, T]):
    """Turn a function that builds an `ApiCall` into a method of both clients."""

    def __init__(self, build: Callable[Concatenate[Any, P], ApiCall[T]]) -> None:
        self._build = build
        functools.update_wrapper(self, build)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: Any) -> Self: ...
    @overload
    def __get__(self, client: AsyncTransport, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: SyncTransport, owner: Any) -> Callable[P, T]: ...
    def __get__(self, client: Any, owner: Any) -> Any:
        if client is None:
            return self
        build = self._build.__get__(client)
        return functools.wraps(build)(lambda *args, **kwargs: client.send(build(*args, **kwargs)))


class api_stream(Generic[P, T]):
    """Turn a function that builds an `ApiStream` into a method that returns an iterator (async on `AsyncClient`)."""

    def __init__(self, build: Callable[Concatenate[Any, P], ApiStream[T]]) -> None:
        self._build = build
        functools.update_wrapper(self, build)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: Any) -> Self: ...
    @overload
    def __get__(self, client: AsyncTransport, owner: Any) -> Callable[P, AsyncIterator[T]]: ...
    @overload
    def __get__(self, client: SyncTransport, owner: Any) -> Callable[P, Iterator[T]]: ...
    def __get__(self, client: Any, owner: Any) -> Any:
        if client is None:
            return self
        build = self._build.__get__(client)
        return functools.wraps(build)(lambda *args, **kwargs: client.stream(build(*args, **kwargs)))
