"""Token sequences, and conversations, that begin alike, kept in one buffer.

The prompts of a session mostly extend each other. Reading them into one growing buffer makes a prompt of n tokens, of
which k are new, cost k; and whoever compares two of them sees by their address that they begin alike. So does what the
codec needs to know of what stands before a piece.

Promise: what was handed out never changes. A sequence that goes on otherwise than the buffer does gets a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar_proxy.store.codec import CONTEXT, ids_of, in_width
from polar_proxy.types import TokenIds

_LEAST = 1024


class _TokenBuffer:
    """`size` tokens as bytes, which pieces come and are referred to as; an array is made of them when one is wanted."""

    __slots__ = ("_array", "_bytes", "_written", "size", "width")

    def __init__(self, content: bytes | bytearray = b"", width: int = 1) -> None:
        self.width = width
        """Bytes that each token takes: as many as the widest piece so far."""
        self.size = len(content) // width
        self._bytes = {width: bytearray(content)}
        """Also in other widths, as far as they were asked for."""
        self._array: TokenIds = np.empty(0, dtype=np.int32)
        self._written = 0

    def part(self, start: int, end: int, width: int) -> bytearray:
        """Tokens [start, end) in `width` bytes each."""
        if width > self.width:
            self.widen(width)
        found, own = self._bytes.setdefault(width, bytearray()), self.width
        if (known := len(found) // width) < end:
            found += in_width(self._bytes[own][known * own : end * own], own, width)
        return found[start * width : end * width]

    def widen(self, width: int) -> None:
        self._bytes[width] = bytearray(in_width(self._bytes[self.width], self.width, width))
        self.width = width

    def add(self, piece: bytes | bytearray) -> None:
        """Tokens of the buffer's width."""
        self._bytes[self.width] += piece
        self.size += len(piece) // self.width

    def array(self, size: int) -> TokenIds:
        """The first `size` tokens. Views that were handed out before stay as they are."""
        if self._written < size:
            start, end = self._written, self.size
            if end > len(self._array):
                room: TokenIds = np.empty(max(_LEAST, 2 * end if start else end), dtype=np.int32)
                room[:start] = self._array[:start]
                self._array = room
            (self._array[start:end],) = ids_of([self.part(start, end, self.width)], self.width)
            self._written = end
        return self._array[:size]


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """The first `size` tokens of a buffer."""

    _buffer: _TokenBuffer
    size: int

    @staticmethod
    def none() -> TokenPrefix:
        return TokenPrefix(_TokenBuffer(), 0)

    @property
    def ids(self) -> TokenIds:
        """int32 [size], read-only."""
        view = self._buffer.array(self.size)
        view.flags.writeable = False
        return view

    def low_bytes(self, width: int) -> bytearray:
        """As `codec.IdsBefore` says."""
        return self._buffer.part(max(0, self.size - CONTEXT // width), self.size, width)

    def and_then(self, piece: bytes | bytearray, width: int) -> TokenPrefix:
        """These tokens and, behind them, those of `piece`, of `width` bytes each (`codec.unpack_ids_bytes`)."""
        buffer = self._buffer
        if width > buffer.width:
            buffer.widen(width)
        piece, width = in_width(piece, width, buffer.width), buffer.width
        end = self.size + len(piece) // width
        there = min(buffer.size, end)
        if there > self.size:
            known = (there - self.size) * width
            if buffer.part(self.size, there, width) == piece[:known]:
                piece = piece[known:]
            else:
                buffer = _TokenBuffer(buffer.part(0, self.size, width), width)
        if end > buffer.size:
            buffer.add(piece)
        return TokenPrefix(buffer, end)


@dataclass(frozen=True, slots=True)
class TextPrefix:
    """A conversation as the codec sees it: its messages in a row, of which the end matters."""

    _buffer: bytearray
    _size: int

    @staticmethod
    def none() -> TextPrefix:
        return TextPrefix(bytearray(), 0)

    @property
    def end(self) -> bytearray:
        """Its last `CONTEXT` bytes, as `codec.bytes_before` gives them."""
        return self._buffer[max(0, self._size - CONTEXT) : self._size]

    def and_then(self, content: bytes) -> TextPrefix:
        """This conversation and a message behind it."""
        buffer = self._buffer if len(self._buffer) == self._size else self.end
        buffer += content
        return TextPrefix(buffer, len(buffer))
