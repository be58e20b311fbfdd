"""What both clients share: a route as a value, when it is tried again, and how an answer is read. No network here.

A route is one function from arguments to a `ApiCall`; the descriptors make it a method that returns the answer of
`Client`, and one that is awaited of `AsyncClient`. So every route is written once.
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
HEARTBEAT_SECONDS = 15.0
"""How often the server says something on a stream that has nothing to say."""
_RETRY_STATUSES = frozenset({429, 503})
"""With `Retry-After`, which says that nothing was done."""


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request, and how its answer is read."""

    method: str
    path: str
    """Below `/api/v1`, quoted."""
    read: Callable[[bytes], T]
    params: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """None: not said."""
    json: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    """Said twice it is as said once, so it is said again where no answer came."""
    waits: float = 0.0
    """Seconds for which the server may keep the answer back on purpose."""

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        kind = {} if self.json is None else {"content-type": "application/json"}
        return http.build_request(
            self.method,
            API_PREFIX + self.path,
            params={name: value for name, value in self.params.items() if value is not None},
            headers={**kind, **self.headers},
            content=None if self.json is None else orjson.dumps(self.json),
            timeout=httpx.Timeout(TIMEOUT_SECONDS, read=TIMEOUT_SECONDS + self.waits),
        )


@dataclass(frozen=True, slots=True)
class ApiStream(Generic[T]):
    """A request whose answer comes in pieces."""

    path: str
    decoder: Callable[[], StreamDecoder[T]]
    params: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


def quote_segment(value: str) -> str:
    """An id as one part of a path, whatever is in it."""
    return quote(value, safe="")


@dataclass(slots=True)
class RetryBudget:
    """What becomes of one reply: an answer, a typed error, or another try after a pause."""

    tries: int
    repeatable: bool
    _tried: int = 0

    def pause(self, reply: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds until the next try; None: this is the answer. The response must have been read where it is an error.

        Raises the typed error that it stands for."""
        self._tried += 1
        if isinstance(reply, httpx.TransportError):
            # Nothing was said where there was no connection, so it may be said again whatever it was.
            unsaid = isinstance(reply, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
            if self._tried < self.tries and (self.repeatable or unsaid):
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
    except RuntimeError:  # raised by a transport that does not say for which request
        return "the server"


class StreamReader(Generic[T]):
    """One stream over all the connections that it takes: what the clients do between two of them."""

    def __init__(self, stream: ApiStream[T], tries: int) -> None:
        self._stream = stream
        self._decoder = stream.decoder()
        self._limit = tries
        self._tries = RetryBudget(tries, repeatable=True)
        self.pause = 0.0
        """Seconds until the next connection."""

    @property
    def ended(self) -> bool:
        return self._decoder.ended

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        headers = self._decoder.headers()
        return ApiCall("GET", self._stream.path, bytes, self._stream.params, headers=headers).request(http)

    def opened(self, response: httpx.Response) -> bool:
        """Whether there is something to read. Raises the typed error of a refusal."""
        pause = self._tries.pause(response)
        self.pause = RECONNECT_SECONDS if pause is None else pause
        return pause is None

    def feed(self, data: bytes) -> Iterator[T]:
        self._tries = RetryBudget(self._limit, repeatable=True)  # a connection that breaks later is a new misfortune
        return self._decoder.feed(data)

    def closed(self) -> None:
        self._decoder.closed()

    def lost(self, error: httpx.TransportError) -> None:
        """Raises UnreachableError where the stream cannot go on."""
        if not self._decoder.resumable:
            raise UnreachableError(f"The answer from {_origin(error)} broke off: {error or type(error).__name__}")
        self.pause = self._tries.pause(error) or RECONNECT_SECONDS
        self._decoder.broken()


class SyncTransport(Protocol):
    def send(self, call: ApiCall[T]) -> T: ...
    def stream(self, stream: ApiStream[T]) -> Iterator[T]: ...


class AsyncTransport(Protocol):
    async def send(self, call: ApiCall[T]) -> T: ...
    def stream(self, stream: ApiStream[T]) -> AsyncIterator[T]: ...


class api_method(Generic[P, T]):
    """A method of both clients, from the function that makes its `ApiCall`."""

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
    """As `api_method`, for answers that come in pieces: an iterator, of `AsyncClient` an asynchronous one."""

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
