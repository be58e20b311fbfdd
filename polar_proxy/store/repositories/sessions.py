"""Sessions, each with its own API key, and the keys of the HTTP API. Only the SHA-256 of a key is stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, and_, bindparam, select, update

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import schema
from polar_proxy.store.batch_writer import BatchWriter, concerns_any_record
from polar_proxy.store.database import Database, Repository, row_columns
from polar_proxy.store.repositories.outage_marks import OutageMark
from polar_proxy.store.secrets import storable_text
from polar_proxy.types import Json, new_id

log = logging.getLogger(__name__)

SessionOrigin = Literal["key", "open", "rollout", "user"]
"""How a session was created. `key`: by `polar session new` or the API. `open`: by an unknown key on the loopback
interface. `rollout`: for a rollout. `user`: for the model that plays the user of a dialogue; exports contain such a
session only if it is named."""
IncompleteReason = Literal["unrecorded_calls"]
"""Reason why a session must not be trained on: some calls were answered but could not be recorded."""
ApiRole = Literal["admin", "trainer"]

_s = schema.sessions.c
_k = schema.api_keys.c


@dataclass(frozen=True, slots=True)
class SessionRow:
    session_id: str
    label: str | None
    origin: SessionOrigin
    rollout_id: str | None
    policy: Json | None
    created_at: float
    closed_at: float | None
    incomplete: IncompleteReason | None
    spent: str | None = None
    """Name of the budget limit that the session reached; None if it has reached none."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session with its counters."""

    session_id: str
    label: str | None
    origin: SessionOrigin
    rollout_id: str | None
    created_at: float
    closed_at: float | None
    incomplete: IncompleteReason | None
    spent: str | None
    """Name of the budget limit that the session reached; None if it has reached none."""
    calls: int
    failed_calls: int
    """Number of calls without a complete answer (`FAILED`)."""
    prompt_tokens: int
    completion_tokens: int
    price_usd: float | None
    """Sum of the known prices of the session's calls, in US dollars; None if no price is known."""
    last_call_at: float | None
    reward: float | None
    """The newest reward of a session without a rollout."""


@dataclass(frozen=True, slots=True)
class _NewSession:
    row: SessionRow
    key_hash: bytes | None

    @property
    def found_by(self) -> ColumnElement[bool]:
        """Condition that finds the stored row. If the key already had a session, this is the row of that session."""
        return _s.session_id == self.row.session_id if self.key_hash is None else _s.key_hash == self.key_hash


_select_sessions = select(*row_columns(SessionRow, schema.sessions))
_select_summaries = select(*row_columns(SessionSummary, schema.sessions))


class SessionRepository(Repository):
    """Sessions. A session is everything that came in under one API key.

    Sessions that are created at the same time are written together in one transaction.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._creations: BatchWriter[_NewSession, SessionRow] = BatchWriter(self._write_new)

    async def stop(self) -> None:
        """Wait until all new sessions are written to the database."""
        await self._creations.stop()

    async def create(
        self,
        *,
        key_hash: bytes | None,
        label: str | None,
        rollout_id: str | None = None,
        policy: Json | None = None,
        origin: SessionOrigin,
        session_id: str | None = None,
    ) -> SessionRow:
        """Create a session, or return the one that has this key (the first two calls of an unknown key may race).

        `key_hash`: the SHA-256 of the key. `session_id`: an id that was given out before the session could be stored.
        """
        if key_hash is not None and len(key_hash) != 32:
            raise UsageError(f"`key_hash` has {len(key_hash)} bytes: give the SHA-256 of the session key (32 bytes).")
        session_id = session_id or new_id("sess")
        row = SessionRow(session_id, storable_text(label), origin, rollout_id, policy, time.time(), None, None)
        stored = await self._creations.add(_NewSession(row, key_hash))
        if (stored.session_id, stored.created_at) == (session_id, row.created_at):  # stored by this very call
            of = f" of rollout {rollout_id}" if rollout_id else f" {stored.label!r}" if stored.label else ""
            fields = {"session_id": session_id, "origin": origin, "label": stored.label, "rollout_id": rollout_id}
            log.info("session %s%s opened", session_id, of, extra={"fields": fields})
        return stored

    async def _write_new(self, batch: Sequence[tuple[_NewSession, asyncio.Future[SessionRow]]]) -> None:
        sessions = [new for new, _ in batch]
        try:
            rows = await self._database.write(lambda connection: self._insert(connection, sessions))
        except StoreError as error:
            if len(batch) > 1 and not concerns_any_record(error):
                for one in batch:  # so that only the session that cannot be stored fails
                    await self._write_new([one])
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), row in zip(batch, rows, strict=True):
            if not future.done():
                future.set_result(row)

    def _insert(self, connection: Connection, batch: Sequence[_NewSession]) -> list[SessionRow]:
        # Sorted, so that two gateways that open the same sessions cannot deadlock on PostgreSQL.
        values = [{"key_hash": new.key_hash, **asdict(new.row)} for new in batch]
        values.sort(key=lambda row: (row["key_hash"] or b"", row["session_id"]))
        connection.execute(self._database.insert_new(schema.sessions), values)
        return [SessionRow(*connection.execute(_select_sessions.where(new.found_by)).one()) for new in batch]

    async def by_key(self, key_hash: bytes) -> SessionRow | None:
        return await self._row(SessionRow, _select_sessions.where(_s.key_hash == key_hash))

    async def get(self, session_id: str) -> SessionRow | None:
        return await self._row(SessionRow, _select_sessions.where(_s.session_id == session_id))

    async def close(self, session_id: str) -> None:
        """Close the session. The time of the first closing stays."""
        still_open = (_s.session_id == session_id, _s.closed_at.is_(None))
        await self._write(update(schema.sessions).where(*still_open).values(closed_at=time.time()))

    async def mark_incomplete(self, session_ids: Collection[str], reason: IncompleteReason) -> None:
        """Exclude the sessions, and the rollouts that they record, from training. The first reason stays."""
        ids = [{"id_": session_id} for session_id in sorted(session_ids)]
        mine = _s.session_id == bindparam("id_")
        marked = update(schema.sessions).where(mine, _s.incomplete.is_(None)).values(incomplete=reason)
        of_mine = schema.rollouts.c.session_id == bindparam("id_")
        rollouts = update(schema.rollouts).where(of_mine).values(incomplete=True)

        def write(connection: Connection) -> None:
            connection.execute(marked, ids)
            connection.execute(rollouts, ids)

        if ids:
            await self._database.write(write)

    async def mark_unrecorded(self, mark: OutageMark) -> str:
        """Mark a session that lost a call as incomplete, and return the session's id.

        If the session is not stored yet, because it was opened during the outage, store it first. But if the database
        already has a session with the same key, mark the session in the database and return its id.
        """
        session_id = mark.session_id
        if mark.key_hash is not None:
            row = await self.create(key_hash=mark.key_hash, label=None, origin="open", session_id=session_id)
            session_id = row.session_id
        await self.mark_incomplete([session_id], "unrecorded_calls")
        return session_id

    async def mark_spent(self, session_id: str, limit: str) -> None:
        """Store which limit of a session's budget was reached. The first one is kept."""
        open_budget = and_(_s.session_id == session_id, _s.spent.is_(None))
        await self._write(update(schema.sessions).where(open_budget).values(spent=limit))

    async def is_incomplete(self, session_id: str) -> bool:
        return bool(
            await self._scalars(select(_s.session_id).where(_s.session_id == session_id, _s.incomplete.is_not(None)))
        )

    async def recent(self, limit: int = 50, before: str | None = None) -> list[SessionSummary]:
        """Return a page of sessions, newest first. `before`: the last session id of the previous page."""
        query = _select_summaries.order_by(_s.session_id.desc()).limit(limit)
        return await self._rows(SessionSummary, query if before is None else query.where(_s.session_id < before))

    async def summary(self, session_id: str) -> SessionSummary | None:
        return await self._row(SessionSummary, _select_summaries.where(_s.session_id == session_id))

    async def ids_of_rollout(self, rollout_id: str, *, closed: bool = False) -> list[str]:
        """Return the ids of the sessions of all attempts at a rollout, oldest first.

        `closed`: leave out sessions that are still open.
        """
        query = select(_s.session_id).where(_s.rollout_id == rollout_id).order_by(_s.session_id)
        return await self._scalars(query.where(_s.closed_at.is_not(None)) if closed else query)


@dataclass(frozen=True, slots=True)
class ApiKeyRow:
    """A key of the HTTP API. `name`: the first twelve hexadecimal digits of the key's hash, by which the key is listed
    and revoked."""

    name: str
    role: ApiRole
    label: str | None
    created_at: float
    revoked_at: float | None

    @property
    def title(self) -> str:
        """Label and name of the key. Remarks that are sent with the key have this text as their author."""
        return f"{self.label or 'key'} {self.name}"


_select_keys = select(*row_columns(ApiKeyRow, schema.api_keys, name=_k.key_hash))


def _api_key(key_hash: bytes, *rest: Any) -> ApiKeyRow:
    return ApiKeyRow(key_hash.hex()[:12], *rest)


class ApiKeyRepository(Repository):
    """Keys of the HTTP API."""

    async def add(self, key_hash: bytes, role: ApiRole, label: str | None = None) -> ApiKeyRow:
        """Add a key. A key that is already known, revoked or not, stays as it is.

        `key_hash`: the SHA-256 of the key. Raises UsageError for an unknown role.
        """
        if role not in get_args(ApiRole):
            raise UsageError(f"The role of an API key is {' or '.join(get_args(ApiRole))}, not {role!r}.")
        if len(key_hash) != 32:
            raise UsageError(f"`key_hash` has {len(key_hash)} bytes: give the SHA-256 of the API key (32 bytes).")
        values = {"role": role, "label": storable_text(label), "created_at": time.time()}
        await self._write(self._database.insert_new(schema.api_keys).values(key_hash=key_hash, **values))
        found = await self.get(key_hash)
        assert found is not None
        return found

    async def get(self, key_hash: bytes) -> ApiKeyRow | None:
        """Return the key with this hash, also if it was revoked."""
        return await self._row(_api_key, _select_keys.where(_k.key_hash == key_hash))

    async def all(self) -> list[ApiKeyRow]:
        """Return all keys of the HTTP API, revoked ones too, oldest first."""
        return await self._rows(_api_key, _select_keys.order_by(_k.created_at, _k.key_hash))

    async def find_hash(self, name: str) -> bytes | None:
        """Return the hash of the key with this name; None for an unknown name."""
        try:
            prefix = bytes.fromhex(name)
        except ValueError:
            return None
        keys = [key_hash for key_hash in await self._scalars(select(_k.key_hash)) if key_hash.startswith(prefix)]
        return keys[0] if prefix and len(keys) == 1 else None

    async def revoke(self, name: str) -> ApiKeyRow | None:
        """Revoke the key with this name and return it; None for an unknown name."""
        key_hash = await self.find_hash(name)
        if key_hash is None:
            return None
        valid = (_k.key_hash == key_hash, _k.revoked_at.is_(None))
        await self._write(update(schema.api_keys).where(*valid).values(revoked_at=time.time()))
        return await self.get(key_hash)
