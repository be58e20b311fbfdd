"""Keys of the HTTP API: who may administer and who may only train. Kept as SHA-256 alone, like session keys."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import select, update

from polar_proxy.errors import UsageError
from polar_proxy.store import json_codec, schema
from polar_proxy.store.base import Repository

ApiRole = Literal["admin", "trainer"]

_k = schema.api_keys.c


@dataclass(frozen=True, slots=True)
class ApiKeyRow:
    """`name`: the first twelve hexadecimal digits of the key's hash, by which it is listed and revoked."""

    name: str
    role: ApiRole
    label: str | None
    created_at: float
    revoked_at: float | None


class ApiKeyRepository(Repository):
    async def add(self, key_hash: bytes, role: ApiRole, label: str | None = None) -> ApiKeyRow:
        """Let this key in. One that is known already stays as it is, revoked ones included.

        `key_hash`: the SHA-256 of the key. Raises UsageError for a role that is none.
        """
        if role not in get_args(ApiRole):
            raise UsageError(f"API keys are for {' or '.join(get_args(ApiRole))}, not {role!r}.")
        if len(key_hash) != 32:
            raise UsageError("An API key is stored as its SHA-256: 32 bytes")
        values = {"role": role, "label": json_codec.clean_text(label), "created_at": time.time()}
        async with self._database.writing() as connection:
            await connection.execute(self._database.insert_new(schema.api_keys).values(key_hash=key_hash, **values))
        found = await self.get(key_hash)
        assert found is not None
        return found

    async def get(self, key_hash: bytes) -> ApiKeyRow | None:
        """Whose key this is, also if it was revoked."""
        async with self._database.reading() as connection:
            row = (await connection.execute(_keys.where(_k.key_hash == key_hash))).one_or_none()
        return None if row is None else _row(*row)

    async def all(self) -> list[ApiKeyRow]:
        """Oldest first."""
        async with self._database.reading() as connection:
            return [_row(*row) for row in await connection.execute(_keys.order_by(_k.created_at, _k.key_hash))]

    async def revoke(self, name: str) -> ApiKeyRow:
        """From now on this key lets nobody in. Raises UsageError for a name that is none."""
        try:
            first = bytes.fromhex(name)
        except ValueError:
            first = b""
        async with self._database.writing() as connection:
            rows = [row for row in await connection.execute(_keys) if first and row.key_hash.startswith(first)]
            if len(rows) != 1:
                raise UsageError(f"There is no API key {name!r}. `polar key list` names them.")
            mine = _k.key_hash == rows[0].key_hash
            await connection.execute(
                update(schema.api_keys).where(mine, _k.revoked_at.is_(None)).values(revoked_at=time.time())
            )
            return _row(*(await connection.execute(_keys.where(mine))).one())


_keys = select(_k.key_hash, _k.role, _k.label, _k.created_at, _k.revoked_at)


def _row(key_hash: bytes, role: ApiRole, label: str | None, created_at: float, revoked_at: float | None) -> ApiKeyRow:
    return ApiKeyRow(key_hash.hex()[:12], role, label, created_at, revoked_at)
