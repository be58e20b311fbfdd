"""The hash chain of a certificate. Knows nothing of calls: what is here is all that a checker needs.

    seed   = H("", header)                              header: the certificate's fields, see `header_of`
    link_k = H(link_{k-1}, span_k, tokens_k, logprobs_k)

H is blake2b with a 16-byte digest. A span is its canonical JSON (keys sorted, no spaces, UTF-8) without its hash,
preceded by its length as 4 bytes, little-endian; tokens are int32 and log-probabilities float32, little-endian, the
latter of sampled spans only. So each link stands for all that comes before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from polar_proxy.types import Json, Logprobs, TokenIds

_PERSON = b"polar trace"
_UNCOVERED = frozenset({"grade", "audit", "spans", "seed", "head"})


def header_of(certificate: Mapping[str, Any]) -> Json:
    """What of a certificate the seed covers: all but the spans (which have links) and what an audit may change."""
    return {name: value for name, value in certificate.items() if name not in _UNCOVERED}


def seed(certificate: Mapping[str, Any]) -> bytes:
    return _digest(b"", _canonical(header_of(certificate)))


def links(first: bytes, spans: Iterable[Mapping[str, Any]], token_ids: TokenIds, logprobs: Logprobs) -> list[bytes]:
    """One link a span. `token_ids` int32 [n] and `logprobs` float32 [n] are tiled by the spans' `n` in order."""
    ids, values = np.ascontiguousarray(token_ids, "<i4"), np.ascontiguousarray(logprobs, "<f4")
    found: list[bytes] = []
    link, position = first, 0
    for span in spans:
        here = slice(position, position + span["n"])
        said = values[here].tobytes() if span["kind"] == "sampled" else b""
        identity = _canonical({name: value for name, value in span.items() if name != "hash"})
        link = _digest(link, identity, ids[here].tobytes(), said)
        found.append(link)
        position = here.stop
    return found


def tokens_hash(token_ids: TokenIds) -> str:
    """Of the tokens that a branch stands behind."""
    return _digest(b"", np.ascontiguousarray(token_ids, "<i4").tobytes()).hex()


def _digest(before: bytes, identity: bytes, *data: bytes) -> bytes:
    digest = blake2b(before, digest_size=16, person=_PERSON)
    digest.update(struct.pack("<I", len(identity)))
    digest.update(identity)
    for piece in data:
        digest.update(piece)
    return digest.digest()


def _canonical(value: Json) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def as_arrays(token_ids: Sequence[int], logprobs: Sequence[float | None]) -> tuple[TokenIds, Logprobs]:
    """int32 [n] and float32 [n], NaN where there is none. Raises OverflowError for an id beyond 32 bits."""
    values = [np.nan if value is None else value for value in logprobs]
    return np.array(token_ids, dtype=np.int32), np.array(values, dtype=np.float32)
