"""How bytes, token ids and log-probabilities are packed into a database cell.

A cell is two header bytes and a body. Byte 0 is the version of this format; byte 1 says what the body is:

    bits 0-2  kind: 0 bytes, 1 token ids (int32), 2 log-probabilities (float32)
    bits 3-5  width: bytes kept per number (ids: the narrowest of 1-4 that holds all of them; float32: 4)
    bit  7    the body is a zstd frame (only where that is smaller)

Numbers lie in byte planes: first the lowest byte of every number, then the next byte of every number, and so on,
little-endian. The high bytes of neighbours resemble each other, so zstd finds more in planes than in whole numbers.

Promise: unpacking gives back exactly what was packed, bit for bit, NaN payloads included. A cell of an unknown
version or kind raises StoreError; it is never guessed at.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

from polar_proxy.errors import StoreError
from polar_proxy.types import Logprobs, TokenIds

VERSION = 1
_BYTES, _IDS, _FLOATS = 0, 1, 2
_ZSTD = 0x80
_TOO_SHORT_FOR_ZSTD = 32
"""A zstd frame of fewer bytes than this is never smaller than what it holds."""


class Codec:
    """Packs and unpacks cells. One instance serves one thread at a time (it holds zstd contexts)."""

    def __init__(self, level: int = 3) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack_bytes(self, content: bytes) -> bytes:
        return self._cell(_BYTES, 1, content)

    def pack_ids(self, ids: TokenIds) -> bytes:
        """`ids`: int32 [n]."""
        width = 4 if ids.size == 0 or int(ids.min()) < 0 else max(1, (int(ids.max()).bit_length() + 7) // 8)
        return self._cell(_IDS, width, _planes(ids, "<i4", width))

    def pack_logprobs(self, logprobs: Logprobs) -> bytes:
        """`logprobs`: float32 [n]."""
        return self._cell(_FLOATS, 4, _planes(logprobs, "<f4", 4))

    def unpack_bytes(self, cell: bytes) -> bytes:
        return self._body(cell, _BYTES)[1]

    def unpack_ids(self, cell: bytes) -> TokenIds:
        width, body = self._body(cell, _IDS)
        return _from_planes(body, width).view("<i4").astype(np.int32, copy=False)

    def unpack_logprobs(self, cell: bytes) -> Logprobs:
        width, body = self._body(cell, _FLOATS)
        return _from_planes(body, width).view("<f4").astype(np.float32, copy=False)

    def _cell(self, kind: int, width: int, body: bytes) -> bytes:
        flags = kind | width << 3
        if len(body) >= _TOO_SHORT_FOR_ZSTD:
            packed = self._compressor.compress(body)
            if len(packed) < len(body):
                return bytes((VERSION, flags | _ZSTD)) + packed
        return bytes((VERSION, flags)) + body

    def _body(self, cell: bytes, kind: int) -> tuple[int, bytes]:
        if len(cell) < 2 or cell[0] != VERSION:
            found = f"version {cell[0]}" if cell else "an empty cell"
            raise StoreError(f"A stored value has {found}; this Polar reads version {VERSION}: update Polar")
        flags, body = cell[1], cell[2:]
        width = flags >> 3 & 7
        if flags & 7 != kind or not 1 <= width <= 4:
            raise StoreError(f"A stored value is of kind {flags & 7}, expected {kind}: the database is damaged")
        if flags & _ZSTD:
            try:
                body = self._decompressor.decompress(body)
            except zstandard.ZstdError as error:
                raise StoreError("A stored value cannot be decompressed: the database is damaged") from error
        if len(body) % width:
            raise StoreError("A stored array is cut short: the database is damaged")
        return width, body


def _planes(numbers: npt.NDArray[np.int32] | npt.NDArray[np.float32], dtype: str, width: int) -> bytes:
    little = np.ascontiguousarray(numbers, dtype=dtype)
    return little.view(np.uint8).reshape(-1, 4)[:, :width].T.tobytes()


def _from_planes(body: bytes, width: int) -> npt.NDArray[np.uint8]:
    count = len(body) // width
    numbers = np.zeros((count, 4), dtype=np.uint8)
    numbers[:, :width] = np.frombuffer(body, dtype=np.uint8).reshape(width, count).T
    return numbers.reshape(-1)
