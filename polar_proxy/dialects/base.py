"""The interface between a provider's wire format and the rest of Polar.

A dialect parses a request body into engine requests, and encodes the engine's events as the provider's own stream or
its own single response. It is pure: no I/O, no clock, no knowledge of sessions, engines or stores. The gateway feeds
the same events to the same encoder whether the client streams or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.types import (
    ChatRequest,
    ClientOptions,
    ConversationItem,
    EngineInfo,
    EngineRequest,
    Json,
    Message,
    ProviderTurn,
    SampleEvent,
    ToolCall,
    ToolDelta,
    TopLogprob,
    Usage,
)


@dataclass(slots=True)
class AssistantDraft:
    """An assistant message under construction."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.text or self.reasoning or self.tool_calls)

    @property
    def message(self) -> Message:
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        content = text if text or not self.tool_calls else None
        return Message("assistant", content, reasoning or None, tuple(self.tool_calls))


@dataclass(slots=True)
class AnswerChoice(AssistantDraft):
    """One choice of an answer, as far as its events have arrived."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_sequence: str | None = None
    provider_turn: ProviderTurn | None = None
    versions: list[tuple[int, str]] = field(default_factory=list)
    """Pairs (position of the first token, policy version), one for each run of tokens that were sampled under one
    version."""
    reasoning_tokens: int | None = None
    """Number of tokens up to the end of the reasoning. None if there is no reasoning, if the engine reports no token
    ids, or if the last reasoning came in the same event as text or tool calls."""

    def add(self, event: SampleEvent) -> None:
        if event.text:
            self.text.append(event.text)
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        if event.token_ids:
            version = event.weight_version
            if version is not None and (not self.versions or self.versions[-1][1] != version):
                self.versions.append((len(self.token_ids), version))
            self.token_ids.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
            self.tokens.extend(event.tokens)
            self.top.extend(event.top)
        if event.reasoning:
            alone = not (event.text or event.tool_calls)
            self.reasoning_tokens = len(self.token_ids) if alone and self.token_ids else None
        for delta in event.tool_calls:
            while delta.index >= len(self.tool_calls):  # parallel calls may arrive in any order
                self.tool_calls.append(ToolCall("", "", ""))
            call = self.tool_calls[delta.index]
            self.tool_calls[delta.index] = replace(
                call,
                id=call.id or delta.id or "",
                name=call.name or delta.name or "",
                arguments=call.arguments + delta.arguments,
            )
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.stop_sequence = event.stop_sequence
            self.provider_turn = event.provider_turn
        if event.versions:
            self.versions = list(event.versions)

    def as_event(self, index: int = 0) -> SampleEvent:
        """Return the whole choice as one event, without its finish reason."""
        return SampleEvent(
            index=index,
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(
                ToolDelta(number, call.id, call.name, call.arguments) for number, call in enumerate(self.tool_calls)
            ),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            tokens=tuple(self.tokens),
            top=tuple(self.top),
        )


@dataclass(slots=True)
class Answer:
    """The answer to one engine request."""

    prompt_ids: Sequence[int] | None = None
    cached_tokens: int | None = None
    choices: dict[int, AnswerChoice] = field(default_factory=dict)
    """The choices by their index."""
    usage: Usage | None = None
    """The provider's token counts, used if the engine reports no token ids that could be counted."""
    ended_at: float | None = None
    """When the answer ended, in seconds since the epoch."""
    response_id: str | None = None
    """The provider's id of a response that is passed through."""
    response_items: Json | None = None
    """See `CallRecord.response_items`."""

    def add(self, event: SampleEvent) -> None:
        if event.prompt_ids is not None:
            self.prompt_ids = event.prompt_ids
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.usage is not None:
            self.usage = event.usage
            self.cached_tokens = event.usage.cached_tokens
        self.response_id = event.response_id or self.response_id
        self.response_items = event.response_items or self.response_items
        choice = self.choices.get(event.index)
        if choice is None:
            choice = self.choices[event.index] = AnswerChoice()
        choice.add(event)

    @property
    def first(self) -> AnswerChoice:
        """Choice 0, empty if it has no event yet. Most dialects have only one choice."""
        return self.choices.get(0) or AnswerChoice()

    @property
    def in_order(self) -> list[tuple[int, AnswerChoice]]:
        return sorted(self.choices.items())

    @property
    def finished(self) -> bool:
        return bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices.values())

    @property
    def prompt_tokens(self) -> int:
        if self.prompt_ids is None and self.usage is not None:
            return self.usage.input_tokens
        return len(self.prompt_ids or ())

    @property
    def cache_write_tokens(self) -> int | None:
        return None if self.usage is None else self.usage.cache_write_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens; a choice counts as 0 if the end of its reasoning is unknown."""
        if self.usage is not None and self.usage.reasoning_tokens is not None:
            return self.usage.reasoning_tokens
        return sum(choice.reasoning_tokens or 0 for choice in self.choices.values())

    @property
    def completion_tokens(self) -> int:
        sampled = sum(len(choice.token_ids) for choice in self.choices.values())
        return self.usage.output_tokens if self.usage is not None and not sampled else sampled


@dataclass
class Encoder(ABC):
    """Encodes the answer to one HTTP request.

    A Completions body with several prompts makes several engine requests. `request_index` is the position of the engine
    request that an event belongs to.
    """

    call_id: str
    created: int
    """Start of the call in seconds since the epoch. The answer gives it as its time of creation."""
    sampled: EngineRequest | None = field(default=None, kw_only=True)
    """The first engine request, with the session's policy and all defaults applied."""

    @abstractmethod
    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        """Return the stream bytes of an event. They never contain the finish reason."""

    @abstractmethod
    def end(self, answers: list[Answer]) -> bytes:
        """Return the closing bytes of the stream: finish reasons, usage, end marker. They are sent after the call was
        committed to the store."""

    @abstractmethod
    def respond(self, answers: list[Answer]) -> bytes:
        """Return the whole response body for a client that does not stream."""

    @abstractmethod
    def fail(self, message: str, status: int) -> bytes:
        """Return the bytes that report an error inside a stream that has begun."""

    def warmed_up(self, answer: Answer) -> bytes:
        """Return the whole stream for a warm-up, a request that samples nothing and gets an empty answer."""
        raise NotImplementedError("this dialect has no warm-ups, that is, requests that sample nothing")

    def unfinished(self, status: str) -> bytes:
        """Return the response body of a background answer that is not complete yet."""
        raise NotImplementedError("this dialect cannot sample an answer in the background, after its request has ended")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One HTTP body. A Completions body with several prompts holds several `requests`; each becomes a call."""

    requests: tuple[EngineRequest, ...]
    stream: bool
    messages: tuple[tuple[bytes, ...], ...]
    """The messages of each of `requests`. Each message is the JSON bytes to store."""
    tools: bytes | None
    params: Json
    """The other fields of the body, to store."""
    encoder: Callable[..., Encoder] = field(compare=False, repr=False)
    """Makes a new encoder of the answer. Arguments: the call id, the time of creation and the keyword `sampled`."""
    generate: bool = True
    """False for a warm-up: nothing is sampled. A later request may name the warm-up's id and continue it."""
    background: bool = False
    """True if the client gets an id at once and retrieves the answer later."""
    provider_tools: tuple[str, ...] = ()
    """The tools that the request wants the provider itself to run, such as a web search. They are not in `requests`."""
    own_encoder: Callable[..., Encoder] | None = field(default=None, compare=False, repr=False)
    """Makes an encoder for Polar's own answers. Set only if `encoder` just forwards a provider's bytes, and if Polar
    could parse the request; otherwise None."""
    missing_history: bool = False
    """True if only the provider has the beginning of the conversation, so that `messages` lacks it."""
    provider_conversation: str | None = None
    """See `CallRecord.provider_conversation`."""


def provider_tools(listed: Iterable[str], body: Json, *fields: str) -> tuple[str, ...]:
    """Return the names of the tools that the provider runs: all of `listed`, and each of `fields` that is set in
    `body`."""
    return tuple(dict.fromkeys([*listed, *(name for name in fields if body.get(name))]))


@dataclass(frozen=True, slots=True)
class ReferencedCall:
    """A recorded call that a body refers to by an id, instead of repeating what it contains."""

    messages: tuple[bytes, ...]
    """The call's request messages as stored; empty if only its answer is needed."""
    answer: Message | None
    """The call's answer; None if nothing was sampled, as in a warm-up."""
    problem: str | None = None
    """Why the answer is incomplete; None if it is complete. No body may refer to a call with an incomplete answer."""


class References(NamedTuple):
    """The ids of the recorded calls that a body refers to."""

    calls: frozenset[str] = frozenset()
    """Calls whose messages and answers are needed."""
    answers: frozenset[str] = frozenset()
    """Calls of which only the answers are needed."""

    @property
    def all(self) -> frozenset[str]:
        return self.calls | self.answers


class Dialect(ABC):
    name: str
    stream_media_type = "text/event-stream"
    heartbeat: bytes | None = b": keepalive\n\n"
    """Bytes that clients of this dialect skip while they wait; None if no bytes are safe."""

    def requested_model(self, body: Json) -> str:
        """Return the requested model, from the unparsed body or the URL; an empty string if neither names one."""
        model = body.get("model")
        return model if isinstance(model, str) else ""

    @abstractmethod
    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        """Parse a body. Raises RequestError for a malformed one. Fields that are not needed are not checked.

        `previous` is the session's last parsed body of this dialect. Messages and tools that `body` repeats byte for
        byte may be taken from it, as the same objects.
        """

    def references(self, body: Json) -> References:
        """Return the ids of the recorded calls that `body` refers to. Raises RequestError."""
        return References()

    def referenced_conversation(self, body: Json) -> str | None:
        """Return the id of the stored conversation that `body` continues and adds to; None if `body` names none. Raises
        RequestError for a malformed id."""
        return None

    def write_out_references(
        self, body: Json, calls: Mapping[str, ReferencedCall], conversation: Sequence[ConversationItem] = ()
    ) -> Json:
        """Return `body` with each reference replaced by the items that it refers to.

        `calls`: the calls of `references` that this session may use. `conversation`: the items of
        `referenced_conversation`. Raises RequestError if a referenced call or item is missing.
        """
        raise NotImplementedError(f"the dialect {self.name} does not support references to recorded calls")

    def turn_items(
        self, parsed: ParsedRequest, known: int, call_id: str, answer: Answer
    ) -> tuple[ConversationItem, ...]:
        """Return the items that an answered call adds to its conversation: its new input and its answer.

        `known`: the number of items that the conversation had before. The input of `parsed` begins with these items.
        """
        raise NotImplementedError(f"the dialect {self.name} does not support conversations")

    def rebuild_body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        """Return a body made from its stored fields. Parsing this body gives the same engine request again.

        If the body held several requests (Completions with several prompts), `messages` are those of one of them. The
        returned body has no model if this dialect takes the model from the URL (Google). The body has no references to
        earlier calls, because a continued conversation is stored whole.
        """
        stored_tools = {} if tools is None else {"tools": orjson.loads(tools)}
        return {**params, **self.message_fields([orjson.loads(message) for message in messages]), **stored_tools}

    def check_length(self, request: EngineRequest, engine: EngineInfo) -> None:
        """Raise RequestError if the request asks for a longer answer than the model can give, and this dialect's
        provider refuses such requests.

        By default nothing is refused, and the answer ends at the model's limit.
        """
        return

    @abstractmethod
    def message_fields(self, stored: list[Json]) -> Json:
        """Return the fields of a body that hold these stored messages."""

    @abstractmethod
    def client_options(self, params: Json) -> ClientOptions:
        """Return the request's options that only hosted models understand. `params`: the stored fields of the request's
        body."""

    @abstractmethod
    def error_body(self, error: RequestError, request_id: str) -> bytes:
        """Return the response body of an error in the provider's own format.

        `request_id`: the id that is also in the response's headers.
        """

    def parse_count(self, body: Json) -> ChatRequest:
        """Return the request whose prompt tokens the client wants counted. Raises RequestError."""
        raise NotImplementedError(f"{self.name} has no route that counts tokens")

    def count_body(self, tokens: int) -> bytes:
        raise NotImplementedError(f"{self.name} has no route that counts tokens")
