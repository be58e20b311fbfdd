"""Requests that are passed on to their provider, and the pieces of its response. Imports nothing of Polar."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ProviderRequest:
    """A model request as the agent sent it, with the agent's own key: the passthrough engine sends it on."""

    host: str
    target: str
    """Path and query."""
    headers: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    """By lower-case name."""
    body: bytes = field(repr=False)
    dialect: str
    read_items: Callable[[list[dict[str, Any]]], Sequence[Any]]
    """Reads the output items of a response (OpenAI Responses) into messages, as in a later request."""
    exchange: Callable[[ProviderRequest], AsyncIterator[tuple[ProviderPiece, list[dict[str, Any]]]]] | None = None
    """Sends the request over a WebSocket to the provider, and yields its pieces, each with the JSON objects in it."""


@dataclass(frozen=True, slots=True)
class ProviderPiece:
    """A piece of a provider's response, for the agent to get as it came."""

    data: bytes
    last: bool = False
    """The answer ends in this piece, so it is sent after the call is recorded."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of the response. Only the first piece has them and the `status`."""
    status: int = 200
