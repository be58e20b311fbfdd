"""Everything that a gateway remembers about one session.

`SessionHistory` knows the session's calls by digests, for as long as the session is in memory. Its last request and
the tokens of its answers are larger. They are held in a `ConversationCache`, which all sessions of a gateway share:
what was used least recently goes first, and is parsed again, or read from the store, if it is needed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from cachetools import LRUCache

from polar_proxy.dialects import ParsedRequest
from polar_proxy.sessions.client_metadata import ClientMetadata
from polar_proxy.sessions.hashing import HashedConversation
from polar_proxy.sessions.history import SessionHistory
from polar_proxy.sessions.lineage import Lineage
from polar_proxy.types import EngineRequest, Json, TokenIds

_CACHE_BYTES = 384 << 20


class PromptConfig(NamedTuple):
    """Digests of what shapes a prompt besides its messages: the tools shown and the template's options."""

    tools: bytes
    options: bytes


@dataclass(frozen=True, slots=True)
class LastRequest:
    """A parsed request and its hashed conversation. The session's next one usually begins with the same messages."""

    dialect: str
    parsed: ParsedRequest
    conversation: HashedConversation | None
    size: int
    """Bytes of its messages. What was parsed from them takes about as much again."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """The tokens of an answered call, and what decides how they can be continued."""

    ids: TokenIds
    """Prompt and answer, int32 [n]."""
    finish_reason: str | None
    ends_turn: bool
    """Its last token is an end-of-turn token."""
    config: PromptConfig
    reasoning: tuple[str, ...]
    """The beginnings of the reasoning in this answer and in earlier ones."""

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.ids.nbytes)


class ConversationCache:
    """Last requests and answered calls of all sessions, at most `capacity` bytes of them."""

    def __init__(self, capacity: int = _CACHE_BYTES) -> None:
        self._entries: LRUCache[Hashable, LastRequest | AnsweredCall] = LRUCache(capacity, lambda entry: entry.size)

    def get(self, key: Hashable) -> LastRequest | AnsweredCall | None:
        return self._entries.get(key)

    def put(self, key: Hashable, entry: LastRequest | AnsweredCall) -> None:
        """Insert or replace an entry. One that is larger than the capacity is not kept."""
        self._entries.pop(key, None)
        if entry.size <= self._entries.maxsize:
            self._entries[key] = entry


@dataclass(slots=True)
class SessionState:
    """A session while the gateway serves it."""

    session_id: str
    policy: Json
    history: SessionHistory = field(default_factory=SessionHistory)
    cache: ConversationCache = field(default_factory=ConversationCache)
    in_flight: int = 0
    """Calls that are being answered; see `begin` and `end`."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while `in_flight` is 0."""
    lost: int = 0
    """Calls that were answered but could not be committed: the rollout is incomplete and must not be trained on."""
    ended: int = 0
    """Calls that this gateway has answered, lost ones included."""
    elsewhere: int = 0
    """Calls in the store that this gateway did not answer: from other gateways, or from before it started."""

    def __post_init__(self) -> None:
        self.idle.set()

    def begin(self, calls: int) -> None:
        """Count calls as in flight until `end` is called."""
        self.in_flight += calls
        self.idle.clear()

    def end(self, calls: int) -> None:
        self.in_flight -= calls
        self.ended += calls
        if self.in_flight == 0:
            self.idle.set()

    def place(self, call_id: str, request: EngineRequest, metadata: ClientMetadata, *, now: float) -> Lineage:
        """Decide the lineage of a call, which is known to be in flight from now on. See `SessionHistory.place`."""
        last = self._last_request()
        previous = None if last is None else last.conversation
        return self.history.place(call_id, request, metadata, now=now, previous=previous)

    def last_parsed(self, dialect: str) -> ParsedRequest | None:
        """Return the session's last request if it came in this dialect."""
        last = self._last_request()
        return last.parsed if last is not None and last.dialect == dialect else None

    def remember_request(
        self, dialect: str, parsed: ParsedRequest, conversation: HashedConversation | None, size: int
    ) -> None:
        """Keep a request for the next one. `size` is that of its messages in bytes."""
        self.cache.put(self.session_id, LastRequest(dialect, parsed, conversation, size))

    def answered_call(self, call_id: str, choice: int) -> AnsweredCall | None:
        """Return an answer's tokens; None if they are not in memory."""
        found = self.cache.get((call_id, choice))
        assert not isinstance(found, LastRequest)
        return found

    def remember_answer(self, call_id: str, choice: int, answered: AnsweredCall) -> None:
        self.cache.put((call_id, choice), answered)

    def _last_request(self) -> LastRequest | None:
        found = self.cache.get(self.session_id)
        assert not isinstance(found, AnsweredCall)
        return found
