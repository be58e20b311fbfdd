"""Small JSON values as packed cells, and what all cells share: the header, and compression by raw deflate.

The format is described in `cells`. This module does not import numpy, so that `store.schema` can be used without numpy.
"""

from __future__ import annotations

import zlib

from polar_proxy.errors import StoreError

VERSION = 1
BYTES = 0
"""The kind of a cell that holds bytes."""
DEFLATE = 0x40
ZSTD = 0x80
MAX_DEFLATE_LENGTH = 16_384
"""Length in bytes above which zstd is used: longer bodies gain little from the dictionary, and zstd is five times
faster."""
_DEFLATE_LEVEL = 5
_MIN_DICTIONARY, _DICTIONARY_PER_BYTE = 8192, 64
"""How much of a preset dictionary is used: `_DICTIONARY_PER_BYTE` bytes for each byte to compress, but at least
`_MIN_DICTIONARY` bytes."""
_LOOKAHEAD = 262
"""zlib's MIN_LOOKAHEAD. zlib finds matches up to a distance of its window's size minus this number of bytes."""
_MAX_SMALL_JSON = 64 << 20

_JSON_DICTIONARY = (
    b'{"quotes":[["summary","agent_prompt"]],"compaction":true,"thread":"","assistant_chain":"","form":1,'
    b'"asked":"0123456789abcdef","ids":"","answers":[{"end":"","assistant_chain":"","digest":"",'
    b'"ids":["call_","toolu_"],"length":100}]}'
)
"""The preset dictionary for compressing small JSON values: texts that fingerprints contain. Part of the format."""


def pack_small_json(text: bytes) -> bytes:
    """Pack a JSON text. May be called on any thread."""
    flags = BYTES | 1 << 3
    packed = deflate(text, _JSON_DICTIONARY)
    if len(packed) < len(text):
        return bytes((VERSION, flags | DEFLATE)) + packed
    return bytes((VERSION, flags)) + text


def unpack_small_json(cell: bytes) -> bytes:
    _, body = read_header(cell, BYTES)
    return inflate(body, _JSON_DICTIONARY, _MAX_SMALL_JSON) if cell[1] & DEFLATE else body


def read_header(cell: bytes, kind: int) -> tuple[int, bytes]:
    """Return a cell's width and body. Raises StoreError for a cell that is damaged, of another kind than `kind`, or of
    another version."""
    if cell and cell[0] != VERSION:
        raise StoreError(f"A stored value has version {cell[0]}; this Polar reads version {VERSION}: update Polar")
    if len(cell) < 2:
        raise StoreError("A stored value is shorter than its header: the database is damaged")
    flags = cell[1]
    width = flags >> 3 & 7
    if flags & 7 != kind or not 1 <= width <= 4 or flags & (ZSTD | DEFLATE) == ZSTD | DEFLATE:
        raise StoreError(f"A stored value has kind {flags & 7}, expected {kind}: the database is damaged")
    return width, cell[2:]


def deflate(body: bytes, dictionary: bytes) -> bytes:
    """Compress a body with only the end of the dictionary, and with a window that is just large enough.

    Most bodies are short, and indexing the whole dictionary for each would take most of a commit's time. `inflate` need
    not know how much of the dictionary was used: it works with the whole dictionary and the largest window.
    """
    dictionary = dictionary[-max(_MIN_DICTIONARY, _DICTIONARY_PER_BYTE * len(body)) :]
    window_bits = max(9, min(15, (len(dictionary) + len(body) + _LOOKAHEAD).bit_length()))
    memory_level = max(1, window_bits - 6)
    strategy = zlib.Z_DEFAULT_STRATEGY
    packer = zlib.compressobj(_DEFLATE_LEVEL, zlib.DEFLATED, -window_bits, memory_level, strategy, dictionary)
    return packer.compress(body) + packer.flush()


def inflate(body: bytes, dictionary: bytes | bytearray, limit: int = MAX_DEFLATE_LENGTH) -> bytes:
    unpacker = zlib.decompressobj(-15, dictionary)
    try:
        found = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise StoreError("A stored value cannot be decompressed: the database is damaged") from error
    if len(found) > limit:
        raise StoreError("A stored value is longer than any that Polar writes: the database is damaged")
    if not unpacker.eof:
        raise StoreError("A stored value is cut short: the database is damaged")
    if unpacker.unused_data:
        raise StoreError("A stored value has extra bytes after its end: the database is damaged")
    return found
