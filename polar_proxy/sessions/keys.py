"""Session keys, which agents send as their API key. Only their SHA-256 is stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping


def new_key() -> str:
    """Return a random session key that looks like an API key to any client."""
    return "sk-polar-" + secrets.token_urlsafe(24)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def key_of_request(headers: Mapping[str, str], query_key: str | None) -> str | None:
    """Return the API key of a request, from the first of Authorization, x-api-key, x-goog-api-key and ?key=.

    `headers` are by lower-case name.
    """
    authorization = headers.get("authorization")
    if authorization:
        scheme, _, value = authorization.partition(" ")
        return value.strip() if scheme.lower() == "bearer" else authorization
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query_key
