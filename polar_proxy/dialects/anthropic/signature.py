"""The `signature` of a thinking block (and the `data` of a redacted one): the reasoning text itself, encoded.

    polar1.<digest>.<base64url of the zlib-compressed text>

Promises: `unseal(seal(text)) == text` for any text; a signature from another provider, or one that was damaged,
decodes to None and never raises. The encoding keeps nothing secret. It lets a client that stores only the opaque
string send the whole reasoning back.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

from polar_proxy.dialects.wire import decompress

_VERSION = "polar1"
_MAX_BYTES = 1 << 24
"""Limit of the decompressed text: a signature comes from the client and may be a zip bomb."""


def seal(text: str) -> str:
    raw = text.encode(errors="surrogatepass")
    packed = base64.urlsafe_b64encode(zlib.compress(raw)).decode().rstrip("=")
    return f"{_VERSION}.{_digest(raw)}.{packed}"


def unseal(signature: str) -> str | None:
    """Return the text that `seal` encoded, or None for any other string."""
    version, _, rest = signature.partition(".")
    digest, _, packed = rest.partition(".")
    if version != _VERSION:
        return None
    try:
        raw = decompress(base64.b64decode(packed + "=" * (-len(packed) % 4), b"-_", validate=True), _MAX_BYTES)
        return raw.decode(errors="surrogatepass") if _digest(raw) == digest else None
    except ValueError:  # binascii.Error is a subclass
        return None


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
