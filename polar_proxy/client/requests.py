"""Code that both clients share, without network access: typed errors, API calls as values, retries, stream decoding.

Each API method is one function from arguments to an `ApiCall` or `ApiStream`. The descriptor `api_method` turns it into
a method of `Client` and of `AsyncClient`, so every route is written once.

Format of events: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, get_args, overload
from urllib.parse import quote

import httpx
import orjson

from polar_proxy.api_models import API_PREFIX, EXPORT_REPORT, NDJSON, Event, EventName, ExportSummary
from polar_proxy.errors import ApiError, PolarError, StoreError, UsageError
from polar_proxy.types import Json

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

QueryParams = Mapping[str, str | int | float | bool | Sequence[str] | None]

TIMEOUT_SECONDS = 30.0
MAX_TRIES = 5
MAX_PAUSE_SECONDS = 10.0
RECONNECT_SECONDS = 0.5
_RETRY_STATUSES = frozenset({429, 503})
"""A request is sent again after a response with one of these statuses and the header `Retry-After`, because the server
then did nothing."""


_REPORT_START = b'{"' + EXPORT_REPORT.encode() + b'":'
_EVENT_NAMES = frozenset(get_args(EventName))


class BadRequestError(ApiError, UsageError):
    """400 or 422: the request is invalid."""


class UnauthorisedError(ApiError, UsageError):
    """401: the key is missing or unknown."""


class ForbiddenError(ApiError, UsageError):
    """403: the role of the key does not allow this."""


class NotFoundError(ApiError, UsageError):
    """404: there is no such job, group, rollout, lease or route."""


class ConflictError(ApiError, UsageError):
    """409: the current state does not allow this. `code` names the cause, such as `pause_timed_out`."""


class LeaseLostError(ConflictError, StoreError):
    """409: the lease has expired, was ended or never existed. By now, the group may be leased to another consumer."""


class UnavailableError(ApiError):
    """503: the server, or a part that it needs, cannot answer now."""


class UnreachableError(PolarError):
    """No response: the server is down or the connection broke, and retries did not help."""


_CLASSES: Mapping[int, type[ApiError]] = {
    400: BadRequestError,
    401: UnauthorisedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    422: BadRequestError,
    503: UnavailableError,
}


def error_from_response(status: int, body: bytes) -> ApiError:
    """Return the typed error of a response with status 400 or more, from Polar or from a proxy in front of it."""
    code, message, detail = f"http_{status}", "", None
    try:
        error = orjson.loads(body)["error"]
        code, message, detail = str(error["code"]), str(error["message"]), error.get("detail")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        message = f"The server answers {status}: {body[:300].decode(errors='replace')}"
    kind = LeaseLostError if code == "lease_lost" else _CLASSES.get(status, ApiError)
    return kind(message, status=status, code=code, detail=detail)


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request and the function that reads its response."""

    method: str
    path: str
    """The part of the URL's path after `/api/v1`, percent-encoded."""
    read: Callable[[bytes], T]
    params: QueryParams = field(default_factory=dict)
    """Query parameters; None omits the parameter."""
    json: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = False
    """True if the request may be sent again when no response arrives."""
    server_wait: float = 0.0
    """Seconds for which the server may delay its response on purpose. They are added to the read timeout."""

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
    params: QueryParams = field(default_factory=dict)


def quote_segment(value: str) -> str:
    """Encode an id as one path segment, whatever characters it has."""
    return quote(value, safe="")


@dataclass(slots=True)
class RetryBudget:
    """Decides after each try of a request: accept the response, raise a typed error, or try again after a pause."""

    tries: int
    idempotent: bool
    _tried: int = 0

    def pause_after_error(self, error: httpx.TransportError) -> float:
        """Return the seconds until the next try. Raises UnreachableError if the request is not to be tried again."""
        self._tried += 1
        # Without a connection the server did not see the request, so that any request may be sent again.
        unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        if self._tried < self.tries and (self.idempotent or unsent):
            return min(MAX_PAUSE_SECONDS, 0.2 * 2.0**self._tried) * random.uniform(0.5, 1.0)
        raise UnreachableError(
            f"No answer from {_origin(error)}: {error or type(error).__name__}. Is `polar serve` running there?"
        ) from error

    def pause_after_response(self, response: httpx.Response) -> float | None:
        """Return the seconds until the next try, or None if the response is a success.

        Read the body of an error response before the call. Raises the response's typed error if the request is not to
        be tried again.
        """
        self._tried += 1
        if response.status_code < 400:
            return None
        wait = response.headers.get("retry-after", "")
        if self._tried < self.tries and response.status_code in _RETRY_STATUSES and wait.isdecimal():
            return float(wait)
        raise error_from_response(response.status_code, response.content)


def _origin(error: httpx.TransportError) -> str:
    try:
        return f"{error.request.url.scheme}://{error.request.url.netloc.decode()}"
    except RuntimeError:  # the transport did not attach the request
        return "the server"


class StreamDecoder(Generic[T]):
    """Decodes one stream, across all its connections: bytes in, values out, no network."""

    def __init__(self) -> None:
        self.ended = False
        """True if the stream is complete."""
        self.resumable = True
        """True if a new connection can continue the stream where the last one broke."""
        self._rest = b""

    def headers(self) -> dict[str, str]:
        """Return the headers for the request that opens or continues the stream."""
        raise NotImplementedError

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the values that these bytes complete."""
        raise NotImplementedError

    def response_ended(self) -> None:
        """Call this when the response ended without an error."""
        raise NotImplementedError

    def connection_lost(self) -> None:
        """Drop the incomplete value, because the connection broke."""
        self._rest = b""

    def split_lines(self, data: bytes) -> list[bytes]:
        r"""Return the lines that are complete, split at `\n` only."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.removesuffix(b"\r") for line in lines]


class RowDecoder(StreamDecoder[Json]):
    """Decodes newline-delimited JSON. A stream that breaks after its first byte cannot be resumed."""

    def headers(self) -> dict[str, str]:
        return {"accept": NDJSON}

    def feed(self, data: bytes) -> Iterator[Json]:
        self.resumable = False
        for line in self.split_lines(data):
            if line:
                yield orjson.loads(line)

    def response_ended(self) -> None:
        self.ended = True


class ExportDecoder(StreamDecoder[bytes | ExportSummary]):
    """Decodes an export: yields each row as bytes with its line break, and at the end the counts (ExportSummary).

    If the response ends without the counts, the export is incomplete, and `response_ended` raises UnreachableError.
    """

    def headers(self) -> dict[str, str]:
        return {"accept": NDJSON}

    def feed(self, data: bytes) -> Iterator[bytes | ExportSummary]:
        self.resumable = False
        for line in self.split_lines(data):
            if line.startswith(_REPORT_START):
                self.ended = True
                yield ExportSummary.model_validate(orjson.loads(line)[EXPORT_REPORT])
            else:
                yield line + b"\n"

    def response_ended(self) -> None:
        if not self.ended:
            raise UnreachableError("The export broke off before its end. See the server's log, and try again.")


class EventDecoder(StreamDecoder[Event]):
    """Decodes server-sent events. A new connection continues after the last complete event."""

    def __init__(self, last_id: str | None = None) -> None:
        super().__init__()
        self.last_id = last_id
        self._lines: list[bytes] = []

    def headers(self) -> dict[str, str]:
        position = {} if self.last_id is None else {"last-event-id": self.last_id}
        return {"accept": "text/event-stream", "cache-control": "no-store", **position}

    def feed(self, data: bytes) -> Iterator[Event]:
        for line in self.split_lines(data):
            self._lines.append(line)
            if not line and (event := self._complete_event()) is not None:
                yield event

    def response_ended(self) -> None:
        """Drop the incomplete event. If the stream has not ended, the client continues it over a new connection."""
        self.connection_lost()

    def connection_lost(self) -> None:
        super().connection_lost()
        self._lines = []

    def _complete_event(self) -> Event | None:
        """Return the event that the lines so far describe; None for a comment, or an event of a kind that this client
        does not know."""
        fields: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for line in self._lines:
            name, _, value = line.partition(b":")
            fields[name].append(value.removeprefix(b" "))
        self._lines = []
        self.last_id = b"".join(fields[b"id"][-1:]).decode() or self.last_id
        kind = b"".join(fields[b"event"][-1:]).decode()
        data = b"\n".join(fields[b"data"])
        if kind not in _EVENT_NAMES or not data:
            return None
        self.ended = kind == "end"
        return Event.model_validate({"id": self.last_id or "", "event": kind, "data": orjson.loads(data)})


class StreamReader(Generic[T]):
    """Reads one stream across all its connections: decodes it, and decides when to connect again."""

    def __init__(self, stream: ApiStream[T], tries: int) -> None:
        self._stream = stream
        self.decoder = stream.decoder()
        self._tries = tries
        self._budget = RetryBudget(tries, idempotent=True)
        self.pause = 0.0
        """Seconds until the next connection."""

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        headers = self.decoder.headers()
        return ApiCall("GET", self._stream.path, bytes, self._stream.params, headers=headers).request(http)

    def opened(self, response: httpx.Response) -> bool:
        """Return True to read the response, or False to connect again after `pause`. Raises the typed error if the
        server refuses."""
        pause = self._budget.pause_after_response(response)
        self.pause = RECONNECT_SECONDS if pause is None else pause
        return pause is None

    def feed(self, data: bytes) -> Iterator[T]:
        self._budget = RetryBudget(self._tries, idempotent=True)  # a later disconnect starts a fresh retry budget
        return self.decoder.feed(data)

    def connection_lost(self, error: httpx.TransportError) -> None:
        """Prepare the next connection. Raises UnreachableError if the stream cannot be resumed."""
        if not self.decoder.resumable:
            problem = f"The answer from {_origin(error)} broke off: {error or type(error).__name__}"
            raise UnreachableError(f"{problem}. The answer cannot be continued. Send the request again.")
        self.pause = self._budget.pause_after_error(error)
        self.decoder.connection_lost()


class SyncTransport(Protocol):
    def send(self, call: ApiCall[T]) -> T: ...
    def stream(self, stream: ApiStream[T]) -> Iterator[T]: ...


class AsyncTransport(Protocol):
    async def send(self, call: ApiCall[T]) -> T: ...
    def stream(self, stream: ApiStream[T]) -> AsyncIterator[T]: ...


class api_method(Generic[P, R]):
    """Turn a function that builds an `ApiCall` or an `ApiStream` into a method of both clients.

    On `Client` the method returns the response, or an iterator over the stream. On `AsyncClient` it returns a
    coroutine, or an async iterator.
    """

    def __init__(self, build: Callable[Concatenate[Any, P], R]) -> None:
        self._build = build
        functools.update_wrapper(self, build)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: Any) -> Self: ...
    @overload
    def __get__(
        self: api_method[P, ApiCall[T]], client: AsyncTransport, owner: Any
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self: api_method[P, ApiCall[T]], client: SyncTransport, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(
        self: api_method[P, ApiStream[T]], client: AsyncTransport, owner: Any
    ) -> Callable[P, AsyncIterator[T]]: ...
    @overload
    def __get__(self: api_method[P, ApiStream[T]], client: SyncTransport, owner: Any) -> Callable[P, Iterator[T]]: ...
    def __get__(self, client: Any, owner: Any) -> Any:
        if client is None:
            return self
        build = self._build.__get__(client)

        @functools.wraps(build)
        def method(*args: Any, **kwargs: Any) -> Any:
            request = build(*args, **kwargs)
            return client.stream(request) if isinstance(request, ApiStream) else client.send(request)

        return method
