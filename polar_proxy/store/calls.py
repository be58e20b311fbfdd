"""Recorded calls: committed in groups, read back whole or as summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select

from polar_proxy.store.base import Repository
from polar_proxy.store.database import Database
from polar_proxy.store.encoding.loader import fetch
from polar_proxy.store.group_commit import GroupCommit
from polar_proxy.store.schema import calls, completions
from polar_proxy.types import CallRecord, CallStatus, Edge, StoredLineage

_MAX_BOUND_VALUES = 10_000
"""Values bound to one statement. Both databases accept three times as many."""

_c = calls.c
_choices = select(func.count()).select_from(completions).where(completions.c.call_id == _c.call_id).scalar_subquery()
_finish_reason = (
    select(completions.c.finish_reason)
    .where(completions.c.call_id == _c.call_id)
    .order_by(completions.c.choice_index)
    .limit(1)
    .scalar_subquery()
)
_summary: tuple[ColumnElement[Any], ...] = (
    *(_c.call_id, _c.session_id, _c.dialect, _c.path, _c.stream, _c.model, _c.status, _c.http_status, _c.error),
    *(_c.edge, _c.parent_call_id, _c.rule, _c.ambiguous, _c.thread, _c.message_count, _choices, _finish_reason),
    *(_c.prompt_tokens, _c.completion_tokens, _c.cached_tokens, _c.weight_version),
    *(_c.started_at, _c.first_token_at, _c.ended_at),
)


@dataclass(frozen=True, slots=True)
class CallSummary:
    """A call without messages and tokens. `prompt_tokens` is None if the engine returned no ids."""

    call_id: str
    session_id: str
    dialect: str
    path: str
    stream: bool
    model: str
    status: CallStatus
    http_status: int
    error: str | None
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    ambiguous: bool
    thread: str | None
    message_count: int
    choices: int
    finish_reason: str | None
    """The finish reason of the first choice."""
    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None
    weight_version: str | None
    started_at: float
    first_token_at: float | None
    ended_at: float


class CallRepository(Repository):
    """Recorded calls."""

    def __init__(self, database: Database, writer: GroupCommit) -> None:
        super().__init__(database)
        self._writer = writer

    async def commit(self, record: CallRecord) -> None:
        """Store a call; returns after its commit. Raises StoreError if the call cannot be stored.

        `prompt_ids` and `token_ids` are int32, `logprobs` float32, one value per token.
        """
        await self._writer.commit(record)

    async def get(self, call_id: str) -> CallRecord | None:
        async with self._database.reading() as connection:
            loader = await fetch(connection, _c.call_id == call_id)
        records = await asyncio.to_thread(loader.records)
        return records[0] if records else None

    async def of_session(self, session_id: str, *, text: bool = True) -> list[CallRecord]:
        """Return all calls of a session, ordered by start.

        Without `text`, the records have no messages, tools and fingerprint, and their answers are empty messages.
        That is enough to build traces and takes two thirds of the time.
        """
        async with self._database.reading() as connection:
            loader = await fetch(connection, _c.session_id == session_id, text=text)
        return await asyncio.to_thread(loader.records)

    async def summaries(self, session_id: str) -> list[CallSummary]:
        """Return the calls of a session without messages and tokens, ordered by start."""
        query = select(*_summary).where(_c.session_id == session_id).order_by(_c.started_at, _c.call_id)
        async with self._database.reading() as connection:
            return [CallSummary(*row) for row in await connection.execute(query)]

    async def lineages(self, session_id: str, *, known: Collection[str] = ()) -> list[StoredLineage]:
        """Return the lineage of the session's calls, ordered by start, in one statement without messages.

        `known`: ids of calls to leave out; ignored if there are too many for one statement.
        """
        columns = (_c.call_id, _c.edge, _c.parent_call_id, _c.rule, _c.thread, _c.status, _c.ended_at, _c.fingerprint)
        query = select(*columns).where(_c.session_id == session_id).order_by(_c.started_at, _c.call_id)
        if 0 < len(known) <= _MAX_BOUND_VALUES:
            query = query.where(_c.call_id.not_in(list(known)))
        async with self._database.reading() as connection:
            return [StoredLineage(*row) for row in await connection.execute(query)]
