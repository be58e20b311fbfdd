"""Reading of model requests: receive the body, parse its JSON, choose the engine, find the calls that the body refers
to, and parse the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from polar_proxy.config import GatewayLimits
from polar_proxy.dialects import get_dialect
from polar_proxy.dialects.base import Dialect, ParsedRequest, ReferencedCall
from polar_proxy.dialects.fields import invalid_type
from polar_proxy.dialects.openai_responses.input import input_items
from polar_proxy.errors import RequestError, StoreError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.hosted.passthrough import parse_for_record
from polar_proxy.gateway.hosted.provider_history import ProviderHistories, ProviderReferences
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.limits import BodyReservation
from polar_proxy.gateway.recording import ContinuedConversation
from polar_proxy.gateway.responses.conversations import NewItems, StoredConversations
from polar_proxy.gateway.responses.stored_calls import StoredCalls
from polar_proxy.gateway.routing import EngineChoice, EngineRouter
from polar_proxy.offload import OffloadThread
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import json_codec
from polar_proxy.types import ChatRequest, ConversationItem, Json

_LARGE_BODY, _MANY_MESSAGES = 1 << 20, 500
"""Most bytes (`Body.size`) and most messages of a request that is not `large`. A large request is parsed and hashed in
a thread, to keep the event loop free. Other work that grows with its size runs there, too."""
_MANY_REFERENCES = 50
"""A request that refers to more recorded calls than this is `large`."""
_TAKES_TURNS = 1 << 16
"""Size in bytes above which a body waits in its session's queue of large bodies (see `_turn`). Smaller bodies do not
wait for large bodies."""
_BYTES_OF_VALUE = 64
"""Memory in bytes of a parsed JSON value, besides its text."""
_MESSAGE_LISTS = ("messages", "input", "contents", "prompt")
"""Fields of a request that hold messages or prompts, in any dialect. A list of numbers is one prompt of token ids."""
_TOOL_LISTS = ("tools", "functions")


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request."""

    fields: Json
    size: int
    """Approximate memory of the body in bytes."""
    large: bool
    """True if the request is large (see `_LARGE_BODY`)."""
    conversation: ContinuedConversation | None = None
    refers: bool = False
    """See `RequestContext`."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A model request that was read and parsed."""

    parsed: ParsedRequest
    engine: EngineChoice
    large: bool
    """See `Body`."""
    conversation: ContinuedConversation | None = None
    raw: bytes | None = None
    """The unparsed body, if the engine passes it on to a provider."""
    refers: bool = False
    """See `RequestContext`."""


class ReadCount(NamedTuple):
    """A request for the number of tokens of a prompt."""

    engine: EngineChoice
    request: ChatRequest | bytes
    """The parsed request, or the unparsed body if the engine passes it on to a provider."""


class RequestReader:
    def __init__(
        self,
        limits: GatewayLimits,
        router: EngineRouter,
        thread: OffloadThread,
        stored_calls: StoredCalls,
        conversations: StoredConversations,
        histories: ProviderHistories,
        monitor: StoreMonitor,
    ) -> None:
        """`thread` parses large requests."""
        self._limits = limits
        self._most_items = dict.fromkeys(_MESSAGE_LISTS, limits.messages) | dict.fromkeys(_TOOL_LISTS, limits.tools)
        """Maximum number of items of each list in a body."""
        self._router = router
        self._thread = thread
        self._stored_calls = stored_calls
        self._conversations = conversations
        self._histories = histories
        self._monitor = monitor

    async def read(
        self,
        dialect: Dialect,
        receive: asgi.Receive,
        session: SessionState,
        reservation: BodyReservation,
        resumable: Collection[str],
    ) -> ReadRequest:
        """Read and parse the body of a model request, and choose its engine."""
        parts = await asgi.read_body(receive, reservation.take)
        async with _turn(session, reservation):
            raw = await self._join(parts, reservation.size)
            body = await self._read_json(raw, reservation)
            engine = self._router.choose(session, dialect.requested_model(body.fields))
            previous = session.last_parsed(dialect.name)
            if engine.passthrough is not None:
                references = await self._thread.run(body.large, ProviderReferences.of_body, dialect, body.fields)
                history = await self._histories.find(session, references)
                large = body.large or _are_large(history.calls.values())
                parsed = await self._thread.run(large, parse_for_record, dialect, body.fields, previous, history)
                return ReadRequest(parsed, engine, body.large, raw=raw, refers=bool(references.items))
            del parts, raw  # the text of a large body takes no memory while the body is parsed
            body = await self._write_out_references(dialect, body, session, resumable)
            parsed = await self._thread.run(body.large, dialect.parse, body.fields, previous)
            return ReadRequest(parsed, engine, body.large, body.conversation, refers=body.refers)

    async def read_count(
        self, dialect: Dialect, receive: asgi.Receive, session: SessionState, reservation: BodyReservation
    ) -> ReadCount:
        """Read the body of a token-count request. The body is parsed unless the engine passes it on to a provider."""
        parts = await asgi.read_body(receive, reservation.take)
        async with _turn(session, reservation):
            raw = await self._join(parts, reservation.size)
            body = await self._read_json(raw, reservation)
            engine = self._router.choose(session, dialect.requested_model(body.fields))
            if engine.passthrough is not None:
                return ReadCount(engine, raw)
            body = await self._write_out_references(dialect, body, session)
        return ReadCount(engine, await self._thread.run(body.large, dialect.parse_count, body.fields))

    async def read_items(self, receive: asgi.Receive, session: SessionState, reservation: BodyReservation) -> NewItems:
        """Read and check the body of a request that may add items to a conversation."""
        dialect = get_dialect("openai_responses")
        parts = await asgi.read_body(receive, reservation.take)
        async with _turn(session, reservation):
            body = await self._read_json(await self._join(parts, reservation.size), reservation)
            given = body.fields.get("items")
            if not isinstance(given, list | None):
                raise invalid_type("items", "an array of items")
            added = replace(body, fields={"model": "", "input": given})
            added = await self._write_out_references(dialect, added, session)
            items = input_items(added.fields["input"])
            if items:
                await self._thread.run(added.large, dialect.parse_count, added.fields)
            size = await self._thread.run(added.large, lambda: len(json_codec.dumps(items)))
            return NewItems(body.fields, items, size)

    async def _join(self, parts: list[bytes], size: int) -> bytes:
        return await self._thread.run(size > _LARGE_BODY, b"".join, parts)

    async def _read_json(self, raw: bytes, reservation: BodyReservation) -> Body:
        """Return the JSON object in a body.

        Raises RequestError for a body with too many JSON values, messages or tools.
        """
        limits = self._limits
        large = reservation.size > _LARGE_BODY
        values = await self._thread.run(large, asgi.count_values, raw, limits.body_values)
        if values > limits.body_values:
            raise RequestError(f"The request body has more than {limits.body_values} JSON values.", status=413)
        reservation.take(values * _BYTES_OF_VALUE)
        large = reservation.size > _LARGE_BODY
        body = await self._thread.run(large, asgi.parse_json_object, raw)
        for name, most in self._most_items.items():
            items = body.get(name)
            if isinstance(items, list) and len(items) > most and not isinstance(items[0], int):
                message = f"'{name}' has {len(items)} items; at most {most} are served."
                raise RequestError(message, status=413, param=name)
            large = large or (isinstance(items, list) and len(items) > _MANY_MESSAGES)
        return Body(body, reservation.size, large)

    async def _write_out_references(
        self, dialect: Dialect, body: Body, session: SessionState, resumable: Collection[str] = ()
    ) -> Body:
        """Replace a body's references by the recorded items. If the body names a conversation, add its items."""
        conversation_id = dialect.referenced_conversation(body.fields)
        references = await self._thread.run(body.large, dialect.references, body.fields)
        if not references.all and conversation_id is None:
            return body
        items: Sequence[ConversationItem] = ()
        try:
            calls = await self._stored_calls.find_referenced(session, dialect, references, resumable)
            if conversation_id is not None:
                items = await self._conversations.read(session, conversation_id, body.size)
        except StoreError as error:
            raise self._monitor.refusal() from error
        # A short body may refer to megabytes.
        large = body.large or _are_large(calls.values()) or len(items) > _MANY_MESSAGES
        fields = await self._thread.run(large, dialect.write_out_references, body.fields, calls, items)
        conversation = None if conversation_id is None else ContinuedConversation(conversation_id, len(items))
        refers = bool(references.answers)
        return replace(body, fields=fields, large=large, conversation=conversation, refers=refers)


@contextlib.asynccontextmanager
async def _turn(session: SessionState, reservation: BodyReservation) -> AsyncIterator[None]:
    """Wait until it is this body's turn to be parsed, in one of the two queues of its session.

    While it waits, the body may be refused to make room for others. From its turn on, it may not.

    Bodies of more than `_TAKES_TURNS` bytes have their own queue, so that smaller bodies do not wait for them. From
    each queue, at most one body is parsed per turn of the event loop. Before a body of more than `_TAKES_TURNS` bytes
    is parsed, other requests are served.
    """
    large = reservation.size > _TAKES_TURNS
    lock = session.parsing_large if large else session.parsing
    await lock.acquire()
    try:
        if large:
            await asyncio.sleep(0)
        reservation.refusable = False
        yield
    finally:
        asyncio.get_running_loop().call_soon(lock.release)


def _are_large(calls: Collection[ReferencedCall]) -> bool:
    """Return whether a request that refers to these calls is large."""
    return len(calls) > _MANY_REFERENCES or any(
        len(call.messages) > _MANY_MESSAGES or sum(map(len, call.messages)) > _LARGE_BODY for call in calls
    )
