"""Requests that are passed on to their provider and sample nothing: token counts, stored responses and conversations.

Request and response are passed on byte for byte, and are not recorded.

A request for a stored response or conversation names no model. Promise: if a recorded call of the session made the
response or belongs to the conversation, the request goes to the engine that answered the call. Otherwise the engine is
chosen as for a call that names no model.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.openai_responses.items import call_id_of_response
from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.hosted.passthrough import provider_request
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.limits import BodyBudget
from polar_proxy.gateway.routing import EngineRouter
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store

log = logging.getLogger(__name__)

BeforeSent = Callable[[int, bytes], Awaitable[None]]
"""A function that is awaited with the status and the body of a response before the response is sent."""


class RequestForwarder:
    def __init__(self, router: EngineRouter, bodies: BodyBudget, store: Store, monitor: StoreMonitor) -> None:
        self._router = router
        self._bodies = bodies
        self._store = store
        self._monitor = monitor

    async def engine_of_response(self, session: SessionState, identity: str) -> PassthroughEngine | None:
        """Return the engine whose provider keeps a response; None if Polar keeps it.

        Raises RequestError if that engine is not served any more, and StoreError if the store fails.
        """
        without_model = self._router.choose(session, "").passthrough
        if len(self._router.all) == 1:
            return without_model
        find = partial(self._store.calls.find_response, session.session_id, identity)
        if (call_id := await self._monitor.run(find)) is not None:
            return await self._engine_of_call(call_id, identity)
        own = call_id_of_response(identity)
        kept_here = own is not None and (own in session.call_ids or session.unrecorded(own) is not None)
        return None if kept_here else without_model

    async def engine_of_conversation(self, session: SessionState, identity: str | None) -> PassthroughEngine | None:
        """Return the engine whose provider keeps a conversation; None if Polar keeps it.

        `identity`: None for a conversation that is to be created. Raises as `engine_of_response` does.
        """
        without_model = self._router.choose(session, "").passthrough
        if identity is None or len(self._router.all) == 1:
            return without_model
        kept_here = partial(self._store.conversations.get, session.session_id, identity)
        if await self._monitor.run(kept_here) is not None:
            return None
        find = partial(self._store.calls.latest_in_conversation, session.session_id, identity)
        call_id = await self._monitor.run(find)
        return without_model if call_id is None else await self._engine_of_call(call_id, identity)

    async def _engine_of_call(self, call_id: str, identity: str) -> PassthroughEngine:
        """Return the engine that passed on a call. Raises RequestError if this engine is not served any more."""
        name = await self._monitor.run(partial(self._store.calls.engine_name, call_id))
        choice = self._router.named(name)
        if choice is None or choice.passthrough is None:
            engine = "the engine of [engine]" if name is None else f"the engine {name} of [engines]"
            text = (
                f"{identity!r:.80} is kept by a provider to which {engine} passed a call on. In this server's present "
                "settings, this engine is missing or passes no calls on. Restore the engine in the settings, or begin "
                "a new conversation."
            )
            raise RequestError(text, status=404, param="id")
        return choice.passthrough

    async def read(self, session: SessionState, receive: asgi.Receive) -> bytes:
        """Return the body of a request.

        Raises RequestError if the body is too large, and ClientDisconnected if the client disconnects first.
        """
        with self._bodies.reserve(session.session_id) as reservation:
            return b"".join(await asgi.read_body(receive, reservation.take))

    async def forward(
        self,
        engine: PassthroughEngine,
        dialect: Dialect,
        scope: asgi.Scope,
        body: bytes,
        receive: asgi.Receive,
        send: asgi.Send,
        before_sent: BeforeSent | None = None,
    ) -> None:
        """Send a request to its provider, and the response to the agent.

        Raises EngineError if no response arrives, and RequestError if the agent sent a key of Polar instead of its key
        for the provider. A response that breaks off also breaks off for the agent.
        """
        pieces = engine.forward(scope["method"], provider_request(scope, dialect, body))
        async with asgi.ClientWatch(receive), contextlib.aclosing(pieces):
            head = await anext(pieces)
            whole = b""
            if before_sent is not None:
                whole = b"".join([piece.data async for piece in pieces])
                await before_sent(head.status, whole)
            await send({"type": "http.response.start", "status": head.status, "headers": [*head.headers]})
            try:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece.data, "more_body": True})
            except EngineError as error:
                log.warning("a response was passed on only in part: %s", error)
                return
            await send({"type": "http.response.body", "body": whole})
