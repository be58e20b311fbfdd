"""Requests that are passed on to their provider and ask no model: token counts, stored responses and conversations.

The provider gets the request, and the agent the response, byte for byte. Nothing of them is recorded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable

from polar_proxy.dialects.base import Dialect
from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.errors import EngineError
from polar_proxy.gateway.hosted.passthrough import provider_request
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.limits import BodyBudget
from polar_proxy.gateway.routing import EngineRouter
from polar_proxy.sessions.state import SessionState

log = logging.getLogger(__name__)

BeforeSent = Callable[[int, bytes], Awaitable[None]]
"""Awaited with the status and the body of a response before it is sent."""


class RequestForwarder:
    def __init__(self, router: EngineRouter, bodies: BodyBudget) -> None:
        self._router = router
        self._bodies = bodies

    def engine_of(self, session: SessionState) -> PassthroughEngine | None:
        """Return the engine that passes on the session's requests without a model; None if it is another engine."""
        return self._router.choose(session, "").passthrough

    async def read(self, session: SessionState, receive: asgi.Receive) -> bytes:
        """Return the body of a request. Raises RequestError for one that is too large, and ClientDisconnected."""
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

        Raises EngineError if no response arrives, and RequestError if the agent sent a key of Polar. A response that
        breaks off also breaks off for the agent.
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
