"""Model requests that are passed on to their provider, and the pieces of the provider's response. Imports nothing of
Polar."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ProviderRequest:
    """A model request as the agent sent it, with the agent's own key: the passthrough engine sends it on."""

    host: str
    target: str = field(repr=False)
    """Path and query, percent-encoded. The query may hold the agent's key."""
    headers: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    """(name in lower case, value) of each header."""
    body: bytes = field(repr=False)
    dialect: str
    read_items: Callable[[list[dict[str, Any]]], Sequence[Any]]
    """Converts output items of the OpenAI Responses API to messages, exactly as if a later request contained these
    items."""
    exchange: Callable[[str, ProviderRequest], AsyncIterator[ProviderPiece]] | None = None
    """Sends the request over a WebSocket to the provider's URL. Yields the answer's pieces, one event in each."""


@dataclass(frozen=True, slots=True)
class ProviderPiece:
    """A piece of a provider's response, to be forwarded to the agent unchanged."""

    data: bytes
    last: bool = False
    """True if the answer ends in this piece. The piece is then sent only after the call is recorded."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """The headers of the response. Only the first piece has the headers and the status of the response."""
    status: int = 200
