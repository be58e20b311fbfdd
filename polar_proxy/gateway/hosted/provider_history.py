"""The conversation history of requests that are passed on, if the provider keeps this history (OpenAI Responses).

A body may name a response that it continues (`previous_response_id`), a conversation that it adds to (`conversation`),
and items (`item_reference`), all by the provider's ids. Polar records these ids with each answer. If a later body names
such ids, its call is recorded with the messages and answers that have these ids. The body is sent unchanged.

Promises:

* A call is joined only to calls of its own session.
* A history is complete if each id was found and each answer could be read. A conversation is found only if Polar passed
  on the request that created the conversation. After a request to add or delete items (`ConversationRoutes`), the
  conversation is not found any more. A stored prompt (`prompt`) is never found, so a body that names a prompt has no
  complete history.
* If the store fails, the history is incomplete, and the request is passed on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from polar_proxy.dialects.base import Dialect, ReferencedCall
from polar_proxy.dialects.openai_responses.input import input_items, is_reference
from polar_proxy.dialects.openai_responses.items import item_id, response_id
from polar_proxy.dialects.openai_responses.references import write_out_references
from polar_proxy.errors import RequestError, StoreError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.responses.stored_calls import StoredCalls
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.store.json_codec import clean_text
from polar_proxy.types import ANSWERED, CallRecord, ConversationItem, Json

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProviderReferences:
    """The provider's ids in a body."""

    previous_response: str | None = None
    conversation: str | None = None
    items: frozenset[str] = frozenset()
    """Ids of the items that the body refers to without containing them."""
    prompt: bool = False
    """True if the body names a stored prompt, which comes before its messages."""

    @classmethod
    def of_body(cls, dialect: Dialect, body: Json) -> ProviderReferences:
        if dialect.name != "openai_responses":
            return cls()
        given = body.get("input")
        items = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
        in_full = {item["id"] for item in items if isinstance(item.get("id"), str) and not is_reference(item)}
        conversation = body.get("conversation")
        return cls(
            _text(body.get("previous_response_id")),
            _text(conversation.get("id") if isinstance(conversation, dict) else conversation),
            frozenset(item["id"] for item in items if is_reference(item)) - in_full,
            body.get("prompt") is not None,
        )

    def __bool__(self) -> bool:
        return bool(self.previous_response or self.conversation or self.items or self.prompt)


@dataclass(frozen=True, slots=True)
class ProviderHistory:
    """The recorded calls and items that a body refers to."""

    complete: bool = True
    conversation: str | None = None
    """The provider's id of the conversation that the body adds to."""
    previous_call: str | None = None
    """Polar's id of the call that the body continues."""
    items: Mapping[str, str] = field(default_factory=dict)
    """Polar's id of each item, by the provider's id of the item."""
    created: Sequence[ConversationItem] = ()
    """The items with which the conversation was created, if no call has added to it yet."""
    calls: Mapping[str, ReferencedCall] = field(default_factory=dict)

    def write_out(self, body: Json) -> Json:
        """Return `body` with the history inserted before its input. Raises RequestError for an unknown item."""
        if not (self.calls or self.created):
            return body
        own = input_items(body.get("input"))
        named: Json = {"input": [self._with_own_id(item) if is_reference(item) else item for item in own]}
        if self.previous_call is not None:
            named["previous_response_id"] = response_id(self.previous_call)
        return {**body, "input": write_out_references(named, self.calls, self.created)["input"]}

    def _with_own_id(self, reference: Json) -> Json:
        return {**reference, "id": self.items.get(reference["id"], reference["id"])}


class ProviderHistories:
    """Finds the earlier calls that a request to a hosted provider continues."""

    def __init__(self, store: Store, monitor: StoreMonitor, stored_calls: StoredCalls) -> None:
        self._store = store
        self._monitor = monitor
        self._stored_calls = stored_calls

    async def find(self, session: SessionState, references: ProviderReferences) -> ProviderHistory:
        if not references:
            return ProviderHistory()
        try:
            return await self._find(session, references)
        except (StoreError, RequestError) as error:  # the store fails, or the history is too large
            log.warning("a call of session %s is recorded without its history: %s", session.session_id, error)
            return ProviderHistory(complete=False, conversation=references.conversation)

    async def _find(self, session: SessionState, references: ProviderReferences) -> ProviderHistory:
        session_id, calls = session.session_id, self._store.calls
        previous_id, created = None, None
        if references.previous_response is not None:
            previous_id = await self._run(calls.find_response, session_id, references.previous_response)
        if references.conversation is not None:
            previous_id = await self._run(calls.latest_in_conversation, session_id, references.conversation)
            created = await self._created_items(session_id, references.conversation)
        items = await self._own_ids(session_id, references.items)
        continued = {previous_id} if previous_id else set()
        answers = {call_id for call_id, _ in items.values()} - continued
        known = await self._stored_calls.known_answers(session, answers)
        unread = (continued | answers) - known.keys()
        read = {call.call_id: call for call in await self._stored_calls.read(session, unread) if _is_read(call)}
        for call_id in read.keys() & answers:
            session.remember_referable(read[call_id])
        previous = read.get(previous_id or "")
        incomplete = (
            references.prompt
            or items.keys() != references.items
            or (references.conversation is not None and created is None)
            or (references.previous_response is not None and previous is None)
            or (previous_id is not None and (previous is None or bool(previous.sampling.get("missing_history"))))
        )
        return ProviderHistory(
            complete=not incomplete,
            conversation=references.conversation,
            previous_call=None if previous is None else previous.call_id,
            items={identity: own for identity, (_, own) in items.items()},
            created=(created or ()) if previous_id is None else (),
            calls=known | {call_id: _referenced(call) for call_id, call in read.items()},
        )

    async def _created_items(self, session_id: str, conversation: str) -> list[ConversationItem] | None:
        """Return the items with which a conversation was created; None if that is not known."""
        kept = self._store.conversations
        row = await self._run(partial(kept.get, at_provider=True), session_id, conversation)
        return None if row is None else await self._run(kept.items, conversation)

    async def _own_ids(self, session_id: str, wanted: frozenset[str]) -> dict[str, tuple[str, str]]:
        """Return (call id, Polar's item id) of each recorded item in `wanted`, by the provider's id of the item."""
        recorded = await self._run(self._store.calls.find_items, session_id, wanted) if wanted else {}
        found = {}
        for identity, (call_id, place) in recorded.items():
            prefix, _, number = place.partition("_")
            found[identity] = call_id, item_id(prefix, call_id, int(number))
        return found

    async def _run(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        return await self._monitor.run(partial(work, *args))


def _is_read(call: CallRecord) -> bool:
    """Return whether the call has a complete answer that Polar could read."""
    return call.status in ANSWERED and bool(call.choices) and call.choices[0].finish_reason != "unread"


def _referenced(call: CallRecord) -> ReferencedCall:
    answer = call.choices[0].message
    empty = not (answer.content or answer.reasoning or answer.tool_calls)  # as after a warm-up
    return ReferencedCall(call.messages, None if empty else answer)


def _text(value: Any) -> str | None:
    return clean_text(value) if isinstance(value, str) else None
