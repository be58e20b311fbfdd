"""Traces. The spans of a trace are stored. Its tokens are assembled from the calls whenever the trace is read.

Rescored log-probabilities are stored with their trace, because the calls do not have them.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.sequences import SpanError, assemble, find_problem, samplings_of
from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.encoding.cells import CellCodec
from polar_proxy.store.encoding.loader import OF_SESSION, OF_SESSIONS
from polar_proxy.store.repositories.rescores import fetch_for
from polar_proxy.types import CallRecord, Json, Logprobs, Span, Trace

_t = schema.traces.c
_p = schema.trace_spans.c
_x = schema.exclusions.c
_SAME_COLUMNS = (
    *("trace_id", "session_id", "rollout_id", "builder", "prompt_length", "reward", "grade"),
    *("parent_trace_id", "branch_at"),
)
"""The fields of a trace that are stored as they are, in columns of the same name."""


@dataclass(frozen=True, slots=True)
class SessionTraces:
    """The stored result of a builder for one session."""

    traces: tuple[Trace, ...]
    excluded: Mapping[str, str]
    """call id -> reason"""
    certificates: Mapping[str, Json | None]
    """trace id -> certificate in its stored form"""
    calls: Sequence[CallRecord]
    """All calls of the session, as recorded."""
    trace_calls: Sequence[CallRecord]
    """`calls` with the tokens that the traces refer to: for the builder `rescored`, the rescored tokens."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace without its tokens."""

    trace_id: str
    session_id: str
    rollout_id: str | None
    builder: str
    trace_index: int
    prompt_length: int
    length: int
    trained_tokens: int
    reward: float | None
    grade: str
    parent_trace_id: str | None
    branch_at: int
    call_ids: Sequence[str]
    certificate: Json | None
    """The stored part of its certificate (`traces/certificate.py`)."""

    @classmethod
    def of(cls, trace: Trace) -> TraceSummary:
        """Return the summary of a trace that is not stored and therefore has no certificate."""
        same = {name: getattr(trace, name) for name in _SAME_COLUMNS}
        return cls(
            **same,
            trace_index=trace.index,
            length=len(trace.token_ids),
            trained_tokens=trace.trained_tokens,
            call_ids=trace.call_ids,
            certificate=None,
        )


class TraceRepository(Repository):
    """Traces, the calls excluded from them, and their certificates."""

    async def put(
        self,
        traces: Sequence[Trace],
        excluded: Mapping[str, str],
        builder: str,
        session_id: str,
        rollout_id: str | None = None,
        certificates: Mapping[str, Json] | None = None,
        *,
        validated: bool = False,
    ) -> None:
        """Replace the traces and exclusions of this builder and session.

        `excluded`: call id -> reason, for the calls that are in no trace. `certificates`: trace id -> certificate. The
        tokens of a trace are not stored again, but read back from its calls. Raises StoreError, and changes nothing, if
        a trace does not match its calls or the other arguments, or branches from a trace that is not among `traces`.
        `validated`: a builder has just compared the traces with their calls, so they are not compared again.
        """
        ids = {trace.trace_id for trace in traces}
        for trace in traces:
            if trace.session_id != session_id or trace.builder != builder or trace.rollout_id != rollout_id:
                raise StoreError(f"The trace {trace.trace_id} belongs to another session, rollout or builder")
            if trace.parent_trace_id is not None and trace.parent_trace_id not in ids:
                raise StoreError(f"The trace {trace.trace_id} branches from a trace that is not stored with it")
        if traces and not validated:
            load_calls = await self._database.read(
                lambda connection: fetch_for(connection, OF_SESSION, {"session": session_id}, builder)
            )
            await asyncio.to_thread(lambda: _require_valid(traces, load_calls().of_traces))
        now = time.time()
        codec = CellCodec()
        rows = [_trace_row(trace, (certificates or {}).get(trace.trace_id), now, codec) for trace in traces]
        spans = [row for trace in traces for row in _span_rows(trace)]
        reasons = [
            {"session_id": session_id, "builder": builder, "call_id": call_id, "reason": reason}
            for call_id, reason in excluded.items()
        ]
        mine = (_t.session_id == session_id) & (_t.builder == builder)

        def write(connection: Connection) -> None:
            connection.execute(delete(schema.traces).where(mine))
            connection.execute(delete(schema.exclusions).where(_x.session_id == session_id, _x.builder == builder))
            for table, values in ((schema.traces, rows), (schema.trace_spans, spans), (schema.exclusions, reasons)):
                if values:
                    connection.execute(insert(table), values)

        await self._database.write(write)

    async def find(
        self, *, session_id: str | None = None, rollout_id: str | None = None, builder: str = "merged"
    ) -> list[Trace]:
        """Return the stored traces of a session or a rollout with their tokens, in the builder's order."""
        if (session_id is None) == (rollout_id is None):
            raise UsageError("Give either session_id or rollout_id")
        mine = _t.session_id == session_id if rollout_id is None else _t.rollout_id == rollout_id
        where = mine & (_t.builder == builder)

        def read(connection: Connection) -> Callable[[], list[Trace]]:
            rows, spans = _trace_rows(connection, where)
            if not rows:
                return list
            sessions = sorted({row.session_id for row in rows})
            load_calls = fetch_for(connection, OF_SESSIONS, {"sessions": sessions}, builder)
            return lambda: _rebuild(rows, spans, load_calls().of_traces)

        return await asyncio.to_thread(await self._database.read(read))

    async def of_session(self, session_id: str, *, builder: str = "merged", text: bool = True) -> SessionTraces:
        """Return the traces of a session with its calls, reading each call once.

        Without `text` the calls have tokens, but no messages and tools.
        """
        where = (_t.session_id == session_id) & (_t.builder == builder)

        def read(connection: Connection) -> Callable[[], SessionTraces]:
            rows, spans = _trace_rows(connection, where)
            excluded = _read_exclusions(connection, session_id, builder)
            # The calls come last, so that a call committed meanwhile cannot be missing.
            load_calls = fetch_for(connection, OF_SESSION, {"session": session_id}, builder, text=text)

            def load() -> SessionTraces:
                calls = load_calls()
                traces = _rebuild(rows, spans, calls.of_traces)
                certificates = {row.trace_id: row.certificate for row in rows}
                return SessionTraces(tuple(traces), excluded, certificates, calls.recorded, calls.of_traces)

            return load

        return await asyncio.to_thread(await self._database.read(read))

    async def summary(self, trace_id: str) -> TraceSummary | None:
        return await self._row(TraceSummary, _select_summaries.where(_t.trace_id == trace_id))

    async def summaries(self, session_id: str) -> list[TraceSummary]:
        """Return the traces of a session, made by any builder, without their tokens."""
        query = _select_summaries.where(_t.session_id == session_id).order_by(_t.builder, _t.trace_index)
        return await self._rows(TraceSummary, query)

    async def of_group(self, group_id: str, *, builder: str = "merged") -> dict[str, list[TraceSummary]]:
        """Return rollout id -> traces, for the rollouts of a group that have traces. The traces are in the builder's
        order and have no tokens."""
        members = select(schema.rollouts.c.rollout_id).where(schema.rollouts.c.group_id == group_id)
        query = _select_summaries.where(_t.rollout_id.in_(members), _t.builder == builder)
        found: dict[str, list[TraceSummary]] = defaultdict(list)
        for row in await self._rows(TraceSummary, query.order_by(_t.session_id, _t.trace_index)):
            found[str(row.rollout_id)].append(row)
        return found

    async def belongs_to(self, session_ids: Collection[str], trace_id: str) -> bool:
        """Return whether a trace, made by whichever builder, belongs to one of the sessions."""
        query = select(_t.trace_id).where(_t.trace_id == trace_id, _t.session_id.in_(session_ids))
        return bool(await self._scalars(query))

    async def set_audit(self, trace_id: str, grade: str, audit: Json) -> None:
        """Store the result of an audit in the trace's certificate, and set the grade of the trace and the certificate
        to `grade`. Replaces an earlier audit.

        Raises UsageError if the trace has no certificate or does not exist (a later build may have replaced it).
        """
        mine = _t.trace_id == trace_id

        def write(connection: Connection) -> None:
            # FOR UPDATE matters on PostgreSQL. On SQLite the transaction already holds the write lock.
            query = select(_t.session_id, _t.certificate).where(mine).with_for_update()
            found = connection.execute(query).one_or_none()
            if found is None:
                raise UsageError(f"There is no trace {trace_id}: its session was probably built again meanwhile")
            if found.certificate is None:
                raise UsageError(
                    f"The trace {trace_id} has no certificate. Build it again with `polar build {found.session_id}`"
                )
            certificate = {**found.certificate, "grade": grade, "audit": audit}
            connection.execute(update(schema.traces).where(mine).values(grade=grade, certificate=certificate))

        await self._database.write(write)

    async def exclusions(self, session_id: str, *, builder: str = "merged") -> dict[str, str]:
        """Return call id -> reason for the calls that are in no trace."""
        return await self._database.read(lambda connection: _read_exclusions(connection, session_id, builder))


_select_summaries = select(*row_columns(TraceSummary, schema.traces))


def _read_exclusions(connection: Connection, session_id: str, builder: str) -> dict[str, str]:
    query = select(_x.call_id, _x.reason).where(_x.session_id == session_id, _x.builder == builder)
    return {row.call_id: row.reason for row in connection.execute(query.order_by(_x.call_id))}


def _trace_rows(connection: Connection, where: ColumnElement[bool]) -> tuple[Sequence[Any], dict[str, list[Span]]]:
    """Return the rows of `traces` that meet `where`, in the builder's order. Also return trace id -> spans."""
    query = select(schema.traces).where(where).order_by(_t.session_id, _t.trace_index)
    rows = connection.execute(query).all()
    spans: dict[str, list[Span]] = defaultdict(list)
    if rows:
        joined = select(schema.trace_spans).join(schema.traces, _t.trace_id == _p.trace_id).where(where)
        for row in connection.execute(joined.order_by(_p.trace_id, _p.position)):
            span = Span(row.kind, row.call_id, row.start_token, row.end_token, row.choice_index)
            spans[row.trace_id].append(span)
    return rows, spans


def _trace_row(trace: Trace, certificate: Json | None, now: float, codec: CellCodec) -> dict[str, Any]:
    return {name: getattr(trace, name) for name in _SAME_COLUMNS} | {
        "trace_index": trace.index,
        "length": int(trace.token_ids.size),
        "trained_tokens": int(np.count_nonzero(trace.loss_mask)),
        "logprobs": codec.pack_logprobs(trace.logprobs[trace.loss_mask == 1]) if trace.rescored else None,
        "call_ids": list(trace.call_ids),
        "certificate": certificate,
        "created_at": now,
    }


def _span_rows(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "trace_id": trace.trace_id,
            "position": position,
            "kind": span.kind,
            "call_id": span.call_id,
            "choice_index": span.choice,
            "start_token": span.start,
            "end_token": span.end,
        }
        for position, span in enumerate(trace.spans)
    ]


def _rebuild(rows: Sequence[Any], spans: Mapping[str, Sequence[Span]], calls: Sequence[CallRecord]) -> list[Trace]:
    found = []
    codec = CellCodec()
    by_id = {call.call_id: call for call in calls}
    for row in rows:
        own = tuple(spans[row.trace_id])
        try:
            token_ids, loss_mask, logprobs = assemble(own, by_id)
        except SpanError as error:
            raise StoreError(f"The trace {row.trace_id} cannot be read: {error}") from error
        if row.logprobs is not None:
            logprobs = _rescored(row.trace_id, loss_mask, codec.unpack_logprobs(row.logprobs))
        found.append(
            Trace(
                **{name: getattr(row, name) for name in _SAME_COLUMNS},
                index=row.trace_index,
                token_ids=token_ids,
                loss_mask=loss_mask,
                logprobs=logprobs,
                spans=own,
                call_ids=tuple(row.call_ids),
                rescored=row.logprobs is not None,
                sampling=samplings_of(own, by_id),
            )
        )
    return found


def _require_valid(traces: Sequence[Trace], calls: Sequence[CallRecord]) -> None:
    by_id = {call.call_id: call for call in calls}
    for trace in traces:
        if (problem := find_problem(trace, by_id)) is not None:
            raise StoreError(f"The trace {trace.trace_id} does not match its calls: {problem}")


def _rescored(trace_id: str, loss_mask: Any, values: Logprobs) -> Logprobs:
    """Return float32 [n]: the stored values at the sampled positions, NaN elsewhere."""
    logprobs: Logprobs = np.full(loss_mask.size, np.nan, np.float32)
    if values.size != np.count_nonzero(loss_mask):
        raise StoreError(
            f"The trace {trace_id} has {values.size} stored log-probabilities, but "
            f"{np.count_nonzero(loss_mask)} sampled tokens: the database is damaged"
        )
    logprobs[loss_mask == 1] = values
    return logprobs
