"""Queries on the last minutes: rates, active sessions and failures.

Ids sort by time of creation, so a range of ids finds the newest calls among millions without an index on times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, select

from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.types import FAILED, Json, encode_id

_RANGE_SECONDS = 1800.0
"""Calls that began longer ago than this are ignored, although some may have ended recently."""
_LISTED = 10
_ERROR_LENGTH = 300

_c, _r, _s = schema.calls.c, schema.rollouts.c, schema.sessions.c


@dataclass(frozen=True, slots=True)
class ActiveSessionRow:
    """A session with calls in the last minutes; the counts are those of the whole session."""

    session_id: str
    label: str | None
    rollout_id: str | None
    calls: int
    failed_calls: int
    completion_tokens: int
    last_call_at: float | None


@dataclass(frozen=True, slots=True)
class FailureRow:
    """A call or a rollout that failed."""

    at: float
    record_id: str
    session_id: str | None
    what: str
    """The status of the call, or status and cause of the rollout."""
    error: str | None


class ActivityRepository(Repository):
    """Rates, active sessions and failures of the last minutes."""

    async def rates(self, seconds: float) -> Json:
        """Return the counts of calls and rollouts that ended in the last `seconds` (at most half an hour)."""
        since = time.time() - seconds
        failed = func.sum(case((_c.status.in_(sorted(FAILED)), 1), else_=0))
        calls = select(
            func.count(), failed, func.sum(_c.prompt_tokens), func.sum(_c.cached_tokens), func.sum(_c.completion_tokens)
        ).where(_recent_calls(), _c.ended_at >= since)
        bad = func.sum(case((_r.status == "done", 0), else_=1))
        ended = select(func.count(), bad).where(_r.ended_at >= since, schema.rollout_is_final)

        def read(connection: Connection) -> tuple[Any, Any]:
            return connection.execute(calls).one(), connection.execute(ended).one()

        call_row, rollout_row = await self._database.read(read)
        names = ("calls", "failed_calls", "prompt_tokens", "cached_tokens", "completion_tokens")
        counts = dict(zip(names, call_row, strict=True)) | {
            "rollouts": rollout_row[0],
            "rollouts_not_done": rollout_row[1],
        }
        return {name: int(value or 0) for name, value in counts.items()}

    async def sessions(self, seconds: float) -> list[ActiveSessionRow]:
        """Return the sessions with a call that ended in the last `seconds`, the most recently used first."""
        recent = select(_c.session_id).where(_recent_calls(), _c.ended_at >= time.time() - seconds)
        query = select(*row_columns(ActiveSessionRow, schema.sessions)).where(_s.session_id.in_(recent))
        return await self._rows(ActiveSessionRow, query.order_by(_s.last_call_at.desc()).limit(_LISTED))

    async def unfinished(self) -> dict[str, int]:
        """Return the number of rollouts in each status that is not final."""
        query = select(_r.status, func.count()).where(~schema.rollout_is_final).group_by(_r.status)
        return dict(await self._rows(lambda status, count: (status, int(count)), query))

    async def failures(self) -> list[FailureRow]:
        """Return the newest failed calls and rollouts of the last half hour, newest first."""
        calls = (
            select(_c.ended_at, _c.call_id, _c.session_id, _c.status, _c.error)
            .where(_recent_calls(), _c.status.in_(sorted(FAILED)))
            .order_by(_c.call_id.desc())
        )
        status_and_cause: Any = _r.status + func.coalesce(" (" + _r.cause + ")", "")
        rollouts = (
            select(_r.ended_at, _r.rollout_id, _r.session_id, status_and_cause, _r.error)
            .where(_r.status.in_(["failed", "timed_out"]), _r.ended_at >= time.time() - _RANGE_SECONDS)
            .order_by(_r.ended_at.desc())
        )

        def read(connection: Connection) -> list[Any]:
            return [*connection.execute(calls.limit(_LISTED)), *connection.execute(rollouts.limit(_LISTED))]

        rows = await self._database.read(read)
        found = [
            FailureRow(at, name, session, what, error and error[:_ERROR_LENGTH])
            for at, name, session, what, error in rows
        ]
        return sorted(found, key=lambda one: one.at, reverse=True)[:_LISTED]


def _recent_calls() -> ColumnElement[bool]:
    return _c.call_id >= id_at("call", time.time() - _RANGE_SECONDS)


def id_at(prefix: str, seconds: float) -> str:
    """Return an id that sorts before every id created at or after `seconds` since the epoch."""
    return encode_id(prefix, int(seconds * 1e6) << 40)
