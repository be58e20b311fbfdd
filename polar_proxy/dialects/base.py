"""The one boundary between a provider's wire format and the house.

A dialect parses a body into engine requests and writes the engine's events back as its own stream or its own single
answer. It is pure: no I/O, no clock of its own, no knowledge of sessions, engines or stores. The pipeline feeds the
same events to the same encoder whether the client streams or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, EngineRequest, Json, SampleEvent, ToolCall, TopLogprob


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a body asks for. Several `requests` (Completions with a list of prompts) are several calls."""

    requests: tuple[EngineRequest, ...]
    stream: bool
    messages: tuple[tuple[bytes, ...], ...]
    """For each of `requests` its messages, each as JSON bytes, for the store."""
    tools: bytes | None
    params: Json
    """The rest of the body, for the store."""
    options: Json = field(default_factory=dict)
    """What the encoder needs to know and the engine does not (usage in the stream, echo, ...)."""


@dataclass(slots=True)
class AnswerChoice:
    """One choice as it has been heard so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_sequence: str | None = None
    versions: list[tuple[int, str]] = field(default_factory=list)
    """(first position, policy version) of each run of tokens, where the engine tells."""


@dataclass(slots=True)
class Answer:
    """Everything an engine said to one request, gathered from its events."""

    prompt_ids: Sequence[int] | None = None
    cached_tokens: int | None = None
    choices: dict[int, AnswerChoice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    """As `SampleEvent.usage`; what is known by its ids is counted by them."""

    def add(self, event: SampleEvent) -> None:
        if event.prompt_ids is not None:
            self.prompt_ids = event.prompt_ids
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.usage is not None:
            self.usage = event.usage
        state = self.choices.get(event.index)
        if state is None:
            state = self.choices[event.index] = AnswerChoice()
        if event.text:
            state.text.append(event.text)
        if event.reasoning:
            state.reasoning.append(event.reasoning)
        if event.token_ids:
            version = event.weight_version
            if version is not None and (not state.versions or state.versions[-1][1] != version):
                state.versions.append((len(state.token_ids), version))
            state.token_ids.extend(event.token_ids)
            state.logprobs.extend(event.logprobs)
            state.tokens.extend(event.tokens)
            state.top.extend(event.top)
        for delta in event.tool_calls:
            while delta.index >= len(state.tool_calls):  # parallel calls may be heard of in any order
                state.tool_calls.append(ToolCall("", "", ""))
            call = state.tool_calls[delta.index]
            state.tool_calls[delta.index] = replace(
                call,
                id=call.id or delta.id or "",
                name=call.name or delta.name or "",
                arguments=call.arguments + delta.arguments,
            )
        if event.finish_reason is not None:
            state.finish_reason = event.finish_reason
            state.stop_sequence = event.stop_sequence
        if event.versions:
            state.versions = list(event.versions)

    @property
    def finished(self) -> bool:
        """Every choice heard of has come to its end."""
        return bool(self.choices) and all(state.finish_reason is not None for state in self.choices.values())

    @property
    def prompt_tokens(self) -> int:
        if self.prompt_ids is None and self.usage is not None:
            return self.usage[0]
        return len(self.prompt_ids or ())

    @property
    def completion_tokens(self) -> int:
        sampled = sum(len(state.token_ids) for state in self.choices.values())
        return self.usage[1] if self.usage is not None and not sampled else sampled


def assistant_message(state: AnswerChoice) -> Json:
    """A choice as an OpenAI assistant message: what is stored, whatever the dialect."""
    text = "".join(state.text)
    message: Json = {"role": "assistant", "content": text if text or not state.tool_calls else None}
    if state.reasoning:
        message["reasoning_content"] = "".join(state.reasoning)
    if state.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in state.tool_calls]
    return message


class Encoder(ABC):
    """Writes the answer to one HTTP request. `part` numbers the engine requests of that HTTP request."""

    @abstractmethod
    def feed(self, part: int, event: SampleEvent) -> bytes:
        """Stream bytes for an event; never says that a choice is finished."""

    @abstractmethod
    def end(self, answers: list[Answer]) -> bytes:
        """The closing bytes of the stream: finish reasons, usage, end mark. Sent after the commit."""

    @abstractmethod
    def respond(self, answers: list[Answer]) -> bytes:
        """The whole answer for a client that does not stream."""

    @abstractmethod
    def fail(self, message: str, status: int) -> bytes:
        """An error inside a stream that has begun."""


@dataclass(frozen=True, slots=True)
class PreviousCall:
    """A recorded call that a body continues by reference: what it asked (raw, as stored) and what was answered."""

    messages: tuple[bytes, ...]
    answer: Json
    """The answer as an OpenAI assistant message, see `assistant_message`."""


class Dialect(ABC):
    """A provider's wire format."""

    name: str
    stream_media_type = "text/event-stream"
    heartbeat: bytes | None = b": keepalive\n\n"
    """Bytes that this dialect's clients skip while they wait, or None where none are safe."""

    @abstractmethod
    def parse(self, body: Json) -> ParsedRequest:
        """Raises RequestError for what cannot be understood; tolerates what is not needed."""

    def parse_after(self, body: Json, before: ParsedRequest | None) -> ParsedRequest:
        """As `parse`. `before` is what an earlier body of this dialect said: messages and tools that `body` repeats
        byte for byte may be taken from it, as the very same objects."""
        return self.parse(body)

    def previous_call_id(self, body: Json) -> str | None:
        """Id of the recorded call that `body` continues by reference (`previous_response_id`), if any."""
        return None

    def resume(self, body: Json, earlier: PreviousCall) -> Json:
        """`body` with the conversation that it refers to written out in front of its own input."""
        raise NotImplementedError(f"{self.name} bodies refer to no earlier call")

    @abstractmethod
    def body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        """The body that `parse` took apart into these: parsed again it gives the same engine request.

        `messages` are those of one of the body's requests. What the body left to a URL or to an earlier call is not
        in it: neither to be had again nor needed, for a resumed conversation is stored whole.
        """

    @abstractmethod
    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder: ...

    @abstractmethod
    def error(self, error: RequestError) -> bytes:
        """The body of an error answer in the provider's own shape."""


class TokenCount(ABC):
    """A side route that tells how long a prompt is; answered by the engine's tokenizer, never recorded as a call."""

    @abstractmethod
    def parse(self, body: Json) -> ChatRequest:
        """Raises RequestError."""

    @abstractmethod
    def respond(self, tokens: int) -> bytes:
        """The answer's body."""

    @abstractmethod
    def error(self, error: RequestError) -> bytes:
        """The body of an error answer in the provider's own shape."""


def to_json(value: Any, param: str) -> bytes:
    """A part of a body as JSON bytes; RequestError for what cannot be written again, and so neither be kept."""
    # orjson reads deeper nesting than it writes. The lists leave room for those in which others will wrap the value.
    try:
        return orjson.dumps([[[[[[[[value]]]]]]]])[8:-8]
    except TypeError as error:
        raise RequestError(
            f"Invalid '{param}': nested too deeply, or it holds an integer of more than 64 bits or broken Unicode.",
            param=param,
            code="invalid_value",
        ) from error


def stored_tools(tools: bytes | None) -> Json:
    """The field `tools` of a body, as it was stored."""
    return {} if tools is None else {"tools": orjson.loads(tools)}


def sse(payload: Any) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"
