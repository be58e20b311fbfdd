"""Sessions, each with its own API key, and the keys of the HTTP API. Of any key only the SHA-256 is stored."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, select, update

from polar_proxy.errors import UsageError
from polar_proxy.store import json_codec, schema
from polar_proxy.store.base import Repository
from polar_proxy.types import Json, new_id

SessionOrigin = Literal["key", "open", "rollout"]
"""Created by `polar session new`, by an unknown key on the loopback interface, or for a rollout."""
ApiRole = Literal["admin", "trainer"]

_s = schema.sessions.c
_k = schema.api_keys.c
_session_columns = (_s.session_id, _s.label, _s.origin, _s.rollout_id, _s.policy, _s.created_at, _s.closed_at)
_summary_columns = (
    *(_s.session_id, _s.label, _s.origin, _s.rollout_id, _s.created_at, _s.closed_at),
    *(_s.calls, _s.failed_calls, _s.prompt_tokens, _s.completion_tokens, _s.last_call_at),
)
_select_keys = select(_k.key_hash, _k.role, _k.label, _k.created_at, _k.revoked_at)


@dataclass(frozen=True, slots=True)
class SessionRow:
    session_id: str
    label: str | None
    origin: SessionOrigin
    rollout_id: str | None
    policy: Json | None
    created_at: float
    closed_at: float | None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session with its counters."""

    session_id: str
    label: str | None
    origin: SessionOrigin
    rollout_id: str | None
    created_at: float
    closed_at: float | None
    calls: int
    failed_calls: int
    """Calls whose status is not `ok`."""
    prompt_tokens: int
    completion_tokens: int
    last_call_at: float | None


@dataclass(frozen=True, slots=True)
class ApiKeyRow:
    """`name`: the first twelve hexadecimal digits of the key's hash, by which it is listed and revoked."""

    name: str
    role: ApiRole
    label: str | None
    created_at: float
    revoked_at: float | None


class SessionRepository(Repository):
    """Sessions: the calls that came in under one API key."""

    async def create(
        self,
        *,
        key_hash: bytes | None,
        label: str | None,
        rollout_id: str | None = None,
        policy: Json | None = None,
        origin: SessionOrigin,
    ) -> SessionRow:
        """Create a session, or return the one that has this key (the first two calls of an unknown key may race).

        `key_hash`: the SHA-256 of the key.
        """
        if key_hash is not None and len(key_hash) != 32:
            raise UsageError("A session key is stored as its SHA-256: 32 bytes")
        session_id = new_id("sess")
        values = {
            "session_id": session_id,
            "key_hash": key_hash,
            "label": json_codec.clean_text(label),
            "origin": origin,
            "rollout_id": rollout_id,
            "policy": policy,
            "created_at": time.time(),
        }
        mine = _s.session_id == session_id if key_hash is None else _s.key_hash == key_hash
        async with self._database.writing() as connection:
            await connection.execute(self._database.insert_new(schema.sessions).values(values))
            row = (await connection.execute(select(*_session_columns).where(mine))).one()
        return SessionRow(*row)

    async def by_key(self, key_hash: bytes) -> SessionRow | None:
        return await self._find(_s.key_hash == key_hash)

    async def get(self, session_id: str) -> SessionRow | None:
        return await self._find(_s.session_id == session_id)

    async def _find(self, where: ColumnElement[bool]) -> SessionRow | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(select(*_session_columns).where(where))).one_or_none()
        return None if row is None else SessionRow(*row)

    async def close(self, session_id: str) -> None:
        """Close the session. The time of the first closing stays."""
        mine = (_s.session_id == session_id, _s.closed_at.is_(None))
        async with self._database.writing() as connection:
            await connection.execute(update(schema.sessions).where(*mine).values(closed_at=time.time()))

    async def recent(self, limit: int = 50, before: str | None = None) -> list[SessionSummary]:
        """Return a page of sessions, newest first. `before`: the last session id of the previous page."""
        query: Any = select(*_summary_columns).order_by(_s.session_id.desc()).limit(limit)
        if before is not None:
            query = query.where(_s.session_id < before)
        async with self._database.reading() as connection:
            return [SessionSummary(*row) for row in await connection.execute(query)]

    async def summary(self, session_id: str) -> SessionSummary | None:
        query = select(*_summary_columns).where(_s.session_id == session_id)
        async with self._database.reading() as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else SessionSummary(*row)

    async def ids_of_rollout(self, rollout_id: str, *, closed: bool = False) -> list[str]:
        """Return the sessions of all attempts at a rollout, oldest first. `closed`: only closed ones."""
        query = select(_s.session_id).where(_s.rollout_id == rollout_id).order_by(_s.session_id)
        query = query.where(_s.closed_at.is_not(None)) if closed else query
        async with self._database.reading() as connection:
            return list((await connection.execute(query)).scalars())


class ApiKeyRepository(Repository):
    """Keys of the HTTP API."""

    async def add(self, key_hash: bytes, role: ApiRole, label: str | None = None) -> ApiKeyRow:
        """Add a key. A key that is already known, revoked or not, stays as it is.

        `key_hash`: the SHA-256 of the key. Raises UsageError for an unknown role.
        """
        if role not in get_args(ApiRole):
            raise UsageError(f"The role of an API key is {' or '.join(get_args(ApiRole))}, not {role!r}.")
        if len(key_hash) != 32:
            raise UsageError("An API key is stored as its SHA-256: 32 bytes")
        values = {"role": role, "label": json_codec.clean_text(label), "created_at": time.time()}
        async with self._database.writing() as connection:
            await connection.execute(self._database.insert_new(schema.api_keys).values(key_hash=key_hash, **values))
        found = await self.get(key_hash)
        assert found is not None
        return found

    async def get(self, key_hash: bytes) -> ApiKeyRow | None:
        """Return the key with this hash, also if it was revoked."""
        async with self._database.reading() as connection:
            row = (await connection.execute(_select_keys.where(_k.key_hash == key_hash))).one_or_none()
        return None if row is None else _api_key(*row)

    async def all(self) -> list[ApiKeyRow]:
        """Return all keys, oldest first."""
        async with self._database.reading() as connection:
            rows = await connection.execute(_select_keys.order_by(_k.created_at, _k.key_hash))
            return [_api_key(*row) for row in rows]

    async def revoke(self, name: str) -> ApiKeyRow:
        """Revoke the key with this name. Raises UsageError for an unknown name."""
        try:
            prefix = bytes.fromhex(name)
        except ValueError:
            prefix = b""
        async with self._database.writing() as connection:
            rows = [row for row in await connection.execute(_select_keys) if prefix and row.key_hash.startswith(prefix)]
            if len(rows) != 1:
                raise UsageError(f"There is no API key {name!r}. `polar key list` shows all names.")
            mine = _k.key_hash == rows[0].key_hash
            await connection.execute(
                update(schema.api_keys).where(mine, _k.revoked_at.is_(None)).values(revoked_at=time.time())
            )
            return _api_key(*(await connection.execute(_select_keys.where(mine))).one())


def _api_key(
    key_hash: bytes, role: ApiRole, label: str | None, created_at: float, revoked_at: float | None
) -> ApiKeyRow:
    return ApiKeyRow(key_hash.hex()[:12], role, label, created_at, revoked_at)
