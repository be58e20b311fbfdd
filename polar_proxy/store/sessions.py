"""Sessions: everything that came in under one API key."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import ColumnElement, select, update

from polar_proxy.errors import UsageError
from polar_proxy.store import json_codec
from polar_proxy.store.base import Repository
from polar_proxy.store.rows import SessionOrigin, SessionRow, SessionSummary
from polar_proxy.store.schema import sessions
from polar_proxy.types import Json, new_id

_c = sessions.c
_row = (_c.session_id, _c.label, _c.origin, _c.rollout_id, _c.policy, _c.created_at, _c.closed_at)
_summary = (
    *(_c.session_id, _c.label, _c.origin, _c.rollout_id, _c.created_at, _c.closed_at),
    *(_c.calls, _c.failed_calls, _c.prompt_tokens, _c.completion_tokens, _c.last_call_at),
)


class SessionRepository(Repository):
    async def create(
        self,
        *,
        key_hash: bytes | None,
        label: str | None,
        rollout_id: str | None = None,
        policy: Json | None = None,
        origin: SessionOrigin,
    ) -> SessionRow:
        """A new session, or the one that has this key already (two first calls under one unknown key may race).

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
        mine = _c.session_id == session_id if key_hash is None else _c.key_hash == key_hash
        async with self._database.writing() as connection:
            await connection.execute(self._database.insert_new(sessions).values(values))
            row = (await connection.execute(select(*_row).where(mine))).one()
        return SessionRow(*row)

    async def by_key(self, key_hash: bytes) -> SessionRow | None:
        return await self._session_where(_c.key_hash == key_hash)

    async def get(self, session_id: str) -> SessionRow | None:
        return await self._session_where(_c.session_id == session_id)

    async def _session_where(self, where: ColumnElement[bool]) -> SessionRow | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(select(*_row).where(where))).one_or_none()
        return None if row is None else SessionRow(*row)

    async def close(self, session_id: str) -> None:
        """Mark it closed; the first closing time stays."""
        statement = (
            update(sessions).where(_c.session_id == session_id, _c.closed_at.is_(None)).values(closed_at=time.time())
        )
        async with self._database.writing() as connection:
            await connection.execute(statement)

    async def recent(self, limit: int = 50, before: str | None = None) -> list[SessionSummary]:
        """Newest first; `before` is the last session id of the page before. Fast however many calls there are."""
        query: Any = select(*_summary).order_by(_c.session_id.desc()).limit(limit)
        if before is not None:
            query = query.where(_c.session_id < before)
        async with self._database.reading() as connection:
            return [SessionSummary(*row) for row in await connection.execute(query)]

    async def summary(self, session_id: str) -> SessionSummary | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(select(*_summary).where(_c.session_id == session_id))).one_or_none()
        return None if row is None else SessionSummary(*row)

    async def ids_of_rollout(self, rollout_id: str, *, closed: bool = False) -> list[str]:
        """The sessions of all its attempts, oldest first; with `closed`, those that are closed."""
        query = select(_c.session_id).where(_c.rollout_id == rollout_id).order_by(_c.session_id)
        query = query.where(_c.closed_at.is_not(None)) if closed else query
        async with self._database.reading() as connection:
            return list((await connection.execute(query)).scalars())
