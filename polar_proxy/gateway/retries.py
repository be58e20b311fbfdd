"""Joining of retries: one generation, one call, the same bytes to whoever asks for it again.

Every answer is kept on a tape while it is written and a little longer. A request that is a retry of a taped one gets
what the tape has and follows it live. What counts as a retry is decided by evidence, because byte-identical requests
of two parallel runs under one key are ordinary, and joining those would give both the same sample:

* the first request lost its client before the last byte, or
* the client's SDK says so (`X-Stainless-Retry-Count`), and no earlier attempt failed that this could be a retry of.

`gateway.join_retries` may be `always` (any equal request that is in flight or was just answered) or `never`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import ParsedRequest
from polar_proxy.gateway import asgi
from polar_proxy.sessions import ClientMetadata

_VOLATILE = frozenset({"client_metadata", "metadata", "user", "safety_identifier"})
"""Fields that say nothing to the model and may differ between two attempts (Codex: turn ids, order of keys)."""

_KEPT_BYTES = 64 << 20
"""Of all requests and answers that are kept after their end."""


RetryKey = tuple[str, str, bool, tuple[bytes, ...]]
"""Session, dialect, whether it is streamed, and the last message of each of its conversations: equal for equal
requests. Each request of a run ends in another message, so that few others have the same."""


class ResponseBuffer:
    """One answer as it is sent. Used as the `send` of its turn."""

    def __init__(self, key: RetryKey, parsed: ParsedRequest, hints: ClientMetadata, grace: float) -> None:
        self.key = key
        self.parsed = parsed
        self.thread = hints.thread
        self.lost = False
        """Its own client went away before the last byte."""
        self.failed = False
        self.over = False
        """Nobody came within the grace: the generation is being given up."""
        self.claimed = False
        """A new attempt has been made after this one failed."""
        self.ended_at: float | None = None
        self.size = sum(len(item) for messages in parsed.messages for item in messages)
        self._grace = grace
        self._deadline = 0.0
        self._messages: list[Any] = []
        self._listeners = 0
        self._changed = asyncio.Event()

    def into(self, send: asgi.Send) -> asgi.Send:
        """`send`, with everything taped; a client that is lost is not sent to."""

        async def taped(message: Any) -> None:
            self._messages.append(message)
            self.size += len(message.get("body", b""))
            self._notify()
            if not self.lost:
                await send(message)

        return taped

    async def abandoned(self) -> None:
        """Called when the client is lost. Returns when nobody has listened for the time of grace."""
        self.lost = True
        self._deadline = time.monotonic() + self._grace
        while await self.heard():
            await self._next()

    def retry_grace_over(self) -> None:
        """No retry can come any more: a lost client's generation is not waited for."""
        self._grace, self._deadline = 0.0, 0.0
        self._notify()

    async def heard(self) -> bool:
        """Whether anybody gets this answer: its own client, a listener, or one that comes within the grace."""
        while self.lost and not self._listeners:
            try:
                async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                    await self._next()
            except TimeoutError:
                self.over = True
                return False
        return True

    def close(self, *, failed: bool) -> None:
        self.failed = failed
        self.ended_at = time.monotonic()
        self._notify()

    async def follow(self, receive: asgi.Receive, send: asgi.Send) -> bool:
        """Play the tape to one more client until it ends. False: it ended without having begun to answer."""
        self._listeners += 1
        self._notify()
        position = 0
        try:
            async with asgi.ClientWatch(receive) as watch:
                while True:
                    while position < len(self._messages):
                        position += 1
                        await send(self._messages[position - 1])
                    if self.ended_at is not None:
                        break
                    await self._next()
            return position > 0 or watch.gone
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._deadline = time.monotonic() + self._grace
            self._notify()

    def same(self, parsed: ParsedRequest, hints: ClientMetadata) -> bool:
        """Whether another of the same key is the same request: order of keys and volatile fields ignored."""
        mine = self.parsed
        return (
            (self.thread is None or hints.thread is None or self.thread == hints.thread)
            and mine.messages == parsed.messages
            and mine.tools == parsed.tools
            and _lasting(mine.params) == _lasting(parsed.params)
        )

    async def _next(self) -> None:
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RetryCache:
    """The tapes of one gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._policy = settings.join_retries
        self._window = settings.retry_window_seconds
        self._grace = settings.retry_grace_seconds
        self._tapes: dict[RetryKey, list[ResponseBuffer]] = {}
        self._ended: deque[ResponseBuffer] = deque()
        self._kept = 0

    def find(self, key: RetryKey, parsed: ParsedRequest, hints: ClientMetadata) -> ResponseBuffer | None:
        """The tape that this request, being a retry, is to be answered from."""
        if self._policy == "never":
            return None
        self._forget()
        tapes = self._tapes.get(key)
        if tapes is None:
            return None
        same = [tape for tape in tapes if tape.same(parsed, hints)]
        if lost := [tape for tape in same if tape.lost and not tape.over and tape.ended_at is None]:
            return lost[-1]
        if failed := [tape for tape in same if (tape.failed or tape.over) and not tape.claimed]:
            failed[-1].claimed = True
            return None
        answered = [tape for tape in same if not tape.failed and not tape.over]
        if answered and (hints.retry > 0 or self._policy == "always"):
            return answered[-1]
        return None

    def open(self, key: RetryKey, parsed: ParsedRequest, hints: ClientMetadata) -> ResponseBuffer:
        tape = ResponseBuffer(key, parsed, hints, self._grace)
        self._tapes.setdefault(key, []).append(tape)
        return tape

    def end_session(self, session_id: str) -> None:
        """Its key is revoked: what nobody hears there is given up at once."""
        for key, tapes in self._tapes.items():
            if key[0] == session_id:
                for tape in tapes:
                    tape.retry_grace_over()

    def close(self, tape: ResponseBuffer, *, failed: bool) -> None:
        """The answer is complete, or there is none: it is kept for the window."""
        tape.close(failed=failed)
        self._ended.append(tape)
        self._kept += tape.size
        self._forget()

    def _forget(self) -> None:
        limit = time.monotonic() - self._window
        while self._ended and ((self._ended[0].ended_at or 0.0) < limit or self._kept > _KEPT_BYTES):
            tape = self._ended.popleft()
            self._kept -= tape.size
            tapes = self._tapes[tape.key]
            tapes.remove(tape)
            if not tapes:
                del self._tapes[tape.key]


def retry_key(session_id: str, dialect: str, parsed: ParsedRequest) -> RetryKey:
    return session_id, dialect, parsed.stream, tuple(messages[-1] if messages else b"" for messages in parsed.messages)


def _lasting(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in _VOLATILE}
