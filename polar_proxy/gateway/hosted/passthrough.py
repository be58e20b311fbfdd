"""Calls that are passed on to their provider: request and reply are forwarded unchanged.

The body is parsed for the record only. A body that Polar cannot parse is passed on too, and recorded with its messages
as JSON texts.

If a body refers to history that the provider keeps, the call is recorded with this history (`provider_history`). If
the history is not complete, the record says so (`missing_history`), and the call is left out of training data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects.base import Answer, Dialect, Encoder, ParsedRequest
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.engines.passthrough.engine import OPENAI_HOST, PROVIDER_HOSTS
from polar_proxy.errors import EngineError, RequestError, UsageError
from polar_proxy.gateway.answering import Reply
from polar_proxy.gateway.hosted.provider_history import ProviderHistory, ProviderReferences
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.recording import RequestContext
from polar_proxy.provider_calls import ProviderPiece, ProviderRequest
from polar_proxy.sessions.budget import BudgetSpentError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent

_USER: Json = {"role": "user", "content": "-"}
_MESSAGES: dict[str, tuple[str, Any]] = {
    "anthropic_messages": ("messages", [_USER]),
    "google_generate_content": ("contents", [{"role": "user", "parts": [{"text": "-"}]}]),
    "openai_chat": ("messages", [_USER]),
    "openai_completions": ("prompt", "-"),
    "openai_responses": ("input", "-"),
}
"""For each dialect: the field that holds the messages, and a stand-in for messages that Polar cannot parse."""
_TOOL_FIELDS = ("tools", "mcp_servers", "web_search_options")
"""Fields of a body that may contain provider-side tools."""


def check_passthrough(settings: GatewaySettings) -> None:
    """Raise UsageError for settings that change calls, because calls are passed on byte for byte."""
    if settings.hooks is not None:
        raise UsageError(
            "Hooks cannot change calls that the engine 'passthrough' forwards byte for byte. Leave out gateway.hooks "
            "or that engine."
        )
    if settings.provider_tools == "remove":
        raise UsageError(
            "The engine 'passthrough' forwards calls byte for byte, so gateway.provider_tools = 'remove' cannot remove "
            "tools from them. Set it to 'refuse' or 'allow', or leave out that engine."
        )


def provider_request(
    scope: asgi.Scope, dialect: Dialect, body: bytes = b"", tools: bytes | None = None
) -> ProviderRequest:
    """Turn a request that the gateway received into the request to the provider."""
    state = scope.get("state", {})
    host, target = state.get(asgi.PROVIDER_PATH) or (PROVIDER_HOSTS.get(dialect.name, OPENAI_HOST), None)
    if target is None:
        path = asgi.path_without_key(scope)  # encoded: a decoded path may hold spaces and line breaks
        query = scope["query_string"].decode("latin-1")
        target = (path if path.startswith("/v1") else f"/v1{path}") + (f"?{query}" if query else "")
    headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
    read_items = partial(_read_items, dialect, tools)
    return ProviderRequest(host, target, headers, body, dialect.name, read_items, state.get(asgi.PROVIDER_EXCHANGE))


def _read_items(dialect: Dialect, tools: bytes | None, items: list[Json]) -> Sequence[Message]:
    """Return the messages of a response's output items. Raises RequestError for items that Polar does not know."""
    offered = orjson.loads(tools) if tools else []
    return dialect.parse_count({"model": "", "input": items, "tools": offered}).messages


def parse_for_record(
    dialect: Dialect, body: Json, previous: ParsedRequest | None, history: ProviderHistory
) -> ParsedRequest:
    """Return the parsed body of a request that is passed on. The result has exactly one engine request, and its encoder
    returns the provider's own bytes.

    `history`: the recorded calls that the body refers to by the provider's ids.
    """
    own_encoder = None
    try:
        parsed = dialect.parse(history.write_out(body), previous)
        own_encoder = parsed.encoder
    except RequestError:
        parsed = _unread(dialect, body)
    refers = bool(ProviderReferences.of_body(dialect, body))
    encoder: Callable[..., Encoder] = partial(PassthroughEncoder, inner=parsed.encoder, held=not parsed.stream)
    messages = tuple(message for part in parsed.messages for message in part)
    return replace(
        parsed,
        requests=parsed.requests[:1],
        messages=(messages,),
        encoder=encoder,
        generate=True,
        background=False,
        own_encoder=own_encoder,
        missing_history=refers and not (history.complete and own_encoder is not None),
        provider_conversation=history.conversation,
    )


def answered_by_polar(request: RequestContext) -> RequestContext:
    """Turn a request that would be passed on to its provider into a request that Polar answers itself.

    Raises BudgetSpentError if Polar could not parse the body, because Polar then cannot answer in the request's
    dialect.
    """
    own_encoder = request.parsed.own_encoder
    if own_encoder is None:
        raise BudgetSpentError(request.session.budget.description)
    return replace(request, raw=None, parsed=replace(request.parsed, encoder=own_encoder))


def _unread(dialect: Dialect, body: Json) -> ParsedRequest:
    """Return the record of a body that Polar cannot parse. Each message is recorded as its JSON text.
    Raises RequestError if the body cannot be written as JSON again."""
    name, readable = _MESSAGES[dialect.name]
    given = body.get(name)
    items = given if isinstance(given, list) else [] if given is None else [given]
    stored = tuple(to_json(item, f"{name}[{i}]") for i, item in enumerate(items))
    roles = [str(item.get("role") or "user") if isinstance(item, dict) else "user" for item in items]
    texts = tuple(Message(role, text.decode()) for role, text in zip(roles, stored, strict=True))
    model, tools = body.get("model"), body.get("tools")
    return ParsedRequest(
        requests=(ChatRequest(model if isinstance(model, str) else getattr(dialect, "model", ""), texts),),
        stream=bool(body.get("stream") or getattr(dialect, "stream", False)),
        messages=(stored,),
        tools=to_json(tools, "tools") if tools else None,
        params=storable_params(body, name, "tools"),
        encoder=_NoEncoder,
        provider_tools=_provider_tools(dialect, {**body, name: readable}),
    )


def _provider_tools(dialect: Dialect, body: Json) -> tuple[str, ...]:
    """Return the names of a body's provider-side tools. If Polar cannot parse them, name the fields that hold them.

    Polar must be able to parse the messages of `body`.
    """
    try:
        return dialect.parse(body).provider_tools
    except RequestError:
        return tuple(f"{name}, which Polar cannot read" for name in _TOOL_FIELDS if body.get(name))


@dataclass
class PassthroughEncoder(Encoder):
    """Encodes the answer as the provider's own bytes.

    Until the call is recorded, the last piece of a stream is held back. An answer that is not streamed is held back as
    a whole.
    """

    inner: Callable[..., Encoder] = field(kw_only=True)
    """Factory of the dialect's own encoder. That encoder reports an error if the connection to the provider breaks."""
    held: bool = field(kw_only=True)
    """True while bytes are held back: all bytes of an answer that is not streamed, or the last piece of a stream."""
    _rest: list[bytes] = field(default_factory=list, init=False)
    _ended: bool = field(default=False, init=False)

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        if event.raw is None:
            return b""
        self._ended = self._ended or event.raw.last
        self.held = self.held or event.raw.last
        if not self.held:
            return event.raw.data
        self._rest.append(event.raw.data)
        return b""

    def end(self, answers: list[Answer]) -> bytes:
        return b"".join(self._rest)

    def respond(self, answers: list[Answer]) -> bytes:
        return b"".join(self._rest)

    def fail(self, message: str, status: int) -> bytes:
        rest = b"".join(self._rest)
        if self._ended:
            return rest  # the provider itself has reported the error
        return rest + self.inner(self.call_id, self.created, sampled=self.sampled).fail(message, status)


@dataclass
class _NoEncoder(Encoder):
    """Replaces the encoder if Polar cannot parse the request's body. A stream that breaks then ends without an error
    event."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        return b""

    def end(self, answers: list[Answer]) -> bytes:
        return b""

    def respond(self, answers: list[Answer]) -> bytes:
        return b""

    def fail(self, message: str, status: int) -> bytes:
        return b""


class PassthroughReply(Reply):
    """A reply with the provider's status and headers. No heartbeats are added to the provider's bytes."""

    _head: ProviderPiece | None = None
    """The first piece of the provider's response; None until its headers have arrived."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self._stream:
            self._timer.cancel()

    async def write(self, request_index: int, event: SampleEvent) -> None:
        if event.raw is not None and event.raw.headers:
            self._head = event.raw
        if self._stream:
            await super().write(request_index, event)
        else:
            self._encoder.feed(request_index, event)

    async def finish(self, answers: list[Answer]) -> None:
        await self._finish_stream(self._encoder.end(answers))

    async def fail(self, error: RequestError | EngineError) -> None:
        if self._head is not None and self._stream and not self._started:
            await self._finish_stream(self._encoder.fail(str(error), error.status))
        else:
            await super().fail(error)

    async def _send_headers(self) -> None:
        assert self._head is not None
        self._started = True
        headers = [*self._head.headers, *self._polar_headers]
        await self._send({"type": "http.response.start", "status": self._head.status, "headers": headers})
