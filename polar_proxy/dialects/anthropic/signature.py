"""The `signature` of a thinking block (and the `data` of a redacted one): the reasoning itself, sealed.

    polar1.<digest>.<base64url of the zlib-compressed text>

Promises: `open_seal(seal(text)) == text` for any text; a signature that was made elsewhere, or damaged on the way,
opens to None and never raises; a thinking text that somebody changed is told from the one that was sampled (`altered`).
The seal keeps nothing secret. It lets a client that stores only the opaque string give the whole reasoning back.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

from polar_proxy.dialects.wire import inflate

_VERSION = "polar1"
_LARGEST = 1 << 24
"""No text is unpacked beyond this many bytes: a signature comes from the client and may be a zip bomb."""


def seal(text: str) -> str:
    raw = text.encode(errors="surrogatepass")
    packed = base64.urlsafe_b64encode(zlib.compress(raw)).decode().rstrip("=")
    return f"{_VERSION}.{_digest(raw)}.{packed}"


def unseal(signature: str) -> str | None:
    """The reasoning text that was sealed, or None for a signature of another provider and for a broken one."""
    version, _, rest = signature.partition(".")
    digest, _, packed = rest.partition(".")
    if version != _VERSION:
        return None
    try:
        raw = inflate(base64.b64decode(packed + "=" * (-len(packed) % 4), b"-_", validate=True), _LARGEST)
        return raw.decode(errors="surrogatepass") if _digest(raw) == digest else None
    except ValueError:  # binascii.Error is one
        return None


def altered(thinking: str, signature: str) -> bool:
    """Whether this text, which came back with a signature of ours, is another than the one that was sampled."""
    sealed = unseal(signature)
    return sealed is not None and sealed != thinking


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
