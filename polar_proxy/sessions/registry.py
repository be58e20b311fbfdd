"""Session identity: which API key is which session. Keys live here only as SHA-256.

A gateway may be one of several on a database (`shared`). Then a session that it has in memory may have been closed, or
have got calls, elsewhere: the store is asked before each request, by the session's own row, and what is not known yet
is read. A gateway that is alone asks nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from polar_proxy.errors import RequestError
from polar_proxy.sessions import SessionHistory
from polar_proxy.store import Store
from polar_proxy.types import EngineRequest, Json, Sampling

_CACHED = 20_000


def new_key() -> str:
    """A random session key that looks like an API key to any client."""
    return "sk-polar-" + secrets.token_urlsafe(24)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass(slots=True)
class SessionState:
    """A session while the gateway serves it."""

    session_id: str
    policy: Json
    history: SessionHistory = field(default_factory=SessionHistory)
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while `in_flight` is 0; see `begin` and `end`."""
    lost: int = 0
    """Calls that were answered but could not be committed: the rollout is incomplete and not to be trained on."""
    ended: int = 0
    """Calls that this gateway has answered, the lost ones included."""
    elsewhere: int = 0
    """Calls in the store that this gateway did not answer: other gateways', or of before it began."""

    def begin(self, calls: int) -> None:
        self.in_flight += calls
        self.idle.clear()

    def end(self, calls: int) -> None:
        self.in_flight -= calls
        self.ended += calls
        if self.in_flight == 0:
            self.idle.set()


class SessionRegistry:
    """Finds or opens the session of a request."""

    def __init__(
        self,
        store: Store,
        *,
        open_to_all: bool,
        normalisers_off: frozenset[str] = frozenset(),
        window: float = 10.0,
        shared: bool = False,
    ) -> None:
        """`shared`: other gateways serve sessions of this store, too."""
        self._store = store
        self._shared = shared
        self._off = normalisers_off
        self._window = window
        self.open_to_all = open_to_all
        self._by_hash: OrderedDict[bytes, SessionState] = OrderedDict()
        self._by_id: dict[str, SessionState] = {}
        self._opening: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def find(self, key: str | None, path_key: str | None, *, inside: bool = False) -> SessionState:
        """The session of a path segment (first) or of a key. RequestError 401 when unknown and Polar is closed, as it
        always is to what comes from `inside` a sandbox: an agent has the key of its rollout and no need of another."""
        given = path_key if path_key is not None else (key or "")
        digest = hash_key(given)
        session = self._by_hash.get(digest)
        if session is not None:
            self._by_hash.move_to_end(digest)
            if self._shared:
                await self._catch_up(session)
            return session
        # Two first requests of one key must not both open a session; those of other keys need not wait.
        lock = self._opening.get(digest)
        if lock is None:
            lock = self._opening[digest] = asyncio.Lock()
        async with lock:
            return self._by_hash.get(digest) or await self._load(digest, path_key, self.open_to_all and not inside)

    async def _load(self, digest: bytes, path_key: str | None, opens: bool) -> SessionState:
        record = await self._store.sessions.by_key(digest)
        if record is None and path_key is not None and opens:
            record = await self._store.sessions.get(path_key)
            if record is not None and record.rollout_id is not None:  # an id is no secret: only its key opens it
                opens, record = False, None
        is_new = record is None
        if record is None:
            if not opens:
                raise RequestError(
                    "Incorrect API key provided. Polar accepts only keys made by `polar session new` here.",
                    status=401,
                    code="invalid_api_key",
                )
            record = await self._store.sessions.create(
                key_hash=digest, label=None, rollout_id=None, policy=None, origin="open"
            )
        if record.closed_at is not None:
            raise session_closed_error()
        session = self._by_id.get(record.session_id)  # known already by another name (its id in the path)
        if session is None:
            history = SessionHistory(self._off, window=self._window)
            # Its calls of before a restart, or before it was put out of memory.
            places = [] if is_new else await self._store.calls.lineages(record.session_id)
            history.rebuild(places)
            session = SessionState(record.session_id, record.policy or {}, history, elsewhere=len(places))
            session.idle.set()
            session = self._by_id.setdefault(session.session_id, session)  # by its other name, in the meantime
        self._by_hash[digest] = session
        self._evict()
        return session

    async def _catch_up(self, session: SessionState) -> None:
        """Know what other gateways have recorded of this session. RequestError 401 when it was closed.

        The row counts the calls that are committed; while none of our own is under way, ours among them can be told
        exactly, and an equal sum proves that there is nothing new.
        """
        quiet, ended = session.in_flight == 0, session.ended
        row = await self._store.sessions.summary(session.session_id)
        if row is None or row.closed_at is not None:
            if session.in_flight == 0 and session.lost == 0:
                self.forget(session.session_id)
            raise session_closed_error()
        quiet = quiet and session.in_flight == 0 and session.ended == ended
        ours = session.ended - session.lost
        if quiet and row.calls == session.elsewhere + ours:
            return
        session.history.rebuild(await self._store.calls.lineages(session.session_id, known=session.history.known))
        if quiet:
            session.elsewhere = row.calls - ours

    def lost(self, session_id: str) -> int:
        """How many calls of this session were answered without being recorded."""
        session = self._by_id.get(session_id)
        return session.lost if session else 0

    async def idle(self, session_id: str, timeout: float) -> None:
        """Wait until no call of this session is being answered. TimeoutError after `timeout` seconds."""
        session = self._by_id.get(session_id)
        if session is not None:
            async with asyncio.timeout(timeout):
                await session.idle.wait()

    def forget(self, session_id: str) -> None:
        """Drop a finished session from memory; its key is looked up afresh (and refused if it was closed)."""
        session = self._by_id.pop(session_id, None)
        for digest in [digest for digest, held in self._by_hash.items() if held is session]:
            del self._by_hash[digest]

    def _evict(self) -> None:
        for digest, session in list(islice(self._by_hash.items(), max(0, len(self._by_hash) - _CACHED))):
            if session.in_flight == 0 and session.lost == 0:
                del self._by_hash[digest]
                self._by_id.pop(session.session_id, None)


def session_closed_error() -> RequestError:
    """What a request under the key of a closed session is told."""
    return RequestError("This session is closed.", status=401, code="session_closed")


_DEFAULTS: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""OpenAI's own defaults. An engine's (a model's generation_config) may cut the distribution, and then raw
log-probabilities would not be those of the samples, without anything in the record that says so."""


def apply_policy(request: EngineRequest, policy: Json) -> EngineRequest:
    """The request as the session's policy wants it sampled, with nothing left to the engine's own defaults.

    `policy` may hold temperature, top_p, top_k, min_p, seed (these replace the client's) and max_tokens (an upper
    bound, and the value where the client gave none).
    """
    sampling: Sampling = request.sampling
    changes: Json = {key: value for key, value in _DEFAULTS.items() if getattr(sampling, key) is None}
    changes |= {key: policy[key] for key in ("temperature", "top_p", "top_k", "min_p", "seed") if key in policy}
    limit = policy.get("max_tokens")
    if limit is not None:
        changes["max_tokens"] = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
    return replace(request, sampling=replace(sampling, **changes))


def api_key_of(headers: Any, query_key: str | None) -> str | None:
    """The API key of a request: Authorization: Bearer, x-api-key, x-goog-api-key, ?key=, in this order."""
    authorization = headers.get("authorization")
    if authorization:
        scheme, _, value = authorization.partition(" ")
        return str(value.strip()) if scheme.lower() == "bearer" else str(authorization)
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query_key
