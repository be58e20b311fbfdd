"""The interface between a provider's wire format and the rest of Polar.

A dialect parses a request body into engine requests, and encodes the engine's events as the provider's own stream or
its own single response. It is pure: no I/O, no clock, no knowledge of sessions, engines or stores. The gateway feeds
the same events to the same encoder whether the client streams or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

from polar_proxy.dialects.answer import Answer
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, EngineRequest, Json, Message, SampleEvent


@dataclass
class Encoder(ABC):
    """Encodes the answer to one HTTP request. `request_index` numbers the engine requests of that HTTP request."""

    call_id: str
    created: int
    """In seconds since the epoch."""

    @abstractmethod
    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        """Return the stream bytes of an event. They never contain the finish reason."""

    @abstractmethod
    def end(self, answers: list[Answer]) -> bytes:
        """Return the closing bytes of the stream: finish reasons, usage, end marker. Sent after the commit."""

    @abstractmethod
    def respond(self, answers: list[Answer]) -> bytes:
        """Return the whole response body for a client that does not stream."""

    @abstractmethod
    def fail(self, message: str, status: int) -> bytes:
        """Return the bytes that report an error inside a stream that has begun."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One HTTP body. A Completions body with several prompts holds several `requests`; each becomes a call."""

    requests: tuple[EngineRequest, ...]
    stream: bool
    messages: tuple[tuple[bytes, ...], ...]
    """The messages of each of `requests`, every one as the JSON bytes to store."""
    tools: bytes | None
    params: Json
    """The other fields of the body, to store."""
    encoder: Callable[[str, int], Encoder] = field(compare=False, repr=False)
    """Returns a new encoder of the answer, for a call id and a time of creation."""


@dataclass(frozen=True, slots=True)
class PreviousCall:
    """A recorded call that a body continues by reference (`previous_response_id`)."""

    messages: tuple[bytes, ...]
    """The call's request messages as stored."""
    answer: Message


class Dialect(ABC):
    """A provider's wire format."""

    name: str
    stream_media_type = "text/event-stream"
    heartbeat: bytes | None = b": keepalive\n\n"
    """Bytes that clients of this dialect skip while they wait; None if no bytes are safe."""

    @abstractmethod
    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        """Parse a body. Raises RequestError for a malformed one; fields that are not needed are tolerated.

        `previous` is the session's last parsed body of this dialect. Messages and tools that `body` repeats byte for
        byte may be taken from it, as the same objects.
        """

    def previous_call_id(self, body: Json) -> str | None:
        """Return the id of the recorded call that `body` continues by reference, if there is one."""
        return None

    def prepend_previous(self, body: Json, previous: PreviousCall) -> Json:
        """Return `body` with the conversation that it refers to written out before its own input."""
        raise NotImplementedError(f"{self.name} bodies do not refer to recorded calls")

    def rebuild_body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        """Return a body from its stored fields. Parsed again, it gives the same engine request.

        `messages` belong to one of the body's requests. A model named by the URL, or a reference to an earlier call,
        is not restored: a continued conversation is stored whole.
        """
        stored_tools = {} if tools is None else {"tools": orjson.loads(tools)}
        return {**params, **self.message_fields([orjson.loads(message) for message in messages]), **stored_tools}

    @abstractmethod
    def message_fields(self, stored: list[Json]) -> Json:
        """Return the fields of a body that hold these stored messages."""

    @abstractmethod
    def error_body(self, error: RequestError) -> bytes:
        """Return the response body of an error in the provider's own shape."""

    def parse_count(self, body: Json) -> ChatRequest:
        """Parse the body of a route that counts the tokens of a prompt. Raises RequestError.

        The engine's tokenizer answers it; it is not recorded as a call.
        """
        raise NotImplementedError(f"{self.name} has no route that counts tokens")

    def count_body(self, tokens: int) -> bytes:
        """Return the response body of the route that counts tokens."""
        raise NotImplementedError(f"{self.name} has no route that counts tokens")
