"""The base of the stand-ins for providers: validation by the SDKs' types, and scripted answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args, get_type_hints

from aiohttp import web
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.fakes.engine_server import FakeServer, Json

KEY = "provider-key-7f3a"
"""The only key that the stand-ins accept."""


@dataclass
class Scripted:
    """An answer of a provider's model."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Json], ...] = ()
    """(name, arguments) of each tool call."""
    finish: str = "stop"
    """stop, length, filter or stop_sequence."""
    input_tokens: int = 100
    output_tokens: int = 20
    cached: int = 30
    written: int = 0
    thinking_tokens: int = 5
    counts: bool = True
    """Whether the answer reports the numbers of its tokens."""
    cut: bool = False
    """The stream breaks off before its end."""
    error_in_stream: bool = False


@dataclass
class Refused:
    """An error, in the provider's own form."""

    status: int
    message: str = "refused"
    kind: str = "overloaded_error"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: str | None = None
    """Delay in Google's RetryInfo, such as `16.2s`."""


class Malformed(Exception):
    """A request that the SDK's types do not describe."""


def _exhaust(value: Any) -> None:
    """Validate the items of iterables too, which pydantic does only when they are read."""
    if isinstance(value, Mapping):
        for inner in value.values():
            _exhaust(inner)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes | BaseModel):
        for inner in value:
            _exhaust(inner)


def check(kind: Any, value: Json) -> None:
    """Raise Malformed unless the TypedDict `kind` describes the value and has all of its fields."""
    known, adapter = _fields_and_adapter(kind)
    if unknown := value.keys() - known:
        raise Malformed(f"unknown field {min(unknown)!r}")
    try:
        _exhaust(adapter.validate_python(value))
    except ValidationError as error:
        raise Malformed(str(error)) from error


@cache
def _fields_and_adapter(kind: Any) -> tuple[frozenset[str], TypeAdapter[Any]]:
    known = {name for one in get_args(kind) or (kind,) for name in get_type_hints(one)}
    return frozenset(known), TypeAdapter(kind)


class Provider(FakeServer):
    model = "stand-in"

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[Mapping[str, str]] = []
        self.model_of: Callable[[Json], Scripted] = lambda body: Scripted("Hello.")
        """Answers requests for which nothing is scripted."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if KEY not in self.key(request):
            return self.refusal(Refused(401, f"the key {self.key(request)} is wrong", "authentication_error"))
        if request.method == "GET":
            return self.card(request.path)
        body = await request.json()
        try:
            self.validate(request.path, body)
        except Malformed as error:
            return self.refusal(Refused(400, str(error), "invalid_request_error"))
        if self.counts(request.path):
            return web.json_response(self.count())
        self.bodies.append(body)
        answer = self.scripted.popleft() if self.scripted else self.model_of(body)
        if isinstance(answer, Refused):
            return self.refusal(answer)
        if not self.streams(request, body):
            return web.json_response(self.whole(answer, len(self.bodies)))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.stream(answer, len(self.bodies)):
            await response.write(event)
        if answer.cut and request.transport is not None:
            request.transport.abort()
        return response

    def key(self, request: web.Request) -> str:
        raise NotImplementedError

    def card(self, path: str) -> web.Response:
        raise NotImplementedError

    def validate(self, path: str, body: Json) -> None:
        raise NotImplementedError

    def counts(self, path: str) -> bool:
        return False

    def count(self) -> Json:
        raise NotImplementedError

    def streams(self, request: web.Request, body: Json) -> bool:
        return bool(body.get("stream"))

    def whole(self, answer: Scripted, number: int) -> Json:
        raise NotImplementedError

    def stream(self, answer: Scripted, number: int) -> Iterable[bytes]:
        raise NotImplementedError

    def refusal(self, error: Refused) -> web.Response:
        raise NotImplementedError
