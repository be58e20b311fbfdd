"""Recorded calls: committed in groups, read back whole or as summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, select

from polar_proxy.store.database import Database, Repository, row_columns
from polar_proxy.store.encoding.loader import fetch
from polar_proxy.store.group_commit import GroupCommit
from polar_proxy.store.schema import calls, completions
from polar_proxy.types import CallRecord, CallStatus, Edge, StoredLineage

_MAX_BOUND_VALUES = 10_000
"""Values bound to one statement. Both databases accept three times as many."""

_c = calls.c


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


_answers = select(completions).where(completions.c.call_id == _c.call_id).correlate(calls)
_first_answer = _answers.order_by(completions.c.choice_index).limit(1)
_summary = row_columns(
    CallSummary,
    calls,
    choices=_answers.with_only_columns(func.count()).scalar_subquery(),
    finish_reason=_first_answer.with_only_columns(completions.c.finish_reason).scalar_subquery(),
)
_lineage = row_columns(StoredLineage, calls)


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
        return await self._rows(CallSummary, query)

    async def lineages(self, session_id: str, *, known: Collection[str] = ()) -> list[StoredLineage]:
        """Return the lineage of the session's calls, ordered by start, in one statement without messages.

        `known`: ids of calls to leave out; ignored if there are too many for one statement.
        """
        query = select(*_lineage).where(_c.session_id == session_id).order_by(_c.started_at, _c.call_id)
        if 0 < len(known) <= _MAX_BOUND_VALUES:
            query = query.where(_c.call_id.not_in(list(known)))
        return await self._rows(StoredLineage, query)
