"""The registry of sessions: find the session of a key, and keep the state of each session in memory.

Several gateways may share a database (setting `gateway.shared`). A session that is in this gateway's memory may then
have been closed by another gateway, or have calls that another gateway answered. So before each request this gateway
reads the session's row, and the session's calls that are not in memory yet.

While the store fails, sessions in memory go on, and unknown keys open sessions that are stored later. A session that
lost a call is marked as incomplete as soon as the store can be written (`write_pending`). If the process ends before
that, the next process that opens the store marks it (`store.outage_marks`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Collection
from weakref import WeakValueDictionary

from polar_proxy.config import GatewaySettings
from polar_proxy.errors import RequestError, StoreError
from polar_proxy.rollout_spec import whole_distribution
from polar_proxy.sessions.budget import BudgetUsage
from polar_proxy.sessions.hashing import MessageHasher
from polar_proxy.sessions.identity import hash_key, is_issued_key, typed_label
from polar_proxy.sessions.state import ConversationCache, SessionState
from polar_proxy.store import Store
from polar_proxy.store.repositories.outage_marks import OutageMark
from polar_proxy.types import Json, new_id

log = logging.getLogger(__name__)

_IN_USE_SECONDS = 30.0
"""A session counts as in use for this long after its last request. Sessions in use stay in memory, even if they exceed
the limit `calls_in_memory`. So no session is read back from the store more often than once in this time."""


class SessionClosedError(RequestError):
    def __init__(self) -> None:
        super().__init__("This session is closed.", status=401, code="session_closed")


class SessionRegistry:
    def __init__(self, store: Store, settings: GatewaySettings, *, open_to_all: bool) -> None:
        """`open_to_all`: open a session for an unknown key, instead of refusing it."""
        self._store = store
        self._settings = settings
        self.open_to_all = open_to_all
        self._hasher = MessageHasher(settings.normalisers_off)
        self._cache = ConversationCache(settings.cache_mb << 20)
        self._by_hash: dict[bytes, SessionState] = {}
        self._by_id: OrderedDict[str, SessionState] = OrderedDict()
        """The sessions in memory by their ids, the least recently used first."""
        self._calls = 0
        """The sum of `counted_calls` of all sessions."""
        self._pending: dict[str, SessionState] = {}
        """Session id -> a session that is to be stored or marked as incomplete."""
        self._marks = store.outage_marks()
        self._opening: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        """Return the number of sessions in memory."""
        return len(self._by_id)

    async def find(self, key: str | None, path_key: str | None, *, inside_sandbox: bool = False) -> SessionState:
        """Return the session of a key: of `path_key` (from the URL's path) if there is one, otherwise of `key` (from
        the headers or the query).

        An unknown key opens a session. If the gateway requires known keys, or if the request comes from a sandbox, an
        unknown key raises RequestError 401. Raises SessionClosedError if the session was closed.
        """
        session = self.in_memory(key, path_key)
        if session is not None:
            if self._settings.shared:
                await self._catch_up(session)
            return session
        digest = _digest(key, path_key)
        # Two first requests with one key must not both open a session. Those with other keys need not wait.
        async with self._opening.setdefault(digest, asyncio.Lock()):
            may_open = self.open_to_all and not inside_sandbox
            found = self._by_hash.get(digest) or await self._load(digest, key, path_key, may_open)
        if found is None:
            # Agents in a sandbox are not shown paths of this machine.
            place = "" if inside_sandbox else f" in {self._store.location}"
            accepted = f"Polar accepts only keys made by `polar session new` or `polar connect`{place}."
            raise RequestError(f"Incorrect API key provided. {accepted}", status=401, code="invalid_api_key")
        return found

    def in_memory(self, key: str | None, path_key: str | None) -> SessionState | None:
        """Return the session of a key if it is in memory."""
        digest = _digest(key, path_key)
        session = self._by_hash.get(digest)
        if session is not None:
            self._use(session)
        return session

    def open_unstored(
        self, key: str | None, path_key: str | None, *, inside_sandbox: bool = False
    ) -> SessionState | None:
        """Open a session in memory for an unknown key while the store fails. `write_pending` stores it later.

        Returns None if the gateway refuses unknown keys or must record calls, or if the request comes from a sandbox.
        Also None if the key looks like an issued key or a session's id, because it may belong to a rollout.
        """
        given = _given(key, path_key)
        if not self.open_to_all or inside_sandbox or self._requires_record(None):
            return None
        if is_issued_key(given) or given.startswith("sess_"):
            return None
        session = self._new_state(new_id("sess"), None, {}, None)
        session.unstored_key = _digest(key, path_key)
        self._by_id[session.session_id] = self._pending[session.session_id] = session
        self._add_key(session, session.unstored_key)
        return session

    def mark_incomplete(self, session: SessionState) -> None:
        """Remember that this session lost a call, until `write_pending` has marked it in the store."""
        self._pending[session.session_id] = session
        try:
            self._marks.add(OutageMark(session.session_id, session.unstored_key))
        except StoreError as error:
            log.error(
                "%s. If this process ends before the database can be written, the session counts as complete", error
            )

    @property
    def pending(self) -> Collection[str]:
        """The ids of the sessions that `write_pending` has to store or mark."""
        return self._pending.keys()

    async def write_pending(self) -> None:
        """Store the sessions that were opened while the store failed, and mark those that lost calls.

        Sessions that are added meanwhile wait for the next call of this method, so that it always ends.
        """
        taken, self._pending = self._pending, {}
        try:
            stored = dict(zip(taken, await asyncio.gather(*map(self.store_late, taken.values())), strict=True))
            lost = {stored[session_id] for session_id, session in taken.items() if session.lost}
            await self._store.sessions.mark_incomplete(lost, "unrecorded_calls")
        except BaseException:
            self._pending = taken | self._pending
            raise
        if not self._pending:
            self._marks.clear()

    def reserve_marks(self) -> None:
        """Reserve disk space for the marks of sessions that lose a call, before the disk is full. Blocking."""
        try:
            self._marks.reserve()
        except StoreError as error:
            log.error("%s. A session that loses a call is not marked if this process is killed", error)

    def close(self) -> None:
        """Remove the file of marks for lost calls (`store.outage_marks`). If it has marks that are not in the store
        yet, keep it; the next process stores them."""
        self._marks.close()

    async def store_late(self, session: SessionState) -> str:
        """Store a session that was opened while the store failed. Return the id under which it is stored.

        If the store already has a session with the same key, forget this session, and return the stored session's id.
        """
        if session.unstored_key is None:
            return session.session_id
        row = await self._store.sessions.create(
            key_hash=session.unstored_key, label=None, origin="open", session_id=session.session_id
        )
        if row.session_id == session.session_id:
            session.unstored_key = None
        else:  # the key was known: its next request finds that session
            self.forget(session.session_id)
        return row.session_id

    async def _load(self, digest: bytes, key: str | None, path_key: str | None, may_open: bool) -> SessionState | None:
        """Load or open the session of a key. Return None if the key is unknown and must not open a session."""
        row = await self._store.sessions.by_key(digest)
        if row is None and path_key is not None and may_open:
            row = await self._store.sessions.get(path_key)
            if row is not None and row.rollout_id is not None:
                may_open, row = False, None  # an id is not secret: only its key opens a rollout's session
        is_new = row is None
        if row is None:
            if not may_open:
                return None
            label = typed_label(_given(key, path_key))
            row = await self._store.sessions.create(key_hash=digest, label=label, origin="open")
        if row.closed_at is not None:
            raise SessionClosedError
        session = self._by_id.get(row.session_id)  # already in memory under another name (its id in the path)
        if session is None:
            # Its calls from before a restart, or from before it was dropped from memory.
            lineages = [] if is_new else await self._store.calls.lineages(row.session_id)
            session = self._new_state(row.session_id, row.rollout_id, row.policy or {}, row.label)
            session.rebuild(lineages)
            session.recorded = len(lineages)
            if session.budget.limited and (summary := await self._store.sessions.summary(row.session_id)) is not None:
                session.budget.load(summary)
            session = self._by_id.setdefault(session.session_id, session)  # another name may have added it
        self._add_key(session, digest)
        return session

    def _add_key(self, session: SessionState, digest: bytes) -> None:
        """Add the hash of a key, so that `find` returns this session for the key."""
        self._by_hash[digest] = session
        session.key_hashes.add(digest)
        self._use(session)

    def _new_state(self, session_id: str, rollout_id: str | None, policy: Json, label: str | None) -> SessionState:
        if self._settings.temperature is not None:
            policy = whole_distribution(self._settings.temperature) | policy
        return SessionState(
            session_id,
            policy,
            self._hasher,
            window=self._settings.retry_window_seconds,
            cache=self._cache,
            record_required=self._requires_record(rollout_id),
            rollout_id=rollout_id,
            label=label,
        )

    def rollout_of(self, session_id: str) -> str | None:
        """Return the rollout of a session that is in memory, or None."""
        session = self._by_id.get(session_id)
        return None if session is None else session.rollout_id

    def _requires_record(self, rollout_id: str | None) -> bool:
        if self._settings.record is None:
            return rollout_id is not None
        return self._settings.record == "required"

    async def _catch_up(self, session: SessionState) -> None:
        """Read what other gateways have recorded of this session. Raises SessionClosedError if it was closed.

        The session's row counts the committed calls of all gateways. `session.recorded` counts the calls that this
        gateway knows. If no call is in flight here and the two counts are equal, there is nothing to read.
        """
        quiet, recorded = session.in_flight == 0, session.recorded
        row = await self._store.sessions.summary(session.session_id)
        if row is None or row.closed_at is not None:
            if session.in_flight == 0 and session.lost == 0:
                self.forget(session.session_id)
            raise SessionClosedError
        session.budget.load(row)
        quiet = quiet and session.in_flight == 0 and session.recorded == recorded
        if quiet and row.calls == recorded:
            return
        session.rebuild(await self._store.calls.lineages(session.session_id, known=session.call_ids))
        if quiet:
            session.recorded = row.calls

    def budget(self, session_id: str) -> BudgetUsage | None:
        """Return the use of a session's budget; None if the session is not in memory."""
        session = self._by_id.get(session_id)
        return session.budget if session else None

    def mark_ended(self, session_id: str) -> None:
        """Mark a session as ended, because its rollout ended while calls were in flight. Clients of these calls get a
        409 in place of the answer."""
        if session := self._by_id.get(session_id):
            session.ended = True

    def lost(self, session_id: str) -> int:
        """Return how many calls of this session were answered and not recorded; 0 if the session is not in memory."""
        session = self._by_id.get(session_id)
        return session.lost if session else 0

    def refusal(self, session_id: str) -> str | None:
        """Return why the session's last call could not be recorded; None if it was recorded.

        Also None if the session is not in memory, or if the session's calls are answered even when they cannot be
        recorded (`record_required` is False)."""
        session = self._by_id.get(session_id)
        return session.refusal if session else None

    async def idle(self, session_id: str, timeout: float) -> None:
        """Wait until no call of this session is in flight. Raises TimeoutError after `timeout` seconds."""
        session = self._by_id.get(session_id)
        if session is not None:
            async with asyncio.timeout(timeout):
                await session.idle.wait()

    def forget(self, session_id: str) -> None:
        """Drop a session from memory. Its next request looks the key up again, and fails if the session was closed."""
        session = self._by_id.pop(session_id, None)
        if session is not None:
            session.drop_cached()
            self._calls -= session.counted_calls
            for digest in session.key_hashes:
                if self._by_hash.get(digest) is session:
                    del self._by_hash[digest]

    def _use(self, session: SessionState) -> None:
        """Record that a session was just used. If the sessions have too many calls for memory, drop unused sessions.

        The least recently used session is dropped first. Sessions that have lost calls or wait to be stored stay.
        Sessions in use (`_IN_USE_SECONDS`) stay too, even if they alone have too many calls for memory: reading each
        of them back for its next call would stop the gateway.
        """
        now = session.used_at = time.monotonic()
        self._by_id.move_to_end(session.session_id)
        self._calls += session.weight - session.counted_calls
        session.counted_calls = session.weight
        while self._calls > self._settings.calls_in_memory:
            oldest = next(iter(self._by_id.values()))
            if oldest is session or oldest.used_at > now - _IN_USE_SECONDS:
                break
            if oldest.requests or oldest.lost or oldest.session_id in self._pending:
                oldest.used_at = now
                self._by_id.move_to_end(oldest.session_id)
            else:
                self.forget(oldest.session_id)


def _digest(key: str | None, path_key: str | None) -> bytes:
    return hash_key(_given(key, path_key))


def _given(key: str | None, path_key: str | None) -> str:
    """Return the key of a request: the key in the URL's path, else the key in the headers or the query; else empty."""
    return path_key if path_key is not None else (key or "")
