"""Responses in the background (`background: true`): the client gets the id at once and retrieves the answer later.

Promises:

* A background call is answered and recorded like any other. It goes on after its client has disconnected. It ends when
  it is answered or cancelled, or when its session or the gateway ends.
* While it runs, only the gateway that received it can find it. Afterwards it is found by its record.
* `_MOST_RUNNING` limits the running calls of a session. The limit of connections does not limit these calls, because a
  call in the background needs no connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from polar_proxy.errors import RequestError
from polar_proxy.gateway.answering import BackgroundReply
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.retries import ResponseBuffer
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import Json

_MOST_RUNNING = 64


class BackgroundCall:
    """A call that runs in the background."""

    def __init__(self, session_id: str, reply: BackgroundReply, buffer: ResponseBuffer) -> None:
        self.session_id = session_id
        self.reply = reply
        self.ended = asyncio.Event()
        self._buffer = buffer
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        self._buffer.end_grace_period()
        self._cancelled.set()

    async def receive(self) -> Json:
        """Stand in for the `receive` of the client's connection: report a disconnect once the call is cancelled."""
        await self._cancelled.wait()
        return {"type": "http.disconnect"}


class BackgroundCalls:
    """The background calls that this gateway is answering."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundCall] = {}
        self._requests: Counter[str] = Counter()
        """Number of background requests that are being answered, by session id."""

    @contextmanager
    def count(self, session: SessionState) -> Iterator[None]:
        """Count a background request of the session while the block lasts. Raises RequestError 429 at the limit."""
        own = self._requests[session.session_id]
        if own >= _MOST_RUNNING:
            text = f"This session has {own} responses in the background, the most that can run. Wait for one of them."
            raise RequestError(text, status=429, param="background")
        self._requests[session.session_id] += 1
        try:
            yield
        finally:
            self._requests[session.session_id] -= 1
            if not self._requests[session.session_id]:
                del self._requests[session.session_id]

    async def begin(
        self, call_id: str, session: SessionState, reply: BackgroundReply, buffer: ResponseBuffer
    ) -> asgi.Receive:
        """Register a call and send its id to the client. Return the ASGI `receive` that reports a cancellation."""
        call = self._running[call_id] = BackgroundCall(session.session_id, reply, buffer)
        await reply.begin()
        return call.receive

    def end(self, call_id: str) -> None:
        """Remove a call that has ended. Does nothing for calls that do not run in the background."""
        if (call := self._running.pop(call_id, None)) is not None:
            call.ended.set()

    def find(self, session: SessionState, call_id: str) -> BackgroundCall | None:
        """Return a call of this session; None if the call is not running in this gateway."""
        call = self._running.get(call_id)
        return call if call is not None and call.session_id == session.session_id else None

    def end_session(self, session_id: str) -> None:
        """Cancel the calls of a session whose key is revoked, because they cannot be retrieved any more."""
        for call in self._running.values():
            if call.session_id == session_id:
                call.cancel()
