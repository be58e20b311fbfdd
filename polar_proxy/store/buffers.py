"""Token sequences that begin alike, kept in one buffer.

The prompts of a session mostly extend each other. Reading them into one growing array makes a prompt of n tokens, of
which k are new, cost k; and whoever compares two of them sees by their address that they begin alike.

Promise: what was handed out never changes. A sequence that goes on otherwise than the buffer does gets a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar_proxy.types import TokenIds

_LEAST = 1024


class _Buffer:
    __slots__ = ("ids", "size")

    def __init__(self, room: int) -> None:
        self.ids: TokenIds = np.empty(room, dtype=np.int32)
        self.size = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The first `size` tokens of a buffer."""

    _buffer: _Buffer
    size: int

    @staticmethod
    def none() -> Tokens:
        return Tokens(_Buffer(_LEAST), 0)

    @property
    def ids(self) -> TokenIds:
        """int32 [size], read-only."""
        view = self._buffer.ids[: self.size]
        view.flags.writeable = False
        return view

    def and_then(self, piece: TokenIds) -> Tokens:
        """These tokens and, behind them, `piece` (int32 [k])."""
        buffer, end = self._buffer, self.size + len(piece)
        there = min(buffer.size, end)
        if not np.array_equal(buffer.ids[self.size : there], piece[: there - self.size]):
            buffer = _Buffer(max(_LEAST, 2 * end))
            buffer.ids[: self.size] = self._buffer.ids[: self.size]
            buffer.size = there = self.size
        elif end > len(buffer.ids):  # views of the smaller array stay as they are
            room: TokenIds = np.empty(2 * end, dtype=np.int32)
            room[: buffer.size] = buffer.ids[: buffer.size]
            buffer.ids = room
        if end > there:
            buffer.ids[there:end] = piece[there - self.size :]
            buffer.size = end
        return Tokens(buffer, end)
