"""What each session asked last. The next request begins with it, as a rule, and what they share is not read twice.

Only time is saved by it: whatever is forgotten is read again.
"""

from __future__ import annotations

from dataclasses import dataclass

from polar_proxy.bounded import Bounded
from polar_proxy.dialects import ParsedRequest
from polar_proxy.sessions import HashedConversation

_KEPT_BYTES = 128 << 20
"""Of messages, as bytes; what was read of them takes about as much again."""


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request as it was parsed, and its conversation as history read it."""

    dialect: str
    parsed: ParsedRequest
    read: HashedConversation | None


class ParseCache:
    """By session. Those that asked least recently go first."""

    def __init__(self, capacity: int = _KEPT_BYTES) -> None:
        self._known = Bounded[str, CachedRequest](capacity)

    def get(self, session_id: str, dialect: str) -> CachedRequest | None:
        """What this session asked last, in this dialect."""
        found = self._known.get(session_id)
        return found if found is not None and found.dialect == dialect else None

    def put(
        self, session_id: str, dialect: str, parsed: ParsedRequest, read: HashedConversation | None, size: int
    ) -> None:
        """`size` counts the bytes of its messages."""
        self._known.put(session_id, CachedRequest(dialect, parsed, read), size)
