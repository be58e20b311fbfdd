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
import re
from typing import NamedTuple

import orjson

from polar_proxy.dialects import get_dialect
from polar_proxy.dialects.fields import invalid
from polar_proxy.dialects.openai_responses.items import call_id_of_response, response_id
from polar_proxy.dialects.openai_responses.stored import listed_input, response_events, response_object
from polar_proxy.errors import EngineError, RequestError, StoreError
from polar_proxy.gateway.hosted.forwarding import RequestForwarder
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.responses.background import BackgroundCall, BackgroundCalls
from polar_proxy.gateway.responses.listing import (
    PageRequest,
    check_include,
    flag,
    integer_value,
    list_object,
    read_query,
)
from polar_proxy.gateway.responses.stored_calls import StoredCalls
from polar_proxy.gateway.routing import SessionFinder
from polar_proxy.sessions.state import SessionState
from polar_proxy.store.json_codec import clean_text
from polar_proxy.types import ANSWERED, CallRecord

_DIALECT = get_dialect("openai_responses")
_ROUTE = re.compile(r"(?:/v1)?/responses/(?!input_tokens$|compact$)([^/]+)(?:/(input_items|cancel))?")
_METHODS = {None: ("GET", "DELETE"), "input_items": ("GET",), "cancel": ("POST",)}
_CANCEL_SECONDS = 10.0
"""How long to wait until a cancelled call is recorded."""


class StoredResponseRoute(NamedTuple):
    response_id: str
    action: str | None
    """`input_items`, `cancel`, or None for the response itself."""

    @classmethod
    def of_path(cls, path: str) -> StoredResponseRoute | None:
        """Return the route of `path`, which must be without the prefix `/s/{key}`. None for paths of other routes."""
        found = _ROUTE.fullmatch(path)
        return None if found is None else cls(clean_text(found[1]) or "", found[2])


class StoredResponseRoutes:
    def __init__(
        self,
        calls: StoredCalls,
        background: BackgroundCalls,
        session_finder: SessionFinder,
        forwarder: RequestForwarder,
    ) -> None:
        self._calls = calls
        self._background = background
        self._session_finder = session_finder
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
                await asgi.send_wrong_method(send, _DIALECT, scope["method"], methods)
                return
            session = await self._session_finder.find(asgi.read_headers(scope), path_key, scope)
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
            await asgi.send_error(send, store_unavailable(error), _DIALECT)
        except (RequestError, EngineError) as error:
            await asgi.send_error(send, error, _DIALECT)

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
                await asgi.send_stream(send, await asyncio.to_thread(response_events, call, starting_after), _DIALECT)
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
