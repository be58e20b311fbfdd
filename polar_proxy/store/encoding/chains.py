"""Content-addressed chains: content that many calls share is stored once.

A node is a message, a list of tools or a segment of prompt tokens. Its parent is the node before it. A chain is a node
with all its ancestors, from the first (the root) on. The id of a node is `blake2b-128(parent id, content)`, keyed by
the node's kind, so it identifies the whole chain. A prompt is the chain of its segments, a conversation the chain of
its messages, and a call refers to the last node of each. Two prompts with a common beginning share the nodes up to the
first different segment.

Invariant: if a node is stored, all its ancestors are stored (a foreign key enforces it), and joining the contents from
the root down returns the prompt exactly. Ids depend on the content and not on its packed form, so that a better codec
does not change them.

The serializer remembers the chains of each session's last request (`RequestChains`), so that the next request hashes
only what it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from polar_proxy.sequences import is_any
from polar_proxy.types import TokenIds

NodeKind = Literal["message", "tools", "tokens"]

MIN_SEGMENT = 32
"""Minimum number of tokens in every segment but the last. A shorter turn is joined with the next turn. A row
of its own would cost more bytes than it saves when several prompts share the row."""
_MAX_SEGMENT = 1024
"""Maximum number of tokens in a segment. A longer turn becomes several segments, so that a long system prompt without
an end of turn is shared too."""
_PLAIN_SEGMENT = 256
"""Number of tokens in a segment if the engine's end-of-turn tokens are not known."""
_NODE_BYTES = 300
"""Memory in bytes that a message and its node take, in addition to the bytes of the message's text."""
_ROOT = bytes(16)
_PERSON: dict[NodeKind, bytes] = {"message": b"polar message", "tools": b"polar tools", "tokens": b"polar tokens"}


@dataclass(frozen=True, slots=True)
class ChainNode:
    """A node of a chain. Lengths count tokens in a chain of tokens and bytes in other chains."""

    id: bytes
    parent: bytes | None
    kind: NodeKind
    depth: int
    """Number of ancestors: 0 at the root."""
    length: int
    chain_length: int
    """Length of this node and all its ancestors."""
    content: bytes | TokenIds

    def without_content(self) -> ChainNode:
        return ChainNode(self.id, self.parent, self.kind, self.depth, self.length, self.chain_length, b"")


def content_hash(content: bytes) -> bytes:
    """Return the 16-byte id of a value without a parent (engine descriptions, request settings)."""
    return blake2b(content, digest_size=16).digest()


def node_id(parent: bytes | None, kind: NodeKind, content: bytes | memoryview) -> bytes:
    digest = blake2b(parent or _ROOT, digest_size=16, person=_PERSON[kind])
    digest.update(content)
    return digest.digest()


def bytes_chain(kind: NodeKind, contents: Sequence[bytes], after: ChainNode | None = None) -> list[ChainNode]:
    """Return the nodes of a conversation, or the single node of a list of tools, root first.

    `after`: the parent of the first node; None if the first node is a root.
    """
    nodes: list[ChainNode] = []
    parent = None if after is None else after.id
    chain_length = 0 if after is None else after.chain_length
    for depth, content in enumerate(contents, 0 if after is None else after.depth + 1):
        chain_length += len(content)
        this = node_id(parent, kind, content)
        nodes.append(ChainNode(this, parent, kind, depth, len(content), chain_length, content))
        parent = this
    return nodes


def token_chain(ids: TokenIds, end_of_turn: Sequence[int], after: ChainNode | None = None) -> list[ChainNode]:
    """Return the nodes of a prompt (int32 [n]), root first; none for an empty prompt.

    `after`: return only the nodes of this prompt's chain that follow this node. The first `after.chain_length` ids of
    the prompt end with this node, and this length must be a cut of `cut_segments`.
    """
    little = np.ascontiguousarray(ids, dtype="<i4")
    raw = little.data.cast("B")
    nodes: list[ChainNode] = []
    parent = None if after is None else after.id
    offset = start = 0 if after is None else after.chain_length
    ends = cut_segments(little[offset:], end_of_turn)
    for depth, end in enumerate((offset + end for end in ends), 0 if after is None else after.depth + 1):
        this = node_id(parent, "tokens", raw[4 * start : 4 * end])
        nodes.append(ChainNode(this, parent, "tokens", depth, end - start, end, little[start:end]))
        parent, start = this, end
    return nodes


def cut_segments(ids: TokenIds, end_of_turn: Sequence[int]) -> list[int]:
    """Return the ends of the segments of a prompt; the last is the end of the prompt.

    Every cut except the last depends only on the tokens before it, so that a longer prompt shares the nodes.
    """
    size = int(ids.size)
    if size == 0:
        return []
    if not end_of_turn:
        return [*range(_PLAIN_SEGMENT, size, _PLAIN_SEGMENT), size]
    stops: list[int] = (np.flatnonzero(is_any(ids, end_of_turn)) + 1).tolist()
    if not stops or stops[-1] != size:
        stops.append(size)
    ends: list[int] = []
    start = 0
    for end in stops:
        while end - start > _MAX_SEGMENT:
            start += _MAX_SEGMENT
            ends.append(start)
        if end == size or end - start >= MIN_SEGMENT:
            ends.append(end)
            start = end
    return ends


@dataclass(frozen=True, slots=True)
class RequestChains:
    """The messages and the prompt of one request, and the nodes of their chains.

    The `content` of the nodes is empty, because it is in `messages` and `prompt` already. Invariant: all nodes are
    stored or belong to the batch that is being serialized.
    """

    messages: tuple[bytes, ...]
    message_nodes: tuple[ChainNode, ...]
    end_of_turn: tuple[int, ...]
    prompt: TokenIds
    """The prompt without its last segment. The last segment ends at the end of the prompt, not at a cut. In a longer
    prompt, the segment at this place may be longer."""
    prompt_node: ChainNode | None
    """The node at the end of `prompt`; None if `prompt` is empty."""

    def extend_messages(self, messages: Sequence[bytes]) -> tuple[tuple[ChainNode, ...], int]:
        """Return the chain of a later request's `messages`, and how many nodes at its start are also in this request's
        chain. The caller need not store those nodes again."""
        shared = 0
        for message, known in zip(messages, self.messages, strict=False):
            if message != known:
                break
            shared += 1
        stored = self.message_nodes[:shared]
        return (*stored, *bytes_chain("message", messages[shared:], stored[-1] if stored else None)), shared

    def extend_prompt(self, prompt: TokenIds, end_of_turn: tuple[int, ...]) -> tuple[list[ChainNode], ChainNode | None]:
        """Return the nodes that a later prompt adds to this request's chain, and the node that they follow.

        If the later prompt does not continue `self.prompt`, return all nodes of the later prompt, and None.
        """
        size = self.prompt.size
        continues = (
            self.prompt_node is not None
            and self.end_of_turn == end_of_turn
            and prompt.size >= size
            and np.array_equal(prompt[:size], self.prompt)
        )
        after = self.prompt_node if continues else None
        return token_chain(prompt, end_of_turn, after), after

    @property
    def size(self) -> int:
        """Approximate memory in bytes. Every node is counted whole, because few are shared with other requests."""
        return sum(map(len, self.messages)) + _NODE_BYTES * len(self.messages) + int(self.prompt.nbytes) + 200


NO_CHAINS = RequestChains((), (), (), np.empty(0, np.int32), None)
