"""What each session asked last, so that a prompt which continues it is compared (memory speed) and not hashed again.

Invariant: all nodes of a remembered chain are stored, or are in the batch that is being packed; when a batch fails,
everything is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cachetools import LRUCache

from polar_proxy.store.chains import ChainNode, bytes_chain, token_chain
from polar_proxy.types import TokenIds

_CAPACITY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class RequestChains:
    """The chains of one request. Of the prompt, the part up to the last cut that a longer prompt has as well."""

    messages: tuple[bytes, ...]
    message_links: tuple[ChainNode, ...]
    end_of_turn: tuple[int, ...]
    prompt: TokenIds
    prompt_link: ChainNode | None
    """The node at the end of `prompt`; None for an empty one."""

    @property
    def size(self) -> int:
        return sum(map(len, self.messages)) + int(self.prompt.nbytes) + 200


class ChainCache:
    """By session. The sessions that asked least recently are forgotten first."""

    def __init__(self, capacity: int = _CAPACITY_BYTES) -> None:
        self._asked: LRUCache[str, RequestChains] = LRUCache(capacity, lambda asked: asked.size)

    def get(self, session_id: str) -> RequestChains | None:
        return self._asked.get(session_id)

    def put(self, session_id: str, asked: RequestChains) -> None:
        self._asked.pop(session_id, None)
        if asked.size <= self._asked.maxsize:
            self._asked[session_id] = asked

    def forget_all(self) -> None:
        self._asked.clear()


def message_chain(messages: Sequence[bytes], last: RequestChains | None) -> tuple[tuple[ChainNode, ...], int]:
    """The chain of a conversation, and how many of its first nodes are known to be stored."""
    shared = 0
    if last is not None:
        for one, other in zip(messages, last.messages, strict=False):
            if one != other:
                break
            shared += 1
    known = last.message_links[:shared] if last is not None else ()
    return (*known, *bytes_chain("message", messages[shared:], after=known[-1] if known else None)), shared


def prompt_chain(
    prompt: TokenIds, end_of_turn: tuple[int, ...], last: RequestChains | None
) -> tuple[list[ChainNode], ChainNode | None]:
    """The nodes of a prompt that are not known to be stored, and the stored one that they continue."""
    after = None
    if last is not None and last.prompt_link is not None and last.end_of_turn == end_of_turn:
        size = last.prompt.size
        if prompt.size >= size and np.array_equal(prompt[:size], last.prompt):
            after = last.prompt_link
    return token_chain(prompt, end_of_turn, after=after), after
