"""Server-sent events for open pages: an event tells a page that records on this page have changed.

Several gateways, workers and trainers may write to one database, so no process knows all changes. The server therefore
reads the state of the records twice a second, once for all pages that show the same records, and only while a page is
visible. The first event comes at once, because records may have changed while no stream was open.

A server has at most `MOST_STREAMS` streams. Further pages update every few seconds (`assets/page.js`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from polar_proxy.api import ApiContext
from polar_proxy.api.context import HEARTBEAT_SECONDS, StreamedResponse, event_stream
from polar_proxy.errors import ApiError
from polar_proxy.store.repositories.changes import Followed
from polar_proxy.view.query_cache import QueryCache

MOST_STREAMS = 200
READ_SECONDS = 0.5
_CHANGE = b"event: change\ndata: .\n\n"


@dataclass
class ChangeStreams:
    """The streams of one server."""

    _open: int = 0
    _states: QueryCache = field(default_factory=lambda: QueryCache(READ_SECONDS * 0.9))

    def respond(self, api: ApiContext, followed: Followed, record_id: str) -> StreamedResponse:
        """Return the stream of a page. Raises ApiError 503 if too many streams are open."""
        if self._open >= MOST_STREAMS:
            message = (
                f"{MOST_STREAMS} pages follow this server already, so this page asks for changes every few seconds."
            )
            raise ApiError(message, status=503, code="unavailable")
        return event_stream(self._follow(api, followed, record_id))

    async def _follow(self, api: ApiContext, followed: Followed, record_id: str) -> AsyncIterator[bytes]:
        def read() -> Coroutine[Any, Any, int]:
            return api.store.changes.state(followed, record_id)

        self._open += 1
        try:
            known: int | None = None
            last_sent = 0.0
            while not api.closing.is_set():
                state = await self._states.get((followed, record_id), read)
                if state != known or time.monotonic() - last_sent >= HEARTBEAT_SECONDS:
                    yield b":\n\n" if state == known else _CHANGE
                    known, last_sent = state, time.monotonic()
                await asyncio.sleep(READ_SECONDS)
        finally:
            self._open -= 1
