"""Routes of stored responses (OpenAI Responses): retrieve, list the input, delete, cancel.

    GET    /v1/responses/{id}               the response, from its record; ?stream=true: its events
    GET    /v1/responses/{id}/input_items   its input; ?limit, order, after, include
    DELETE /v1/responses/{id}
    POST   /v1/responses/{id}/cancel        only for a response in the background

Promises:

* A session sees its own responses only. The error for a response of another session is the same as for an unknown id,
  so that a session cannot learn whether the response exists. The same error is sent for a deleted response, for a
  response with `store: false`, and for a failed or unfinished response that was not requested with `background: true`.
* If the engine `passthrough` made a response, requests for this response are passed on to its provider.
* These routes record no call. A deleted response can neither be retrieved nor referred to; its call stays recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import orjson
from cachetools import LRUCache

from polar_proxy.dialects import get_dialect
from polar_proxy.dialects.base import Dialect, ReferencedCall, References
from polar_proxy.dialects.fields import invalid
from polar_proxy.dialects.openai_responses.items import call_id_of_response, response_id
from polar_proxy.dialects.openai_responses.stored import listed_input, response_events, response_object
from polar_proxy.errors import EngineError, RequestError, StoreError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.hosted.forwarding import RequestForwarder
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.reply import send_error, send_stream, send_wrong_method
from polar_proxy.gateway.responses.background import BackgroundCall, BackgroundCalls
from polar_proxy.gateway.responses.listing import (
    PageRequest,
    check_include,
    flag,
    integer_value,
    list_object,
    read_query,
)
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.store.json_codec import clean_text
from polar_proxy.types import ANSWERED, CallRecord, Message

_DIALECT = get_dialect("openai_responses")
_ROUTE = re.compile(r"(?:/v1)?/responses/(?!input_tokens$|compact$)([^/]+)(?:/(input_items|cancel))?")
_METHODS = {None: ("GET", "DELETE"), "input_items": ("GET",), "cancel": ("POST",)}
_CANCEL_SECONDS = 10.0
"""How long to wait until a cancelled call is recorded."""
_ENTRY_BYTES, _MESSAGE_BYTES = 512, 64
"""Memory in bytes of a kept warm-up (a request with `generate: false`) and of each of its messages. The texts of the
messages are not included."""

FindSession = Callable[[Mapping[str, str], str | None, asgi.Scope], Awaitable[SessionState]]
"""Returns the session of a request, from its headers, the key in its path and its scope. Raises RequestError."""


class StoredResponseRoute(NamedTuple):
    response_id: str
    action: str | None
    """`input_items`, `cancel`, or None for the response itself."""

    @classmethod
    def of_path(cls, path: str) -> StoredResponseRoute | None:
        """Return the route of `path`, which must be without the prefix `/s/{key}`. None for paths of other routes."""
        found = _ROUTE.fullmatch(path)
        return None if found is None else cls(clean_text(found[1]) or "", found[2])


class StoredCalls:
    """Finds the recorded calls that a session may retrieve or refer to by an id."""

    def __init__(self, store: Store, monitor: StoreMonitor, most_bytes: int) -> None:
        """`most_bytes`: size limit of the conversations that are read for one request."""
        self._store = store
        self._monitor = monitor
        self._most_bytes = most_bytes
        self._warm_ups: LRUCache[tuple[str, str], tuple[bytes, ...]] = LRUCache(most_bytes, _size_of_messages)
        """The messages of warm-ups, by session id and call id. The least recently used are dropped."""

    def keep_warm_up(self, session: SessionState, call_id: str, messages: tuple[bytes, ...]) -> None:
        """Keep the messages of a request that samples nothing, so that `find_referenced` finds them."""
        with contextlib.suppress(ValueError):  # larger than the cache
            self._warm_ups[session.session_id, call_id] = messages

    async def find(
        self, session: SessionState, dialect: Dialect, call_ids: Collection[str], resumable: Collection[str] = ()
    ) -> dict[str, CallRecord]:
        """Return the calls with these ids that belong to this session and dialect, except the following:

        * calls whose response was deleted;
        * calls with `store: false` whose ids are not in `resumable`;
        * calls without an answer, if they did not run in the background.

        Raises StoreError, and RequestError if the conversations of the calls are too large.
        """
        unrecorded = {call_id: call for call_id in call_ids if (call := session.unrecorded(call_id)) is not None}
        calls = [*unrecorded.values(), *await self.read(session, set(call_ids) - unrecorded.keys())]
        return {
            call.call_id: call
            for call in calls
            if (call.choices or call.params.get("background"))
            # Sessions share the cache of unrecorded calls.
            and (call.session_id, call.dialect) == (session.session_id, dialect.name)
            and call.deleted_at is None
            and (call.params.get("store") is not False or call.call_id in resumable)
        }

    async def find_referenced(
        self, session: SessionState, dialect: Dialect, references: References, resumable: Collection[str]
    ) -> dict[str, ReferencedCall]:
        """Return the calls and warm-ups that a body refers to. Raises as `find` does."""
        referenced = {
            call_id: ReferencedCall(messages, None)
            for call_id in references.calls
            if (messages := self._warm_ups.get((session.session_id, call_id))) is not None
        }
        referenced |= await self.known_answers(session, references.answers)
        wanted = references.all - referenced.keys()
        for call in (await self.find(session, dialect, wanted, resumable)).values():
            if call.call_id in references.answers and session.unrecorded(call.call_id) is None:
                session.remember_referable(call)
            referenced[call.call_id] = ReferencedCall(
                call.messages,
                call.choices[0].message if call.choices else Message("assistant"),
                problem=None if call.status in ANSWERED else call.error or call.status,
            )
        return referenced

    async def known_answers(self, session: SessionState, call_ids: Collection[str]) -> dict[str, ReferencedCall]:
        """Look up the answers of the calls with these ids in memory, and return those found. Raises StoreError.

        If a session's requests refer to earlier answers, the session's answers are kept in memory, so that they are not
        read from the store for each request.
        """
        known = {
            call_id: ReferencedCall((), answer)
            for call_id in call_ids
            if (answer := session.referable_answer(call_id)) is not None
        }
        if known:  # responses may have been deleted, also by another gateway
            for call_id in await self._monitor.run(partial(self._store.calls.deleted, known.keys())):
                del known[call_id]
        return known

    async def read(self, session: SessionState, call_ids: Collection[str]) -> list[CallRecord]:
        """Return the calls with these ids that this session recorded. Raises as `find` does."""
        if not call_ids:
            return []
        size = await self._monitor.run(partial(self._store.calls.message_bytes, session.session_id, call_ids))
        if size > self._most_bytes:
            most = self._most_bytes >> 20
            problem = f"it refers to {size >> 20} MiB of recorded messages; at most {most} MiB are read"
            raise RequestError(f"The request cannot be served: {problem}.", status=413, param="input")
        return await self._monitor.run(partial(self._store.calls.get_many, session.session_id, call_ids))

    async def delete(self, session: SessionState, call_id: str) -> None:
        """Delete the response of a call of this session, so that `find` leaves it out. Raises StoreError."""
        if not session.discard_unrecorded(call_id):
            await self._monitor.run(partial(self._store.calls.mark_deleted, call_id))


class StoredResponseRoutes:
    def __init__(
        self,
        calls: StoredCalls,
        background: BackgroundCalls,
        find_session: FindSession,
        forwarder: RequestForwarder,
    ) -> None:
        self._calls = calls
        self._background = background
        self._find_session = find_session
        self._forwarder = forwarder

    async def handle(
        self,
        route: StoredResponseRoute,
        path_key: str | None,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
    ) -> None:
        """Answer one request. `path_key`: the key of the prefix `/s/{key}`."""
        methods = _METHODS[route.action]
        try:
            if scope["method"] not in methods:
                await send_wrong_method(send, _DIALECT, scope["method"], methods)
                return
            session = await self._find_session(asgi.read_headers(scope), path_key, scope)
            engine = await self._forwarder.engine_of_response(session, route.response_id)
            if engine is not None:
                body = await self._forwarder.read(session, receive)
                await self._forwarder.forward(engine, _DIALECT, scope, body, receive, send)
                return
            running = self._background.find(session, call_id_of_response(route.response_id) or "")
            if running is not None and route.action == "cancel":
                await _cancel(running)
                running = None
            if running is not None:
                await self._answer_unfinished(route, running, scope, send)
                return
            call = await self._find(session, route.response_id)
            await self._answer(route, call, session, scope, send)
        except asgi.ClientDisconnected:
            return
        except StoreError as error:
            await send_error(send, store_unavailable(error), _DIALECT)
        except (RequestError, EngineError) as error:
            await send_error(send, error, _DIALECT)

    async def _find(self, session: SessionState, identity: str) -> CallRecord:
        call_id = call_id_of_response(identity)
        calls = {} if call_id is None else await self._calls.find(session, _DIALECT, [call_id])
        call = calls.get(call_id or "")
        if call is None or not (call.status in ANSWERED or call.params.get("background")):
            raise RequestError(f"Response with id {identity!r:.80} not found.", status=404, param="id")
        return call

    async def _answer_unfinished(
        self, route: StoredResponseRoute, running: BackgroundCall, scope: asgi.Scope, send: asgi.Send
    ) -> None:
        query = read_query(scope)
        if route.action is not None or scope["method"] != "GET" or flag(query, "stream"):
            text = "This response is still in progress. Retrieve it until it has ended, or cancel it."
            raise RequestError(text, code="response_in_progress")
        await asgi.send_json(send, 200, running.reply.unfinished())

    async def _answer(
        self, route: StoredResponseRoute, call: CallRecord, session: SessionState, scope: asgi.Scope, send: asgi.Send
    ) -> None:
        query = read_query(scope)
        if route.action == "cancel":
            if not call.params.get("background"):
                raise RequestError("Cannot cancel a synchronous response.")
            await asgi.send_json(send, 200, await asyncio.to_thread(response_object, call))
        elif route.action == "input_items":
            await asgi.send_json(send, 200, await asyncio.to_thread(_listed_page, call, PageRequest.read(query)))
        elif scope["method"] == "DELETE":
            await self._calls.delete(session, call.call_id)
            deleted = {"id": response_id(call.call_id), "object": "response", "deleted": True}
            await asgi.send_json(send, 200, orjson.dumps(deleted))
        else:
            check_include(query)
            starting_after = integer_value(query, "starting_after", 0, None)
            if flag(query, "stream"):
                if call.status not in ANSWERED:
                    raise RequestError("This response ended early, so it has no stream. Retrieve it without 'stream'.")
                await send_stream(send, await asyncio.to_thread(response_events, call, starting_after), _DIALECT)
            elif starting_after is not None:
                raise invalid("starting_after", "it needs 'stream=true'")
            else:
                await asgi.send_json(send, 200, await asyncio.to_thread(response_object, call))


async def _cancel(running: BackgroundCall) -> None:
    """Cancel a call, and return when it is recorded. Raises RequestError 503 if that takes too long."""
    running.cancel()
    try:
        async with asyncio.timeout(_CANCEL_SECONDS):
            await running.ended.wait()
    except TimeoutError:
        text = (
            f"This response is cancelled, but was not recorded within {_CANCEL_SECONDS:g} seconds. Retrieve it later."
        )
        raise RequestError(text, status=503, code="not_recorded") from None


def _size_of_messages(messages: tuple[bytes, ...]) -> int:
    """Estimate the memory in bytes of the messages of a warm-up, including their Python objects."""
    return _ENTRY_BYTES + sum(_MESSAGE_BYTES + len(message) for message in messages)


def _listed_page(call: CallRecord, page: PageRequest) -> bytes:
    """Return a page of a response's input items, newest first by default."""
    items = listed_input(call)
    ordered = items if page.order == "asc" else items[::-1]
    start = 0
    if page.after is not None:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            raise invalid("after", "this response has no input item with this id")
        start = ids.index(page.after) + 1
    end = start + page.limit
    return list_object(ordered[start:end], has_more=end < len(ordered))


def store_unavailable(error: StoreError) -> RequestError:
    text = f"The stored responses cannot be read or changed now: {error}. Try again later."
    return RequestError(text, status=503, code="store_unavailable")
