"""The recorded calls that a session may retrieve or refer to by an id."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial

from cachetools import LRUCache

from polar_proxy.dialects.base import Dialect, ReferencedCall, References
from polar_proxy.errors import RequestError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.types import ANSWERED, CallRecord, Message

_ENTRY_BYTES, _MESSAGE_BYTES = 512, 64
"""Memory in bytes of a kept warm-up (a request with `generate: false`) and of each of its messages. The texts of the
messages are not included."""


class StoredCalls:
    def __init__(self, store: Store, monitor: StoreMonitor, most_bytes: int) -> None:
        """`most_bytes`: size limit of the conversations that are read for one request."""
        self._store = store
        self._monitor = monitor
        self._most_bytes = most_bytes
        self._warm_ups: LRUCache[tuple[str, str], tuple[bytes, ...]] = LRUCache(most_bytes, _size_of_messages)
        """(Session id, call id) -> messages of a warm-up: a request with `generate: false`, which samples nothing.
        When the cache is full, the least recently used are dropped."""

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


def _size_of_messages(messages: tuple[bytes, ...]) -> int:
    """Estimate the memory in bytes of the messages of a warm-up, including their Python objects."""
    return _ENTRY_BYTES + sum(_MESSAGE_BYTES + len(message) for message in messages)
