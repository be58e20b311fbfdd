"""Calls: committed in groups, read back whole or as listings."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, func, select

from polar_proxy.store.base import Repository
from polar_proxy.store.database import Database
from polar_proxy.store.group_commit import GroupCommit
from polar_proxy.store.loader import fetch
from polar_proxy.store.rows import CallSummary, StoredCall
from polar_proxy.store.schema import calls, completions
from polar_proxy.types import CallRecord, StoredLineage

_MOST_NAMED = 10_000
"""Values in one statement; both databases take three times as many."""

_c = calls.c
_choices = select(func.count()).select_from(completions).where(completions.c.call_id == _c.call_id).scalar_subquery()
_finish = (
    select(completions.c.finish_reason)
    .where(completions.c.call_id == _c.call_id)
    .order_by(completions.c.choice_index)
    .limit(1)
    .scalar_subquery()
)
_summary: tuple[ColumnElement[Any], ...] = (
    *(_c.call_id, _c.session_id, _c.dialect, _c.path, _c.stream, _c.model, _c.status, _c.http_status, _c.error),
    *(_c.edge, _c.parent_call_id, _c.rule, _c.ambiguous, _c.thread, _c.message_count, _choices, _finish),
    *(_c.prompt_tokens, _c.completion_tokens, _c.cached_tokens, _c.weight_version),
    *(_c.started_at, _c.first_token_at, _c.ended_at),
)


class CallRepository(Repository):
    def __init__(self, database: Database, writer: GroupCommit) -> None:
        super().__init__(database)
        self._commits = writer

    async def commit(self, record: CallRecord) -> None:
        """Returns after the commit that holds the call. Raises StoreError when it cannot be stored.

        `prompt_ids` and `token_ids` int32, `logprobs` float32, one of each per token.
        """
        await self._commits.commit(record)

    async def get(self, call_id: str) -> StoredCall | None:
        async with self._database.reading() as connection:
            found = await fetch(connection, _c.call_id == call_id)
        records = await asyncio.to_thread(found.records)
        return records[0] if records else None

    async def of_session(self, session_id: str, *, text: bool = True) -> list[StoredCall]:
        """All calls of a session with everything, in the order in which they started.

        Without `text` they have no messages, tools and fingerprint, and their answers are empty messages: all that
        traces are made of is there, and is read in two thirds of the time."""
        async with self._database.reading() as connection:
            found = await fetch(connection, _c.session_id == session_id, text=text)
        return await asyncio.to_thread(found.records)

    async def summaries(self, session_id: str) -> list[CallSummary]:
        """The calls of a session without messages and tokens, in the order in which they started."""
        query = select(*_summary).where(_c.session_id == session_id).order_by(_c.started_at, _c.call_id)
        async with self._database.reading() as connection:
            return [CallSummary(*row) for row in await connection.execute(query)]

    async def lineages(self, session_id: str, *, known: Collection[str] = ()) -> list[StoredLineage]:
        """Where the calls of a session stand, in the order in which they started. One statement, no messages.

        `known`: ids of calls that need not be given; of very many all are given."""
        columns = (_c.call_id, _c.edge, _c.parent_call_id, _c.rule, _c.thread, _c.status, _c.ended_at, _c.fingerprint)
        query = select(*columns).where(_c.session_id == session_id).order_by(_c.started_at, _c.call_id)
        if 0 < len(known) <= _MOST_NAMED:
            query = query.where(_c.call_id.not_in(list(known)))
        async with self._database.reading() as connection:
            return [StoredLineage(*row) for row in await connection.execute(query)]
