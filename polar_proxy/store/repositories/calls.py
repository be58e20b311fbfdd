"""Recorded calls: committed in batches, read back whole or as summaries.

A gateway that shares the database with others announces each call before it answers the call. The announcement is a row
of `open_calls` and has a lease. Promises:

* A call is announced only while its session is open. So no gateway starts a call of a session that is closed.
* The recorded and announced calls of a session are never more than `max_calls` of its budget, whichever gateways
  announce them.
* The transaction that commits a call deletes its announcement. If the lease of an announcement has expired, its call is
  lost: the gateway was killed or could not commit it.
* The end of a session removes its remaining announcements. A call can still be committed after that. If its rollout has
  ended by then, the commit also excludes the call from the traces, and marks the rollout incomplete.

A gateway that does not share its database announces nothing, and its commits look for no announcements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    update,
)

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.batch_writer import BatchWriter
from polar_proxy.store.database import Database, Repository, row_columns
from polar_proxy.store.encoding.loader import OF_SESSION, chain_ids, fetch
from polar_proxy.store.group_commit import PATIENCE_SECONDS, GroupCommit
from polar_proxy.store.json_codec import clean_text
from polar_proxy.types import CallRecord, CallStatus, Edge, Json, PromptMode

_MAX_BOUND_VALUES = 10_000
"""Maximum number of values bound to one statement. Both databases accept three times as many."""

_c = schema.calls.c
_n = schema.nodes.c
_x = schema.completions.c
_p = schema.provider_ids.c
_o = schema.open_calls.c
_r = schema.rollouts.c
_s = schema.sessions.c


@dataclass(frozen=True, slots=True)
class CallSummary:
    """A call without messages and tokens. `prompt_tokens` is None if the engine returned no token ids."""

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
    prompt_mode: PromptMode
    prompt_reason: str | None
    base_call_id: str | None
    message_count: int
    choices: int
    finish_reason: str | None
    """The finish reason of the first choice."""
    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None
    input_tokens: int | None
    """Hosted call: number of prompt tokens, as the provider counts them (`Usage`). None for other calls."""
    output_tokens: int | None
    """Hosted call: number of sampled tokens, as the provider counts them (`Usage`). None for other calls."""
    price_usd: float | None
    weight_version: str | None
    started_at: float
    first_token_at: float | None
    ended_at: float


_answers = select(schema.completions).where(_x.call_id == _c.call_id).correlate(schema.calls)
_first_answer = _answers.order_by(_x.choice_index).limit(1)
_summary = row_columns(
    CallSummary,
    schema.calls,
    choices=_answers.with_only_columns(func.count()).scalar_subquery(),
    finish_reason=_first_answer.with_only_columns(_x.finish_reason).scalar_subquery(),
)


@dataclass(frozen=True, slots=True)
class StoredLineage:
    """A stored call's relation to the other calls of its session."""

    call_id: str
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    thread: str | None
    status: CallStatus
    ended_at: float
    fingerprint: Json | None


_lineage = row_columns(StoredLineage, schema.calls)
_one_call = _c.call_id == bindparam("wanted")
_some_calls = and_(OF_SESSION, _c.call_id.in_(bindparam("wanted", expanding=True)))
_deleted_calls = select(_c.call_id).where(
    _c.call_id.in_(bindparam("wanted", expanding=True)), _c.deleted_at.is_not(None)
)
_items = (
    select(_p.provider_id, _p.call_id, _p.place)
    .where(_p.session_id == bindparam("session"), _p.provider_id.in_(bindparam("wanted", expanding=True)))
    .where(_p.place.is_not(None))
    .order_by(_p.call_id)
)
_signed = schema.completions.alias("signed")  # its own name, because `fetch` reads the same table
_calls_with_turns = and_(
    OF_SESSION, exists().where(_signed.c.call_id == _c.call_id, _signed.c.provider_turn.is_not(None))
)
_their_messages = chain_ids(select(_c.messages_node.label("node_id")).where(_some_calls, _c.messages_node.is_not(None)))
_length_of_messages = select(func.coalesce(func.sum(_n.length), 0)).join(
    _their_messages, _their_messages.c.node_id == _n.node_id
)


class CallRepository(Repository):
    """Recorded calls."""

    def __init__(self, database: Database, writer: GroupCommit) -> None:
        super().__init__(database)
        self._writer = writer

    def commit(self, record: CallRecord, *, large: bool = False) -> asyncio.Future[None]:
        """Store a call, and return a future that is done when the call is committed.

        The future raises StoreError if the call cannot be stored. This method raises StoreError if the store is closed.
        With `large`, the rows of the call are made in a separate thread, and other calls do not wait meanwhile. In the
        record, `prompt_ids` and `token_ids` are int32, and `logprobs` is float32 with one value per token.
        """
        return self._writer.add(record, large=large)

    def set_cache(self, size: int) -> None:
        """Set the size in bytes of the cache that lets `commit` skip rows which a session has stored already."""
        self._writer.set_cache(size)

    async def get(self, call_id: str) -> CallRecord | None:
        records = await self._load(_one_call, {"wanted": call_id})
        return records[0] if records else None

    async def get_many(self, session_id: str, call_ids: Collection[str]) -> list[CallRecord]:
        """Return those calls of the session that have these ids, ordered by start. Shared messages are read once."""
        return await self._load(_some_calls, {"session": session_id, "wanted": list(call_ids)})

    async def with_provider_turns(self, session_id: str) -> list[CallRecord]:
        """Return the session's calls that have a signed answer of a provider (`Choice.provider_turn`), ordered by
        start."""
        return await self._load(_calls_with_turns, {"session": session_id})

    async def find_response(self, session_id: str, response_id: str) -> str | None:
        """Return the id of the call whose response has this id at its provider; None if the session has no such
        call."""
        mine = (_p.session_id == session_id, _p.provider_id == clean_text(response_id), _p.place.is_(None))
        found = await self._scalars(select(_p.call_id).where(*mine).order_by(_p.call_id.desc()).limit(1))
        return found[0] if found else None

    async def find_items(self, session_id: str, item_ids: Collection[str]) -> dict[str, tuple[str, str]]:
        """Find a provider's items in the answers of a session. Return item id -> (call id, place) for each one found.

        The place is the kind and number of the item in the record, such as `fc_0`. If several items have the same id,
        the newest is returned.
        """
        values = {"session": session_id, "wanted": list(map(clean_text, item_ids))}
        rows = await self._database.read(lambda connection: connection.execute(_items, values).all())
        found = {provider_id: (call_id, place) for provider_id, call_id, place in rows}
        return {item_id: found[clean] for item_id in item_ids if (clean := clean_text(item_id)) in found}

    async def engine_name(self, call_id: str) -> str | None:
        """Return the name of the engine that answered a call (`CallRecord.engine_name`)."""
        name: str | None = (await self._scalars(select(_c.engine_name).where(_c.call_id == call_id)))[0]
        return name

    async def deleted(self, call_ids: Collection[str]) -> set[str]:
        """Return the ids of the given calls whose responses were deleted."""
        values = {"wanted": list(call_ids)}
        return await self._database.read(lambda connection: set(connection.scalars(_deleted_calls, values)))

    async def latest_in_conversation(self, session_id: str, conversation_id: str) -> str | None:
        """Return the id of the session's latest call that may have added to this conversation of a provider.

        Calls that the provider refused added nothing.
        """
        refused = and_(_c.status == "upstream_error", _c.http_status.between(400, 499))
        mine = (_c.session_id == session_id, _c.provider_conversation == conversation_id, not_(refused))
        found = await self._scalars(select(_c.call_id).where(*mine).order_by(_c.started_at.desc()).limit(1))
        return found[0] if found else None

    async def message_bytes(self, session_id: str, call_ids: Collection[str]) -> int:
        """Return the size in bytes of the messages that `get_many` reads. A shared message counts once."""
        values = {"session": session_id, "wanted": list(call_ids)}
        return int(await self._database.read(lambda connection: connection.scalar(_length_of_messages, values)) or 0)

    async def mark_deleted(self, call_id: str) -> None:
        """Store that the client deleted the response of this call. Idempotent."""
        kept = and_(_c.call_id == call_id, _c.deleted_at.is_(None))
        await self._write(update(schema.calls).where(kept).values(deleted_at=time.time()))

    async def of_session(self, session_id: str, *, text: bool = True) -> list[CallRecord]:
        """Return all calls of a session, ordered by start.

        Without `text`, the records have no messages, tools and fingerprint, and their answers are empty messages.
        That is enough to build traces and takes two thirds of the time.
        """
        return await self._load(OF_SESSION, {"session": session_id}, text=text)

    async def _load(
        self, where: ColumnElement[bool], values: Mapping[str, object], *, text: bool = True
    ) -> list[CallRecord]:
        """Return the calls that meet the condition `where`. `values`: its parameters (see `fetch`)."""
        loader = await self._database.read(lambda connection: fetch(connection, where, values, text=text))
        return await asyncio.to_thread(loader.records)

    async def summaries(self, session_id: str) -> list[CallSummary]:
        """Return the calls of a session without messages and tokens, ordered by start."""
        query = select(*_summary).where(_c.session_id == session_id).order_by(_c.started_at, _c.call_id)
        return await self._rows(CallSummary, query)

    async def lineages(self, session_id: str, *, known: Collection[str] = ()) -> list[StoredLineage]:
        """Return how each call of the session relates to earlier calls, ordered by start. Load no messages.

        `known`: ids of calls to leave out; ignored if there are too many for one statement.
        """
        query = select(*_lineage).where(_c.session_id == session_id).order_by(_c.started_at, _c.call_id)
        if 0 < len(known) <= _MAX_BOUND_VALUES:
            query = query.where(_c.call_id.not_in(list(known)))
        return await self._rows(StoredLineage, query)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """The announcement of a call that is in progress or lost. Times in seconds since the epoch."""

    call_id: str
    session_id: str
    gateway: str
    started_at: float
    lease_expires_at: float


@dataclass(frozen=True, slots=True)
class Announcement:
    """The calls of one request, which are announced together."""

    calls: tuple[OpenCall, ...]
    session_id: str
    max_calls: int | None
    """Limit on the calls of the session, recorded and announced ones together."""


AnnouncementResult = Literal["announced", "closed", "spent"]
"""`announced`: the calls may be answered. `closed`: the session is closed. `spent`: the session would have more than
`max_calls` calls."""

_open_columns = row_columns(OpenCall, schema.open_calls)
_insert_open_calls = insert(schema.open_calls)


class OpenCallRepository(Repository):
    """Announcements of calls (see the top of this module).

    Announcements that arrive during a transaction are written together in the next one.
    """

    def __init__(self, database: Database, writer: GroupCommit) -> None:
        super().__init__(database)
        self._writer = writer
        self._announcements: BatchWriter[Announcement, AnnouncementResult] = BatchWriter(self._write_announcements)

    async def stop(self) -> None:
        """Wait until all announced calls are written to the database."""
        await self._announcements.stop()

    async def announce(
        self, gateway: str, session_id: str, call_ids: Sequence[str], seconds: float, *, max_calls: int | None = None
    ) -> AnnouncementResult:
        """Announce, with a lease of `seconds`, the calls that `gateway` is about to answer.

        Returns `announced` once every gateway can see the announcements. Only then may the calls be answered.
        """
        self._writer.shared = True
        now = time.time()
        calls = tuple(OpenCall(call_id, session_id, gateway, now, now + seconds) for call_id in call_ids)
        return await self._announcements.add(Announcement(calls, session_id, max_calls))

    async def _write_announcements(
        self, batch: Sequence[tuple[Announcement, asyncio.Future[AnnouncementResult]]]
    ) -> None:
        announcements = [announcement for announcement, _ in batch]
        try:
            results = await self._database.write(
                lambda connection: _insert_announcements(connection, announcements), PATIENCE_SECONDS
            )
        except StoreError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def renew(self, gateway: str, call_ids: Collection[str], seconds: float) -> None:
        """Extend the leases of calls that the gateway is still answering."""
        ids = list(call_ids)

        def write(connection: Connection) -> None:
            for first in range(0, len(ids), 1000):
                mine = and_(_o.gateway == gateway, _o.call_id.in_(ids[first : first + 1000]))
                expires_at = time.time() + seconds
                connection.execute(update(schema.open_calls).where(mine).values(lease_expires_at=expires_at))

        await self._database.write(write)

    async def of_session(self, session_id: str, *, without_gateway: str | None = None) -> list[OpenCall]:
        """Return the calls of a session that are in progress or lost, oldest first.

        `without_gateway`: leave out the calls of this gateway.
        """
        query = select(*_open_columns).where(_o.session_id == session_id).order_by(_o.started_at, _o.call_id)
        if without_gateway is not None:
            query = query.where(_o.gateway != without_gateway)
        return await self._rows(OpenCall, query)

    async def are_abandoned(self, session_id: str, call_ids: Collection[str]) -> bool:
        """Return whether the session has ended without waiting for these calls: the session is closed, and none of the
        calls is announced any more."""
        announced = select(_o.call_id).where(_o.call_id.in_(list(call_ids))).exists()
        closed = select(_s.session_id).where(_s.session_id == session_id, _s.closed_at.is_not(None), ~announced)
        return bool(await self._scalars(closed))

    async def take(self, session_id: str) -> list[OpenCall]:
        """Delete and return the remaining announcements of a session that has ended."""
        if not await self.of_session(session_id):
            return []
        deleted = delete(schema.open_calls).where(_o.session_id == session_id).returning(*_open_columns)
        return await self._database.write(lambda connection: [OpenCall(*row) for row in connection.execute(deleted)])

    async def gateways(self) -> set[str]:
        """Return the names of gateways with announced calls that are not committed, including gateways that died."""
        return set(await self._scalars(select(_o.gateway).distinct()))

    async def sweep(self, dead: Collection[str] = ()) -> list[OpenCall]:
        """Delete and return the announcements of `dead` gateways, and those whose lease has expired.

        But announcements of a rollout that still runs are kept, so that the lost calls are known when the rollout ends.
        If the gateway of a kept announcement is dead, the lease of the announcement ends now.
        """
        now = time.time()
        still_runs = select(_r.rollout_id).where(_r.session_id == _o.session_id, ~schema.rollout_is_final).exists()
        of_dead = _o.gateway.in_(list(dead))
        lost = or_(_o.lease_expires_at < now, of_dead)

        def write(connection: Connection) -> list[OpenCall]:
            deleted = delete(schema.open_calls).where(lost, ~still_runs).returning(*_open_columns)
            removed = [OpenCall(*row) for row in connection.execute(deleted)]
            expire = update(schema.open_calls).where(of_dead, _o.lease_expires_at > now)
            connection.execute(expire.values(lease_expires_at=now))
            return removed

        return await self._database.write(write)


def _insert_announcements(connection: Connection, batch: Sequence[Announcement]) -> list[AnnouncementResult]:
    """Insert the calls of each announcement. Leave out the whole announcement if its session is closed, or would then
    have more than `max_calls` calls."""
    ids = sorted({one.session_id for one in batch})
    limited = sorted({one.session_id for one in batch if one.max_calls is not None})
    # Sessions are locked in the order of their ids, as commits do. The lock makes this transaction wait for the closing
    # of a session and, with a limit, for the announcements of other gateways.
    query = (
        select(_s.session_id, _s.calls).where(_s.session_id.in_(ids), _s.closed_at.is_(None)).order_by(_s.session_id)
    )
    calls = {row.session_id: row.calls for row in connection.execute(query.with_for_update(read=not limited))}
    if limited:
        announced = select(_o.session_id, func.count()).where(_o.session_id.in_(limited)).group_by(_o.session_id)
        for session_id, count in connection.execute(announced):
            if session_id in calls:
                calls[session_id] += count
    results: list[AnnouncementResult] = []
    rows: list[OpenCall] = []
    for one in batch:
        if one.session_id not in calls:
            results.append("closed")
        elif one.max_calls is not None and calls[one.session_id] + len(one.calls) > one.max_calls:
            results.append("spent")
        else:
            results.append("announced")
            rows += one.calls
            calls[one.session_id] += len(one.calls)
    if rows:
        connection.execute(_insert_open_calls, [asdict(row) for row in rows])
    return results
