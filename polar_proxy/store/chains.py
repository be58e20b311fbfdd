"""Content-addressed chains: what many calls have in common is stored once.

A node's id is `blake2b-128(parent id, content)`, keyed by its kind, so an id stands for the whole chain from the
root to that node. A prompt is the chain of its token segments and a conversation is the chain of its messages; a
call refers to the last node. Two prompts that begin alike share the nodes up to the first segment that differs.

Invariant: where a node is stored, all nodes above it are stored (a foreign key says so to the database), and joining
the contents from the root down gives back the prompt exactly. Ids are over the content itself, not over its packed
form, so that a better codec later does not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from polar_proxy.types import TokenIds

NodeKind = Literal["message", "tools", "tokens"]

_ROOT = bytes(16)
_PERSON: dict[NodeKind, bytes] = {"message": b"polar message", "tools": b"polar tools", "tokens": b"polar tokens"}
_TURN_BLOCK = 1024
"""A turn longer than this is cut here too, so that templates without an end of turn after the system prompt share."""
_PLAIN_BLOCK = 256
"""Length of the segments where the engine's end-of-turn tokens are not known."""
SHORTEST_TURN = 32
"""Shorter turns are joined to the next one: a row costs more than it saves."""


@dataclass(frozen=True, slots=True)
class ChainNode:
    """One link. `length` and `total` count tokens in a chain of tokens, bytes in others; `depth` is 0 at the root."""

    id: bytes
    parent: bytes | None
    kind: NodeKind
    depth: int
    length: int
    total: int
    content: bytes | TokenIds


def content_hash(content: bytes) -> bytes:
    """16-byte id of a value that stands alone (engine descriptions, request settings)."""
    return blake2b(content, digest_size=16).digest()


def node_id(parent: bytes | None, kind: NodeKind, content: bytes | memoryview) -> bytes:
    digest = blake2b(parent or _ROOT, digest_size=16, person=_PERSON[kind])
    digest.update(content)
    return digest.digest()


def bytes_chain(kind: NodeKind, contents: Sequence[bytes], after: ChainNode | None = None) -> list[ChainNode]:
    """The chain of messages (or the single node of a tools list), root first; `after`: the node that it continues."""
    nodes: list[ChainNode] = []
    parent = None if after is None else after.id
    total = 0 if after is None else after.total
    for depth, content in enumerate(contents, 0 if after is None else after.depth + 1):
        total += len(content)
        this = node_id(parent, kind, content)
        nodes.append(ChainNode(this, parent, kind, depth, len(content), total, content))
        parent = this
    return nodes


def token_chain(ids: TokenIds, end_of_turn: Sequence[int], after: ChainNode | None = None) -> list[ChainNode]:
    """The chain of a prompt, root first; empty for an empty prompt. `ids`: int32 [n].

    `after`: the node whose chain is `ids[: after.total]`, cut by the same rule; then only what follows it is made.
    """
    little = np.ascontiguousarray(ids, dtype="<i4")
    raw = little.data.cast("B")
    nodes: list[ChainNode] = []
    parent = None if after is None else after.id
    offset = start = 0 if after is None else after.total
    ends = cuts(little[offset:], end_of_turn)
    for depth, end in enumerate((offset + end for end in ends), 0 if after is None else after.depth + 1):
        this = node_id(parent, "tokens", raw[4 * start : 4 * end])
        nodes.append(ChainNode(this, parent, "tokens", depth, end - start, end, little[start:end]))
        parent, start = this, end
    return nodes


def cuts(ids: TokenIds, end_of_turn: Sequence[int]) -> list[int]:
    """Where the segments of a prompt end, the last at its own end.

    Every cut but the last depends only on the tokens before it: that is what lets a longer prompt share the nodes.
    """
    size = int(ids.size)
    if size == 0:
        return []
    if not end_of_turn:
        return [*range(_PLAIN_BLOCK, size, _PLAIN_BLOCK), size]
    mask = ids == end_of_turn[0]
    for token in end_of_turn[1:]:
        mask |= ids == token
    stops: list[int] = (np.flatnonzero(mask) + 1).tolist()
    if not stops or stops[-1] != size:
        stops.append(size)
    ends: list[int] = []
    start = 0
    for end in stops:
        while end - start > _TURN_BLOCK:
            start += _TURN_BLOCK
            ends.append(start)
        if end == size or end - start >= SHORTEST_TURN:
            ends.append(end)
            start = end
    return ends


class StoredKeys:
    """Ids that this process knows to be stored, so that the hot path does not offer them to the database again.

    Two generations: when the young one is full it becomes the old one and what was old is forgotten. Forgetting costs
    one needless insert that the database ignores; nothing else.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        self._half = max(1, capacity // 2)
        self._young: dict[bytes, None] = {}
        self._old: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        if key in self._young:
            return True
        if key in self._old:
            self.add(key)
            return True
        return False

    def add(self, key: bytes) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = None

    def forget_all(self) -> None:
        self._young, self._old = {}, {}
