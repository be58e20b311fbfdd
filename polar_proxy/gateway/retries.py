"""Joining of retries: a request and its retries share one call, whose answer is sent to each of their clients.

Each response is buffered while it is sent, and a little longer. A retry gets the contents of the buffer and then the
rest of the response as it is generated. Equal bytes do not prove a retry: two parallel runs under one key often send
the same bytes, and joining their requests would give both runs the same sample. A request counts as a retry of an equal
earlier request if

* the earlier request lost its client before the last byte, and is still being answered, or
* the client's SDK marks it as a retry (`X-Stainless-Retry-Count`). A marked request joins the last equal request.
  Exception: if that request failed, or an equal request before it failed and was not retried yet, the marked request
  may be the retry of a failed request. Then it joins none, and a new answer is sampled.

With the setting `gateway.join_retries` = `always`, a request also joins any equal one that is in flight or was just
answered; with `never`, it joins none.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from polar_proxy.config import GatewaySettings
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.recording import RequestContext

_VOLATILE_FIELDS = frozenset({"client_metadata", "metadata", "user", "safety_identifier"})
"""Fields that the model does not see, and that may differ between two attempts. (In Codex's requests,
turn ids and the order of keys differ.)"""

_FINISHED_BYTES = 64 << 20
"""Maximum total size in bytes of the finished requests that are kept, with their responses."""

RetryKey = tuple[str, str, bool, tuple[bytes, ...]]
"""Key under which equal requests are found: session id, dialect, whether the answer is streamed, and the last message
of each conversation of the request.

Equal requests have equal keys. Different requests rarely have equal keys, because every request of a run ends with a
new message.
"""


class ResponseBuffer:
    """Holds one response as it is sent, so that a retry can get it too."""

    def __init__(self, request: RequestContext, key: RetryKey, grace: float) -> None:
        """`grace`: number of seconds for which generation continues without a client, so that a retry can join."""
        self.request = request
        self.key = key
        self.disconnected = False
        """True if the client that sent the request disconnected before the last byte."""
        self.failed = False
        self.given_up = False
        """True if no retry came within the grace period."""
        self.retried = False
        """True if this request failed, and an equal one came afterwards."""
        self.ended_at: float | None = None
        self.size = sum(sum(map(len, messages)) for messages in request.parsed.messages)
        """Size of the request's messages and of the response so far, in bytes."""
        self._grace = grace
        self._deadline = 0.0
        self._messages: list[Any] = []
        self._listeners = 0
        self._changed = asyncio.Event()

    def wrap(self, send: asgi.Send) -> asgi.Send:
        """Return a `send` that buffers everything, and passes it on while the client is connected."""

        async def buffered_send(message: Any) -> None:
            self._messages.append(message)
            self.size += len(message.get("body", b""))
            self._notify()
            if not self.disconnected:
                await send(message)

        return buffered_send

    async def abandoned(self) -> None:
        """Wait until the response has had no client for as long as the grace period.

        Called when the client that sent the request has disconnected.
        """
        self.disconnected = True
        self._deadline = time.monotonic() + self._grace
        while await self.wait_for_listener():
            await self._changed.wait()

    def end_grace_period(self) -> None:
        """End the grace period, because no retry can come any more. A response without a client is given up."""
        self._grace, self._deadline = 0.0, 0.0
        self._notify()

    async def wait_for_listener(self) -> bool:
        """Return whether a client gets this response: the client that sent the request, or one that sends a retry.

        If there is none, wait for a retry until the end of the grace period.
        """
        while self.disconnected and not self._listeners:
            try:
                async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                self.given_up = True
                return False
        return True

    def close(self, *, failed: bool) -> None:
        self.failed = failed
        self.ended_at = time.monotonic()
        self._notify()

    async def follow(self, receive: asgi.Receive, send: asgi.Send) -> bool:
        """Send the response to one more client until it ends. Return False if the response ended before any of it was
        sent."""
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
                    await self._changed.wait()
            return position > 0 or watch.gone
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._deadline = time.monotonic() + self._grace
            self._notify()

    def matches(self, request: RequestContext) -> bool:
        """Return whether `request` repeats this buffer's request. The caller has compared their `RetryKey`s.

        Messages and tools must be the same bytes. Of the other fields, volatile ones and the order of keys are ignored.
        If both requests carry the client's own id of their conversation (its thread), the ids must be equal.
        """
        mine, theirs = self.request.parsed, request.parsed
        threads = {self.request.metadata.thread, request.metadata.thread} - {None}
        return (
            len(threads) < 2
            and mine.messages == theirs.messages
            and mine.tools == theirs.tools
            and _stable_fields(mine.params) == _stable_fields(theirs.params)
        )

    def _notify(self) -> None:
        """Wake the tasks that wait for a change: the tasks of clients that follow, and the task of the call itself
        after its client has disconnected."""
        if self._listeners or self.disconnected:
            self._changed.set()
            self._changed = asyncio.Event()


class RetryCache:
    def __init__(self, settings: GatewaySettings) -> None:
        self._policy = settings.join_retries
        self._window = settings.retry_window_seconds
        self._grace = settings.retry_grace_seconds
        self._buffers: dict[RetryKey, list[ResponseBuffer]] = {}
        self._finished: deque[ResponseBuffer] = deque()
        self._finished_bytes = 0

    def find(self, request: RequestContext) -> ResponseBuffer | None:
        """Return the buffer of the response that this request joins, or None if the request must be sampled.

        If the request is sampled because it may be the retry of a failed request, the failed request is marked as
        retried.
        """
        if self._policy == "never":
            return None
        self._evict()
        buffers = self._buffers.get(_retry_key(request))
        if buffers is None:
            return None
        same = [buffer for buffer in buffers if buffer.matches(request)]
        lost = [buffer for buffer in same if buffer.disconnected and not buffer.given_up and buffer.ended_at is None]
        if lost:
            return lost[-1]
        failed = [buffer for buffer in same if (buffer.failed or buffer.given_up) and not buffer.retried]
        if failed:
            failed[-1].retried = True
            return None
        # A failed last attempt supersedes earlier answers, because this request may be its retry.
        if not same or same[-1].failed or same[-1].given_up:
            return None
        return same[-1] if request.metadata.retry > 0 or self._policy == "always" else None

    def open(self, request: RequestContext) -> ResponseBuffer:
        buffer = ResponseBuffer(request, _retry_key(request), self._grace)
        self._buffers.setdefault(buffer.key, []).append(buffer)
        return buffer

    def close(self, buffer: ResponseBuffer, *, failed: bool) -> None:
        """Mark a response as ended, and keep it for the retry window."""
        buffer.close(failed=failed)
        self._finished.append(buffer)
        self._finished_bytes += buffer.size
        self._evict()

    def end_session(self, session_id: str) -> None:
        """End the grace period of a session's responses. The session's key is revoked, so no retry can come."""
        for key, buffers in self._buffers.items():
            if key[0] == session_id:
                for buffer in buffers:
                    buffer.end_grace_period()

    def _evict(self) -> None:
        limit = time.monotonic() - self._window
        while self._finished:
            if (self._finished[0].ended_at or 0.0) >= limit and self._finished_bytes <= _FINISHED_BYTES:
                break
            buffer = self._finished.popleft()
            self._finished_bytes -= buffer.size
            self._buffers[buffer.key].remove(buffer)
            if not self._buffers[buffer.key]:
                del self._buffers[buffer.key]


def _retry_key(request: RequestContext) -> RetryKey:
    last_messages = tuple(messages[-1] if messages else b"" for messages in request.parsed.messages)
    return request.session.session_id, request.dialect.name, request.parsed.stream, last_messages


def _stable_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in _VOLATILE_FIELDS}
