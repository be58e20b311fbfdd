"""Packed cells: how bytes, token ids and log-probabilities are stored in a binary column. `TokenPrefix` holds an
unpacked token sequence.

A cell is two header bytes and a body. Byte 0 is the version of this format. Byte 1 describes the body:

    bits 0-2  kind: 0 bytes, 1 token ids (int32), 2 log-probabilities (float32)
    bits 3-5  width: bytes stored per number (ids: the fewest of 1-4 that hold all of them; float32: 4; bytes: 1)
    bit  6    the body is raw deflate (RFC 1951) with the preceding content as preset dictionary
    bit  7    the body is a zstd frame (used only if it is smaller)

Preceding content is the conversation before a message, or the tokens before an answer or a part of a prompt. It
contains most of what follows: an agent lists a file, quotes it, then edits it. As a dictionary it saves a third of a
rollout's bytes. The dictionary is the last `CONTEXT` bytes of the preceding content, in which a token id has only its
`width` lowest bytes. zstd accepts dictionaries too, but preparing one takes twice the time.

Ids are stored as little-endian numbers of `width` bytes. Log-probabilities are stored in byte planes (the lowest byte
of every number, then the next byte of every number, ...), because their high bytes resemble each other.

Promise: unpacking returns exactly what was packed, bit for bit, including NaN payloads. A cell of an unknown version or
kind raises StoreError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from polar_proxy.errors import StoreError
from polar_proxy.store.encoding.packed_json import (
    BYTES,
    DEFLATE,
    MAX_DEFLATE_LENGTH,
    VERSION,
    ZSTD,
    deflate,
    inflate,
    read_header,
)
from polar_proxy.types import Logprobs, TokenIds

_IDS, _LOGPROBS = 1, 2
CONTEXT = 32_768
"""Maximum size of a dictionary in bytes: the size of deflate's window. Stored cells cannot be unpacked with another
value."""
NO_IDS: TokenIds = np.empty(0, dtype=np.int32)

_MIN_LENGTH = 32
"""Length in bytes below which a body is stored uncompressed, because zstd rarely makes such a short body shorter."""
_MAX_LENGTH = 512 << 20
"""Length in bytes above which a body is refused when it is read, because only a forged cell has such a body."""
_MIN_CAPACITY = 1024


class CellCodec:
    """Codec of cells, the packed values of binary columns. Use a codec in one thread at a time, because its zstd
    contexts are not thread-safe."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor()
        self._decompressor = zstandard.ZstdDecompressor()

    def pack_bytes(self, content: bytes, before: bytes = b"") -> bytes:
        """Pack bytes. `before`: the preceding content (`bytes_before`), needed again for unpacking."""
        return self._cell(BYTES, 1, content, before[-CONTEXT:])

    def pack_ids(self, ids: TokenIds, before: TokenIds = NO_IDS) -> bytes:
        """Pack int32 [n]. `before`: int32 [m], the preceding tokens, needed again for unpacking."""
        width = 4 if ids.size == 0 or int(ids.min()) < 0 else max(1, (int(ids.max()).bit_length() + 7) // 8)
        return self._cell(_IDS, width, low_bytes(ids, width), _dictionary(before, width))

    def pack_logprobs(self, logprobs: Logprobs) -> bytes:
        """Pack log-probabilities, float32 [n]."""
        numbers = np.ascontiguousarray(logprobs, dtype="<f4")
        return self._cell(_LOGPROBS, 4, numbers.view(np.uint8).reshape(-1, 4).T.tobytes())

    def unpack_bytes(self, cell: bytes, before: bytes = b"") -> bytes:
        return self._body(cell, BYTES, before[-CONTEXT:])[0]

    def unpack_ids(self, cell: bytes, before: TokenIds | TokenPrefix = NO_IDS) -> TokenIds:
        return ids_from_bytes(*self.unpack_id_bytes(cell, before))

    def unpack_id_bytes(self, cell: bytes, before: TokenIds | TokenPrefix = NO_IDS) -> tuple[bytes, int]:
        """Return the ids as little-endian bytes, and the number of bytes per id (see `ids_from_bytes`)."""
        dictionary: bytes | bytearray = b""
        if len(cell) > 1 and cell[1] & DEFLATE:
            width = cell[1] >> 3 & 7
            dictionary = _dictionary(before, width) if isinstance(before, np.ndarray) else before.low_bytes(width)
        return self._body(cell, _IDS, dictionary)

    def unpack_logprobs(self, cell: bytes) -> Logprobs:
        planes = np.frombuffer(self._body(cell, _LOGPROBS)[0], np.uint8).reshape(4, -1)
        logprobs: Logprobs = np.ascontiguousarray(planes.T).view("<f4").reshape(-1).astype(np.float32, copy=False)
        return logprobs

    def _cell(self, kind: int, width: int, body: bytes, dictionary: bytes = b"") -> bytes:
        flags = kind | width << 3
        if dictionary and _MIN_LENGTH <= len(body) <= MAX_DEFLATE_LENGTH:
            packed = deflate(body, dictionary)
            if len(packed) < len(body):
                return bytes((VERSION, flags | DEFLATE)) + packed
        if len(body) >= _MIN_LENGTH:
            packed = self._compressor.compress(body)
            if len(packed) < len(body):
                return bytes((VERSION, flags | ZSTD)) + packed
        return bytes((VERSION, flags)) + body

    def _body(self, cell: bytes, kind: int, dictionary: bytes | bytearray = b"") -> tuple[bytes, int]:
        """Return the uncompressed body, and its width (bytes per number)."""
        width, body = read_header(cell, kind)
        if cell[1] & DEFLATE:
            body = inflate(body, dictionary)
        elif cell[1] & ZSTD:
            try:
                _frame_size(body)
                body = self._decompressor.decompress(body)
            except zstandard.ZstdError as error:
                raise StoreError("A stored value cannot be decompressed: the database is damaged") from error
        if len(body) % width:
            raise StoreError("A stored array is cut short: the database is damaged")
        return body, width


def width(cell: bytes) -> int:
    """Return the width of a cell (bytes per number), which its header states."""
    return cell[1] >> 3 & 7 if len(cell) > 1 else 0


def unpacked_size(cell: bytes) -> int | None:
    """Return how many bytes a cell of `CellCodec` unpacks to, from its header alone.

    None for a deflated cell: its header has no size, and it unpacks to at most `MAX_DEFLATE_LENGTH` bytes. Raises
    StoreError for a zstd frame that states no size, or a size above Polar's maximum.
    """
    if len(cell) < 2:
        raise StoreError("A stored value is shorter than its header: the database is damaged")
    if cell[1] & DEFLATE:
        return None
    return _frame_size(cell[2:]) if cell[1] & ZSTD else len(cell) - 2


def _frame_size(frame: bytes) -> int:
    try:
        size: int = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise StoreError("A stored value cannot be decompressed: the database is damaged") from error
    if not 0 <= size <= _MAX_LENGTH:
        what = "does not say its size" if size < 0 else f"unpacks to more than {_MAX_LENGTH >> 20} MiB"
        raise StoreError(f"A stored value {what}: the database is damaged")
    return size


def bytes_before(contents: Sequence[bytes]) -> bytes:
    """Return the preset dictionary for what follows `contents`: the last `CONTEXT` bytes of the joined contents."""
    pieces: list[bytes] = []
    missing = CONTEXT
    for content in reversed(contents):
        pieces.append(content[-missing:])
        missing -= len(content)
        if missing <= 0:
            break
    return b"".join(reversed(pieces))


def _dictionary(before: TokenIds, width: int) -> bytes:
    return low_bytes(before[-(CONTEXT // width) :], width)


_LOW_BYTES = {
    width: np.dtype({"names": ["low"], "formats": [f"V{width}"], "offsets": [0], "itemsize": 4})
    for width in (1, 2, 3, 4)
}
"""width -> a numpy type of 4-byte numbers. Its field `low` has the `width` lowest bytes as one item, so that numpy
copies them together."""


def low_bytes(ids: TokenIds, width: int) -> bytes:
    """Return the `width` lowest bytes of each id, little-endian."""
    found: bytes = np.ascontiguousarray(ids, dtype="<i4").view(_LOW_BYTES[width])["low"].tobytes()
    return found


def ids_from_bytes(body: bytes | bytearray, width: int) -> TokenIds:
    """Convert little-endian numbers of `width` bytes each to ids, int32 [n]."""
    if width != 3:
        return np.frombuffer(body, {1: "<u1", 2: "<u2", 4: "<i4"}[width]).astype(np.int32)
    numbers = np.zeros((len(body) // 3, 4), np.uint8)
    numbers[:, :3] = np.frombuffer(body, np.uint8).reshape(-1, 3)
    ids: TokenIds = numbers.view("<i4").reshape(-1).astype(np.int32, copy=False)
    return ids


def change_width(body: bytes | bytearray, old: int, new: int) -> bytes | bytearray:
    """Convert ids from `old` to `new` bytes per id: add zero bytes to each, or drop its highest bytes."""
    if old == new:
        return body
    found = bytearray(len(body) // old * new)
    for place in range(min(old, new)):
        found[place::new] = body[place::old]
    return found


class _TokenBuffer:
    """A growing sequence of tokens; `size` is their number so far.

    The tokens are kept as bytes, because they are read and compared as bytes. `array` converts the bytes to ids when a
    caller needs ids.
    """

    __slots__ = ("_array", "_bytes", "_filled", "size", "width")

    def __init__(self, content: bytes | bytearray = b"", width: int = 1) -> None:
        self.width = width
        """Number of bytes per token. The number grows before wider tokens are appended, or when `part` needs more."""
        self.size = len(content) // width
        self._bytes = {width: bytearray(content)}
        """Width (bytes per token) -> the tokens in this width. The entry of `self.width` has all tokens. The entry of
        another width has only the first tokens, as many as were needed so far."""
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
        """Append the tokens in `piece`, which has `self.width` bytes for each token."""
        self._bytes[self.width] += piece
        self.size += len(piece) // self.width

    def array(self, size: int) -> TokenIds:
        """Return the first `size` tokens, int32 [size]. Arrays that were returned earlier stay valid."""
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
    """The first `size` tokens of a buffer.

    The prompts of a session mostly extend each other. With one buffer, reading a prompt with k new tokens costs O(k),
    and two prompts with a common prefix share its memory, which makes comparing them cheap. A prefix never changes:
    an extension that differs from the rest of the buffer gets a new buffer.
    """

    _buffer: _TokenBuffer
    size: int

    @staticmethod
    def empty() -> TokenPrefix:
        return TokenPrefix(_TokenBuffer(), 0)

    @property
    def ids(self) -> TokenIds:
        """The tokens of the prefix, int32 [size], read-only."""
        view = self._buffer.array(self.size)
        view.flags.writeable = False
        return view

    def low_bytes(self, width: int) -> bytearray:
        """Return the `width` lowest bytes, little-endian, of each of the last `CONTEXT // width` tokens."""
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
