"""The registry of sessions: find the session of a key, and keep the state of each session in memory.

A gateway may be one of several on a database (setting `gateway.shared`). A session that it has in memory may then have
been closed, or have got calls, through another gateway. So before each request such a gateway reads the session's row,
and the calls that it does not know.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import islice
from weakref import WeakValueDictionary

from polar_proxy.config import GatewaySettings
from polar_proxy.errors import RequestError
from polar_proxy.sessions.hashing import MessageHasher
from polar_proxy.sessions.identity import hash_key
from polar_proxy.sessions.state import ConversationCache, SessionState
from polar_proxy.store import Store

_MAX_SESSIONS = 20_000


class SessionClosedError(RequestError):
    def __init__(self) -> None:
        super().__init__("This session is closed.", status=401, code="session_closed")


class SessionRegistry:
    def __init__(self, store: Store, settings: GatewaySettings, *, open_to_all: bool) -> None:
        """`open_to_all`: an unknown key opens a session."""
        self._store = store
        self._settings = settings
        self.open_to_all = open_to_all
        self._hasher = MessageHasher(settings.normalisers_off)
        self._cache = ConversationCache()
        self._by_hash: OrderedDict[bytes, SessionState] = OrderedDict()
        self._by_id: dict[str, SessionState] = {}
        self._opening: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def find(self, key: str | None, path_key: str | None, *, inside_sandbox: bool = False) -> SessionState:
        """Return the session of a key: of `path_key` (from the URL's path) if given, else of `key` (headers or query).

        Raises RequestError 401 for an unknown key if the gateway requires known keys. From inside a sandbox they are
        always required, because an agent has its rollout's key and needs no other.
        """
        digest = hash_key(path_key if path_key is not None else (key or ""))
        session = self._by_hash.get(digest)
        if session is not None:
            self._by_hash.move_to_end(digest)
            if self._settings.shared:
                await self._catch_up(session)
            return session
        # Two first requests with one key must not both open a session. Those with other keys need not wait.
        async with self._opening.setdefault(digest, asyncio.Lock()):
            may_open = self.open_to_all and not inside_sandbox
            return self._by_hash.get(digest) or await self._load(digest, path_key, may_open)

    async def _load(self, digest: bytes, path_key: str | None, may_open: bool) -> SessionState:
        row = await self._store.sessions.by_key(digest)
        if row is None and path_key is not None and may_open:
            row = await self._store.sessions.get(path_key)
            if row is not None and row.rollout_id is not None:
                may_open, row = False, None  # an id is not secret: only its key opens a rollout's session
        is_new = row is None
        if row is None:
            if not may_open:
                message = "Incorrect API key provided. Polar accepts only keys made by `polar session new` here."
                raise RequestError(message, status=401, code="invalid_api_key")
            row = await self._store.sessions.create(key_hash=digest, label=None, origin="open")
        if row.closed_at is not None:
            raise SessionClosedError
        session = self._by_id.get(row.session_id)  # already in memory under another name (its id in the path)
        if session is None:
            # Calls from before a restart, or from before the session was evicted.
            lineages = [] if is_new else await self._store.calls.lineages(row.session_id)
            window = self._settings.retry_window_seconds
            session = SessionState(row.session_id, row.policy or {}, self._hasher, window=window, cache=self._cache)
            session.rebuild(lineages)
            session.recorded = len(lineages)
            session = self._by_id.setdefault(session.session_id, session)  # another name may have added it
        self._by_hash[digest] = session
        self._evict()
        return session

    async def _catch_up(self, session: SessionState) -> None:
        """Read what other gateways have recorded of this session. Raises SessionClosedError if it was closed.

        The session's row counts committed calls. While no call is in flight here, `session.recorded` includes all calls
        of this gateway, so the same number in the row proves that nothing is new.
        """
        quiet, recorded = session.in_flight == 0, session.recorded
        row = await self._store.sessions.summary(session.session_id)
        if row is None or row.closed_at is not None:
            if session.in_flight == 0 and session.lost == 0:
                self.forget(session.session_id)
            raise SessionClosedError
        quiet = quiet and session.in_flight == 0 and session.recorded == recorded
        if quiet and row.calls == recorded:
            return
        session.rebuild(await self._store.calls.lineages(session.session_id, known=session.call_ids))
        if quiet:
            session.recorded = row.calls

    def lost(self, session_id: str) -> int:
        """Return how many calls of this session were answered without being recorded."""
        session = self._by_id.get(session_id)
        return session.lost if session else 0

    async def idle(self, session_id: str, timeout: float) -> None:
        """Wait until no call of this session is in flight. Raises TimeoutError after `timeout` seconds."""
        session = self._by_id.get(session_id)
        if session is not None:
            async with asyncio.timeout(timeout):
                await session.idle.wait()

    def forget(self, session_id: str) -> None:
        """Drop a finished session from memory. Its next request looks the key up again, and fails if it was closed."""
        session = self._by_id.pop(session_id, None)
        for digest in [digest for digest, held in self._by_hash.items() if held is session]:
            del self._by_hash[digest]

    def _evict(self) -> None:
        """Drop the least recently used sessions, except those that are busy or have lost calls."""
        excess = max(0, len(self._by_hash) - _MAX_SESSIONS)
        for digest, session in list(islice(self._by_hash.items(), excess)):
            if session.in_flight == 0 and session.lost == 0:
                del self._by_hash[digest]
                self._by_id.pop(session.session_id, None)
