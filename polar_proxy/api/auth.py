"""API keys: how requests authenticate, and the admin key that `polar serve` creates for its own user."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fastapi import Request

from polar_proxy.api_models import Role
from polar_proxy.errors import ApiError, UsageError
from polar_proxy.sessions import hash_key
from polar_proxy.store import Store

KEY_FILE = "api-key"


def new_api_key(role: Role) -> str:
    return f"polar-{role}-{secrets.token_urlsafe(32)}"


class KeyAuthenticator:
    """Authenticate requests by the API keys in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def __call__(self, request: Request) -> Role:
        """Raises ApiError: 401 without a valid API key, 403 for the key of an agent's session."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorised("The API requires a key: Authorization: Bearer KEY. `polar key new` makes one.")
        digest = hash_key(key.strip())
        row = await self._store.api_keys.get(digest)
        if row is None:
            if await self._store.sessions.by_key(digest) is not None:
                raise ApiError(
                    "This is an agent's key: it is valid for the model routes, not for the API.",
                    status=403,
                    code="forbidden",
                )
            raise _unauthorised("This key is unknown. `polar key new` makes one.")
        if row.revoked_at is not None:
            raise _unauthorised("This key was revoked. `polar key new` makes another one.")
        return row.role


async def allow_all(request: Request) -> Role:
    """Treat every request as an admin's: for a client in this process, which has the database anyway."""
    return "admin"


async def local_admin_key(store: Store, home: Path) -> Path:
    """Return the file with this machine's admin key. Creates a key if the file is missing or its key was revoked."""
    path = home / KEY_FILE
    try:
        key = path.read_text().strip()
    except FileNotFoundError:
        key = ""
    row = await store.api_keys.get(hash_key(key)) if key else None
    if not key or (row is not None and row.revoked_at is not None):
        key = new_api_key("admin")
        write_private(path, key)
        row = None
    if row is None:
        await store.api_keys.add(hash_key(key), "admin", f"made by polar serve, in {KEY_FILE}")
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically. Raises UsageError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def _unauthorised(message: str) -> ApiError:
    return ApiError(message, status=401, code="unauthorised")
