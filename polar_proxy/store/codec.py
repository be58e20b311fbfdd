"""How bytes, token ids and log-probabilities are packed into a database cell.

A cell is two header bytes and a body. Byte 0 is the version of this format; byte 1 says what the body is:

    bits 0-2  kind: 0 bytes, 1 token ids (int32), 2 and 3 log-probabilities (float32)
    bits 3-5  width: bytes kept per number (ids: the narrowest of 1-4 that holds all of them; float32: 4)
    bit  6    the body is raw deflate (RFC 1951) with what stands before it as the preset dictionary
    bit  7    the body is a zstd frame (only where that is smaller)

Numbers lie in byte planes: first the lowest byte of every number, then the next byte of every number, and so on,
little-endian. The high bytes of neighbours resemble each other, so zstd finds more in planes than in whole numbers.
Under bit 6 they lie whole, little-endian: there it is the repetition of earlier tokens that is found.

What stands before a short piece (the conversation before a message, the prompt before an answer) tells most of it: a
file is listed, then quoted, then edited. A third of a run's bytes is saved so. `CONTEXT` bytes of it are used; of
tokens, the lowest `width` bytes of each. zstd takes a dictionary as well, but costs twice the time for it.

The mantissas of log-probabilities are noise, their exponents are not. Of kind 3 each number's bits are rotated left by
one, so that the exponent is a byte of its own; the body is the raw deflate stream of the exponents, then the three
lower planes as they are. What cannot be less than 23 bits a token takes about 28.

Promise: unpacking gives back exactly what was packed, bit for bit, NaN payloads included. A cell of an unknown
version or kind raises StoreError; it is never guessed at.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from polar_proxy.errors import StoreError
from polar_proxy.types import Logprobs, TokenIds

VERSION = 1
CONTEXT = 32_768
"""Bytes of what stands before a piece that its packing may refer to: as far as deflate sees. Part of the format."""
NO_IDS: TokenIds = np.empty(0, dtype=np.int32)

_BYTES, _IDS, _FLOATS, _ROTATED = 0, 1, 2, 3
_DEFLATE = 0x40
_ZSTD = 0x80
_TOO_SHORT = 32
"""A zstd frame of fewer bytes than this is never smaller than what it holds."""
_TOO_LONG_FOR_DEFLATE = 16_384
"""Longer pieces say enough by themselves, and zstd is five times faster."""
_DEFLATE_LEVEL = 5


class TokenContext(Protocol):
    """Tokens that stand before a piece, by whoever has their bytes at hand."""

    def low_bytes(self, width: int) -> bytes | bytearray:
        """The `width` lowest bytes, little-endian, of each of the last `CONTEXT // width` tokens."""
        ...


class CellCodec:
    """Packs and unpacks cells. One instance serves one thread at a time (it holds zstd contexts)."""

    def __init__(self, level: int = 3) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack_bytes(self, content: bytes, before: bytes = b"") -> bytes:
        """`before`: what stands before it (`bytes_before`); the same must be given to unpack it."""
        if before and (packed := _deflated(content, before[-CONTEXT:])) is not None:
            return bytes((VERSION, _BYTES | 1 << 3 | _DEFLATE)) + packed
        return self._cell(_BYTES, 1, content)

    def pack_ids(self, ids: TokenIds, before: TokenIds = NO_IDS) -> bytes:
        """`ids`: int32 [n]; `before`: int32 [m], the tokens before them, to be given again for unpacking."""
        width = 4 if ids.size == 0 or int(ids.min()) < 0 else max(1, (int(ids.max()).bit_length() + 7) // 8)
        if before.size and (packed := _deflated(low_bytes(ids, width), _ids_before(before, width))) is not None:
            return bytes((VERSION, _IDS | width << 3 | _DEFLATE)) + packed
        return self._cell(_IDS, width, _planes(ids, "<i4", width))

    def pack_logprobs(self, logprobs: Logprobs) -> bytes:
        """`logprobs`: float32 [n]."""
        plain = self._cell(_FLOATS, 4, _planes(logprobs, "<f4", 4))
        rotated = _rotated(logprobs)
        return plain if len(plain) <= len(rotated) + 2 else bytes((VERSION, _ROTATED | 4 << 3)) + rotated

    def unpack_bytes(self, cell: bytes, before: bytes | bytearray = b"") -> bytes:
        width, body = _head(cell, _BYTES)
        return _inflated(body, before[-CONTEXT:]) if cell[1] & _DEFLATE else self._body(cell, width, body)

    def unpack_ids(self, cell: bytes, before: TokenIds | TokenContext = NO_IDS) -> TokenIds:
        body, width = self.unpack_ids_bytes(cell, before)
        return ids_of([body], width)[0]

    def unpack_ids_bytes(self, cell: bytes, before: TokenIds | TokenContext = NO_IDS) -> tuple[bytes, int]:
        """The ids as bytes, and how many of them, little-endian, each has: an array (`ids_of`) can be had later."""
        width, body = _head(cell, _IDS)
        if cell[1] & _DEFLATE:
            known = _ids_before(before, width) if isinstance(before, np.ndarray) else before.low_bytes(width)
            body = _inflated(body, known)
            if len(body) % width:
                raise StoreError("A stored array is cut short: the database is damaged")
            return body, width
        planes = self._body(cell, width, body)
        if width == 1:
            return planes, width
        whole, count = bytearray(planes), len(planes) // width
        for plane in range(width):
            whole[plane::width] = planes[plane * count : (plane + 1) * count]
        return bytes(whole), width

    def unpack_logprobs(self, cell: bytes) -> Logprobs:
        return self.unpack_all_logprobs([cell])[0]

    def unpack_all_logprobs(self, cells: Sequence[bytes]) -> list[Logprobs]:
        """Those of many cells, which are put together at once: parts of one array."""
        if not cells:
            return []
        found = [self._planes_of(cell) for cell in cells]
        sizes = [len(planes[3]) for planes, _ in found]
        bits = _from_planes(b"".join(planes[plane] for plane in range(4) for planes, _ in found), 4).view("<u4")
        turned = np.repeat([rotated for _, rotated in found], sizes)
        bits = np.where(turned, (bits >> 1) | (bits << 31), bits)
        logprobs: Logprobs = bits.view("<f4").astype(np.float32, copy=False)
        ends = np.cumsum(sizes).tolist()
        return [logprobs[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _planes_of(self, cell: bytes) -> tuple[list[bytes], bool]:
        """The four byte planes of log-probabilities, and whether their bits are rotated."""
        rotated = len(cell) > 1 and cell[1] & 7 == _ROTATED
        width, body = _head(cell, _ROTATED if rotated else _FLOATS)
        if rotated:
            exponents, rest = _inflate(body, b"")
            if len(rest) != 3 * len(exponents):
                raise StoreError("A stored array is cut short: the database is damaged")
            body = rest + exponents
        else:
            body = self._body(cell, width, body)
        size = len(body) // width
        return [body[start : start + size] for start in range(0, 4 * size, size)] if size else [b""] * 4, rotated

    def _cell(self, kind: int, width: int, body: bytes) -> bytes:
        flags = kind | width << 3
        if len(body) >= _TOO_SHORT:
            packed = self._compressor.compress(body)
            if len(packed) < len(body):
                return bytes((VERSION, flags | _ZSTD)) + packed
        return bytes((VERSION, flags)) + body

    def _body(self, cell: bytes, width: int, body: bytes) -> bytes:
        if cell[1] & _ZSTD:
            try:
                body = self._decompressor.decompress(body)
            except zstandard.ZstdError as error:
                raise StoreError("A stored value cannot be decompressed: the database is damaged") from error
        if len(body) % width:
            raise StoreError("A stored array is cut short: the database is damaged")
        return body


_USUAL_JSON = (
    b'{"quotes":[["summary","agent_prompt"]],"compaction":true,"thread":"","assistant_chain":"","form":1,"asked":"0123456789ab'
    b'cdef","ids":"","answers":[{"end":"","assistant_chain":"","digest":"","ids":["call_","toolu_"],"length":100}]}'
)
"""What small JSON values begin with knowing: the keys of fingerprint. Part of the format."""


def pack_small_json(text: bytes) -> bytes:
    """A cell of a JSON text, on any thread."""
    packed = _deflate(text, _USUAL_JSON)
    if len(packed) < len(text):
        return bytes((VERSION, _BYTES | 1 << 3 | _DEFLATE)) + packed
    return bytes((VERSION, _BYTES | 1 << 3)) + text


def unpack_small_json(cell: bytes) -> bytes:
    _, body = _head(cell, _BYTES)
    return _inflated(body, _USUAL_JSON) if cell[1] & _DEFLATE else body


def _head(cell: bytes, kind: int) -> tuple[int, bytes]:
    """Width and body."""
    if len(cell) < 2 or cell[0] != VERSION:
        found = f"version {cell[0]}" if cell else "an empty cell"
        raise StoreError(f"A stored value has {found}; this Polar reads version {VERSION}: update Polar")
    flags = cell[1]
    width = flags >> 3 & 7
    if flags & 7 != kind or not 1 <= width <= 4 or flags & (_ZSTD | _DEFLATE) == _ZSTD | _DEFLATE:
        raise StoreError(f"A stored value is of kind {flags & 7}, expected {kind}: the database is damaged")
    return width, cell[2:]


def bytes_before(contents: Sequence[bytes]) -> bytes:
    """What stands behind `contents` may refer to: their last `CONTEXT` bytes, put in a row."""
    pieces: list[bytes] = []
    room = CONTEXT
    for content in reversed(contents):
        pieces.append(content[-room:])
        room -= len(content)
        if room <= 0:
            break
    return b"".join(reversed(pieces))


def _ids_before(before: TokenIds, width: int) -> bytes:
    return low_bytes(before[-(CONTEXT // width) :], width)


def _deflated(body: bytes, before: bytes) -> bytes | None:
    """None where it is not smaller, or not worth the time."""
    if not _TOO_SHORT <= len(body) <= _TOO_LONG_FOR_DEFLATE:
        return None
    packed = _deflate(body, before)
    return packed if len(packed) < len(body) else None


def _deflate(body: bytes, before: bytes) -> bytes:
    packer = zlib.compressobj(_DEFLATE_LEVEL, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, before)
    return packer.compress(body) + packer.flush()


def _inflated(body: bytes, before: bytes | bytearray) -> bytes:
    found, rest = _inflate(body, before)
    if rest:
        raise StoreError("A stored value goes on behind its end: the database is damaged")
    return found


def _inflate(body: bytes, before: bytes | bytearray) -> tuple[bytes, bytes]:
    """What the deflate stream holds, and what stands behind it."""
    unpacker = zlib.decompressobj(-15, before)
    try:
        found = unpacker.decompress(body)
    except zlib.error as error:
        raise StoreError("A stored value cannot be decompressed: the database is damaged") from error
    if not unpacker.eof:
        raise StoreError("A stored value is cut short: the database is damaged")
    return found, unpacker.unused_data


def _rotated(logprobs: Logprobs) -> bytes:
    bits = np.ascontiguousarray(logprobs, dtype="<f4").view("<u4")
    planes = ((bits << 1) | (bits >> 31)).view(np.uint8).reshape(-1, 4).T
    return _deflate(planes[3].tobytes(), b"") + planes[:3].tobytes()


_LOW_BYTES = {
    width: np.dtype({"names": ["low"], "formats": [f"V{width}"], "offsets": [0], "itemsize": 4})
    for width in (1, 2, 3, 4)
}
"""Of a 4-byte number, its `width` lowest bytes as one item: copied as such, not byte by byte."""


def low_bytes(ids: TokenIds, width: int) -> bytes:
    """The `width` lowest bytes of each, little-endian."""
    found: bytes = np.ascontiguousarray(ids, dtype="<i4").view(_LOW_BYTES[width])["low"].tobytes()
    return found


def ids_of(bodies: Sequence[bytes | bytearray], width: int) -> list[TokenIds]:
    """The ids of many bodies of one width, which are put together at once: parts of one array."""
    ends = list(accumulate(len(body) // width for body in bodies))
    joined = b"".join((*bodies, bytes(4 - width)))
    # Every `width` bytes four are read, and those that belong to the next number are masked: no copy byte by byte.
    numbers: npt.NDArray[np.uint32] = np.ndarray((ends[-1],), "<u4", joined, strides=(width,))
    ids = (numbers & np.uint32((1 << 8 * width) - 1)).astype(np.uint32, copy=False).view(np.int32)
    return [ids[start:end] for start, end in pairwise([0, *ends])]


def in_width(body: bytes | bytearray, width: int, wanted: int) -> bytes | bytearray:
    """Ids of `width` bytes each in `wanted` bytes each: zeros are added, or the highest bytes left out."""
    if width == wanted:
        return body
    found = bytearray(len(body) // width * wanted)
    for place in range(min(width, wanted)):
        found[place::wanted] = body[place::width]
    return found


def _planes(numbers: npt.NDArray[np.int32] | npt.NDArray[np.float32], dtype: str, width: int) -> bytes:
    little = np.ascontiguousarray(numbers, dtype=dtype)
    return little.view(np.uint8).reshape(-1, 4)[:, :width].T.tobytes()


def _from_planes(body: bytes, width: int) -> npt.NDArray[np.uint8]:
    count = len(body) // width
    numbers = np.zeros((count, 4), dtype=np.uint8)
    numbers[:, :width] = np.frombuffer(body, dtype=np.uint8).reshape(width, count).T
    return numbers.reshape(-1)
