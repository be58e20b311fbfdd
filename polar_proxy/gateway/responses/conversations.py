"""Conversations (OpenAI's Conversations API): items that are kept here, as the history of later responses.

    POST   /v1/conversations                        create, with up to 20 items
    GET    /v1/conversations/{id}                   retrieve
    POST   /v1/conversations/{id}                   replace the metadata
    DELETE /v1/conversations/{id}                   delete the conversation with its items
    GET    /v1/conversations/{id}/items             list the items; ?limit, order, after, include
    POST   /v1/conversations/{id}/items             add up to 20 items
    GET    /v1/conversations/{id}/items/{item_id}   retrieve one item
    DELETE /v1/conversations/{id}/items/{item_id}   delete one item
    POST   /v1/responses {"conversation": id}       the prompt begins with the conversation's items; the call then adds
                                                    its own input and its answer to the conversation

Promises:

* A session sees its own conversations only. A request for another session's conversation gets the same error as a
  request for an unknown id.
* These routes record no call, and deleting a conversation or an item leaves the recorded calls as they are.
* A call adds its items in the transaction that commits it. A call that failed or was broken off adds nothing.
* If calls without a model go to the engine `passthrough`, its provider creates and keeps new conversations, and the
  requests for them are passed on. Otherwise Polar keeps new conversations.
* A conversation is limited in items and bytes, and a session in conversations and bytes. Without these limits a client
  could fill the store at less cost than by calls.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson

from polar_proxy.dialects import get_dialect
from polar_proxy.dialects.fields import invalid, invalid_type, missing
from polar_proxy.dialects.openai_responses.input import is_reference
from polar_proxy.dialects.openai_responses.items import duplicate_item, input_item_id, listed_item, stored_item
from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.errors import EngineError, RequestError, StoreError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.hosted.forwarding import RequestForwarder
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.responses.listing import PageRequest, check_include, list_object, read_query
from polar_proxy.gateway.responses.stored_responses import store_unavailable
from polar_proxy.gateway.routing import SessionFinder
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.store.json_codec import clean_text
from polar_proxy.store.repositories.conversations import ConversationRow, ConversationSize, ItemPage
from polar_proxy.types import ConversationItem, Json, new_id

log = logging.getLogger(__name__)

_DIALECT = get_dialect("openai_responses")
_ROUTE = re.compile(r"(?:/v1)?/conversations(?:/([^/]+)(?:/(items)(?:/([^/]+))?)?)?")
_MOST_ADDED = 20
_MOST_BYTES = 32 << 20
"""Size limit of a conversation, in bytes. If the size limit of a request body is smaller, it also limits the
conversation."""
_MOST_CONVERSATIONS, _CONVERSATIONS_AT_SIZE_LIMIT = 1000, 4
"""Limits of a session: the number of its conversations, and the total size of all of them, as a multiple of the size
limit of one conversation."""

T = TypeVar("T")


class ConversationRoute(NamedTuple):
    conversation_id: str | None
    of_items: bool
    item_id: str | None

    @classmethod
    def of_path(cls, path: str) -> ConversationRoute | None:
        """Return the route of `path`, a path without the prefix `/s/{key}`. None for paths of other routes."""
        found = _ROUTE.fullmatch(path)
        return None if found is None else cls(clean_text(found[1]), found[2] is not None, clean_text(found[3]))

    @property
    def methods(self) -> tuple[str, ...]:
        if self.conversation_id is None:
            return ("POST",)
        if self.item_id is not None:
            return ("GET", "DELETE")
        return ("GET", "POST") if self.of_items else ("GET", "POST", "DELETE")


class NewItems(NamedTuple):
    """The body of a request that may add items."""

    fields: Json
    items: list[Json]
    """The field `items`, in which each reference to a recorded item is replaced by the item."""
    size: int
    """Size of the items as JSON, in bytes."""


ReadItems = Callable[[SessionState, asgi.Receive], Awaitable[NewItems]]
"""Reads the body of a request and checks its items.

Raises RequestError if the body is refused, and ClientDisconnected if the client disconnects first.
"""


class StoredConversations:
    """The conversations of sessions, within their limits.

    If the store does not answer, all methods except `keep_created` raise StoreError.
    """

    def __init__(self, store: Store, monitor: StoreMonitor, most_bytes: int, most_items: int) -> None:
        """`most_bytes`: size limit of a request body. `most_items`: the most items that a request may have."""
        self._stored = store.conversations
        self._monitor = monitor
        self._most_bytes = min(most_bytes, _MOST_BYTES)
        self._most_items = most_items

    async def find(self, session: SessionState, conversation_id: str, param: str | None = None) -> ConversationRow:
        """Return a conversation of this session. Raises RequestError 404 for an unknown id."""
        found = await self._run(self._stored.get, session.session_id, conversation_id)
        if found is None:
            text = f"Conversation with id {conversation_id!r:.80} not found."
            raise RequestError(text, status=404, param=param)
        return found

    async def read(self, session: SessionState, conversation_id: str, added_bytes: int) -> list[ConversationItem]:
        """Return the items of the conversation that a request continues.

        `added_bytes`: the size of the request's body, which is added to the conversation. Raises RequestError: 404 if
        the session has no such conversation, 413 if the conversation would exceed a limit.
        """
        await self.find(session, conversation_id, "conversation")
        self._check(await self._run(self._stored.size, conversation_id), 1, added_bytes)
        return await self._run(self._stored.items, conversation_id)

    async def create(
        self, session: SessionState, metadata: Json, items: Sequence[ConversationItem], added_bytes: int
    ) -> ConversationRow:
        """Store a new conversation. Raises RequestError 429 if a limit of the session would be exceeded."""
        await self._check_session(session, 1, added_bytes)
        return await self._run(self._stored.create, session.session_id, metadata, items)

    async def add(
        self, session: SessionState, conversation_id: str, items: Sequence[ConversationItem], added_bytes: int
    ) -> None:
        """Append items.

        Raises RequestError: 400 if the conversation already has an item with the same id, 413 if the conversation would
        exceed its limits, 429 if the session would exceed its limits.
        """
        await self._check_session(session, 0, added_bytes)
        self._check(await self._run(self._stored.size, conversation_id), len(items), added_bytes)
        known = await self._run(self._stored.item_ids, conversation_id)
        if twice := known & {item.item_id for item in items}:
            raise duplicate_item(min(twice), "items")
        await self._run(self._stored.add, conversation_id, items)

    async def keep_created(self, session: SessionState, request: bytes, answer: bytes) -> None:
        """Store a conversation that a provider created, with its items, so that calls in it have a complete history.

        Nothing is stored if the items cannot be read, if an item is a reference, if a limit is exceeded, or if the
        store fails.
        """
        try:
            identity, items = orjson.loads(answer)["id"], orjson.loads(request or b"{}").get("items") or []
            if not any(map(is_reference, items)):
                await self._check_session(session, 1, len(request))
                create = partial(self._stored.create, provider_id=identity)
                await self._run(create, session.session_id, {}, _new_items(items))
        except (ValueError, TypeError, KeyError, AttributeError, RequestError, StoreError) as error:
            log.warning("a conversation at the provider is not known, and calls in it are not trained: %r", error)

    async def forget_created(self, session: SessionState, conversation_id: str) -> None:
        """Delete the record of a provider's conversation, before the provider deletes it or changes its items."""
        if await self._run(partial(self._stored.get, at_provider=True), session.session_id, conversation_id):
            await self._run(self._stored.delete, conversation_id)

    async def page(self, conversation_id: str, page: PageRequest) -> ItemPage:
        """Return a page of the items. Raises RequestError if the item before the page does not exist."""
        found = await self._run(self._stored.page, conversation_id, page.limit, page.order, page.after)
        if found is None:
            raise invalid("after", "this conversation has no item with this id")
        return found

    async def item(self, conversation_id: str, item_id: str) -> ConversationItem:
        """Return one item. Raises RequestError 404 if the conversation has no item with this id."""
        found = await self._run(self._stored.item, conversation_id, item_id)
        if found is None:
            raise RequestError(f"Item with id {item_id!r:.80} not found in this conversation.", status=404)
        return found

    async def set_metadata(self, conversation_id: str, metadata: Json) -> None:
        await self._run(self._stored.set_metadata, conversation_id, metadata)

    async def delete(self, conversation_id: str) -> None:
        await self._run(self._stored.delete, conversation_id)

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        await self._run(self._stored.delete_item, conversation_id, item_id)

    async def _run(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        return await self._monitor.run(partial(work, *args))

    def _check(self, size: ConversationSize, added_items: int, added_bytes: int) -> None:
        if size.items + added_items > self._most_items or size.bytes + added_bytes > self._most_bytes:
            text = (
                f"This conversation has {size.items} items with {size.bytes >> 10} KiB. With this request it would "
                f"have more than {self._most_items} items or {self._most_bytes >> 20} MiB. Begin a new conversation."
            )
            raise RequestError(text, status=413, param="conversation")

    async def _check_session(self, session: SessionState, conversations: int, added_bytes: int) -> None:
        size = await self._run(self._stored.size_of_session, session.session_id)
        most_bytes = _CONVERSATIONS_AT_SIZE_LIMIT * self._most_bytes
        if size.conversations + conversations > _MOST_CONVERSATIONS or size.bytes + added_bytes > most_bytes:
            text = (
                f"This session has {size.conversations} conversations with {size.bytes >> 20} MiB; at most "
                f"{_MOST_CONVERSATIONS} with {most_bytes >> 20} MiB are kept. Delete some."
            )
            raise RequestError(text, status=429, param="conversation")


class ConversationRoutes:
    def __init__(
        self,
        stored: StoredConversations,
        session_finder: SessionFinder,
        read_items: ReadItems,
        forwarder: RequestForwarder,
    ) -> None:
        self._stored = stored
        self._session_finder = session_finder
        self._read_items = read_items
        self._forwarder = forwarder

    async def handle(
        self, route: ConversationRoute, path_key: str | None, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
    ) -> None:
        """Answer one request. `path_key`: the key of the prefix `/s/{key}`."""
        try:
            if scope["method"] not in route.methods:
                await asgi.send_wrong_method(send, _DIALECT, scope["method"], route.methods)
                return
            session = await self._session_finder.find(asgi.read_headers(scope), path_key, scope)
            with session.in_request():
                engine = await self._forwarder.engine_of_conversation(session, route.conversation_id)
                if engine is not None:
                    await self._forward(engine, route, session, scope, receive, send)
                    return
                answer = await self._answer(route, session, scope, receive)
            await asgi.send_json(send, 200, answer)
        except asgi.ClientDisconnected:
            return
        except StoreError as error:
            await asgi.send_error(send, store_unavailable(error), _DIALECT)
        except (RequestError, EngineError) as error:
            await asgi.send_error(send, error, _DIALECT)

    async def _forward(
        self,
        engine: PassthroughEngine,
        route: ConversationRoute,
        session: SessionState,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
    ) -> None:
        """Pass a request on to the provider that keeps the conversation.

        Raises RequestError, EngineError, StoreError and ClientDisconnected.
        """
        body, identity = await self._forwarder.read(session, receive), route.conversation_id
        if identity is not None and (scope["method"] == "DELETE" or (scope["method"] == "POST" and route.of_items)):
            await self._stored.forget_created(session, identity)

        async def keep(status: int, answer: bytes) -> None:
            if identity is None and status == 200:
                await self._stored.keep_created(session, body, answer)

        await self._forwarder.forward(engine, _DIALECT, scope, body, receive, send, keep)

    async def _answer(
        self, route: ConversationRoute, session: SessionState, scope: asgi.Scope, receive: asgi.Receive
    ) -> bytes:
        """Return the body of the response. Raises RequestError, StoreError and ClientDisconnected."""
        method, identity, query = scope["method"], route.conversation_id, read_query(scope)
        if identity is None:
            body = await self._read_items(session, receive)
            created = await self._stored.create(session, _metadata(body.fields), _new_items(body.items), body.size)
            return _conversation_object(created)
        found = await self._stored.find(session, identity)
        if route.item_id is not None:
            item = await self._stored.item(identity, route.item_id)
            if method == "GET":
                check_include(query)
                return orjson.dumps(_listed(item))
            await self._stored.delete_item(identity, route.item_id)
        elif route.of_items and method == "GET":
            page = await self._stored.page(identity, PageRequest.read(query))
            return list_object([_listed(item) for item in page.items], has_more=page.has_more)
        elif route.of_items:
            check_include(query)
            body = await self._read_items(session, receive)
            if "items" not in body.fields:
                raise missing("items")
            items = _new_items(body.items)
            await self._stored.add(session, identity, items, body.size)
            return list_object([_listed(item) for item in items], has_more=False)
        elif method == "DELETE":
            await self._stored.delete(identity)
            return orjson.dumps({"id": identity, "object": "conversation.deleted", "deleted": True})
        elif method == "POST":
            metadata = _metadata((await self._read_items(session, receive)).fields)
            await self._stored.set_metadata(identity, metadata)
            found = await self._stored.find(session, identity)
        return _conversation_object(found)


def _conversation_object(row: ConversationRow) -> bytes:
    identity, created_at = row.conversation_id, int(row.created_at)
    found = {"id": identity, "object": "conversation", "created_at": created_at, "metadata": row.metadata}
    return orjson.dumps(found)


def _listed(item: ConversationItem) -> Json:
    return listed_item(item.item if item.shown is None else item.shown, item.item_id)


def _new_items(items: Sequence[Json]) -> list[ConversationItem]:
    """Return a request's items, each with an id. Raises RequestError for too many items, and for two items with
    the same id."""
    if len(items) > _MOST_ADDED:
        raise invalid("items", f"at most {_MOST_ADDED} items can be added at a time")
    batch = new_id("call")
    added = [stored_item(item, input_item_id(batch, number)) for number, item in enumerate(items)]
    ids = [item.item_id for item in added]
    for identity in ids:
        if ids.count(identity) > 1:
            raise duplicate_item(identity, "items")
    return added


def _metadata(body: Json) -> Json:
    """Return the metadata in a body. Raises RequestError for invalid metadata."""
    metadata = body.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise invalid_type("metadata", "an object whose values are strings")
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise invalid("metadata", "at most 16 keys of 64 characters, with values of 512 characters, are stored")
    return metadata
