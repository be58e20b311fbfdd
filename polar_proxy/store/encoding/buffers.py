"""Token sequences with common beginnings, kept in one growing buffer.

The prompts of a session mostly extend each other. With one buffer, reading a prompt with k new tokens costs O(k), and
two prompts with a common prefix share its memory, which makes comparing them cheap.

Promise: a sequence never changes. A sequence that continues differently from its buffer gets a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar_proxy.store.encoding.cells import CONTEXT, change_width, ids_from_bytes
from polar_proxy.types import TokenIds

_MIN_CAPACITY = 1024


class _TokenBuffer:
    """A growing sequence of `size` tokens. It is kept as bytes, because it is read and compared as bytes; the array is
    filled on demand."""

    __slots__ = ("_array", "_bytes", "_filled", "size", "width")

    def __init__(self, content: bytes | bytearray = b"", width: int = 1) -> None:
        self.width = width
        """Bytes per token: those of the widest piece so far."""
        self.size = len(content) // width
        self._bytes = {width: bytearray(content)}
        """The tokens by width. Widths other than `width` hold a prefix, extended on demand."""
        self._array: TokenIds = np.empty(0, dtype=np.int32)
        self._filled = 0

    def part(self, start: int, end: int, width: int) -> bytearray:
        """Return the tokens [start, end) with `width` bytes each."""
        if width > self.width:
            self.widen(width)
        found = self._bytes.setdefault(width, bytearray())
        if (known := len(found) // width) < end:
            found += change_width(self._bytes[self.width][known * self.width : end * self.width], self.width, width)
        return found[start * width : end * width]

    def widen(self, width: int) -> None:
        self._bytes[width] = bytearray(change_width(self._bytes[self.width], self.width, width))
        self.width = width

    def append(self, piece: bytes | bytearray) -> None:
        """Append tokens of the buffer's width."""
        self._bytes[self.width] += piece
        self.size += len(piece) // self.width

    def array(self, size: int) -> TokenIds:
        """Return the first `size` tokens. Earlier views stay valid."""
        if self._filled < size:
            start, end = self._filled, self.size
            if end > len(self._array):
                grown: TokenIds = np.empty(max(_MIN_CAPACITY, 2 * end if start else end), dtype=np.int32)
                grown[:start] = self._array[:start]
                self._array = grown
            self._array[start:end] = ids_from_bytes(self.part(start, end, self.width), self.width)
            self._filled = end
        return self._array[:size]


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """The first `size` tokens of a buffer. Satisfies `cells.TokenContext`."""

    _buffer: _TokenBuffer
    size: int

    @staticmethod
    def empty() -> TokenPrefix:
        return TokenPrefix(_TokenBuffer(), 0)

    @property
    def ids(self) -> TokenIds:
        """int32 [size], read-only."""
        view = self._buffer.array(self.size)
        view.flags.writeable = False
        return view

    def low_bytes(self, width: int) -> bytearray:
        return self._buffer.part(max(0, self.size - CONTEXT // width), self.size, width)

    def extended(self, piece: bytes | bytearray, width: int) -> TokenPrefix:
        """Return these tokens followed by those of `piece`, which has `width` bytes per token."""
        buffer = self._buffer
        if width > buffer.width:
            buffer.widen(width)
        piece, width = change_width(piece, width, buffer.width), buffer.width
        end = self.size + len(piece) // width
        common_end = min(buffer.size, end)
        if common_end > self.size:
            known = (common_end - self.size) * width
            if buffer.part(self.size, common_end, width) == piece[:known]:
                piece = piece[known:]
            else:
                buffer = _TokenBuffer(buffer.part(0, self.size, width), width)
        if end > buffer.size:
            buffer.append(piece)
        return TokenPrefix(buffer, end)
