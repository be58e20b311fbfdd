"""Unpacking what came back from a client: the sealed reasoning of every provider's own opaque string."""

from __future__ import annotations

import zlib


def inflate(packed: bytes, largest: int) -> bytes:
    """What `zlib.compress` packed. Raises ValueError for what is broken, cut short, or unpacks to more than `largest`
    bytes: it comes from a client and may be made to fill the memory."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, largest)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError("cut short, or too long")
    return data
